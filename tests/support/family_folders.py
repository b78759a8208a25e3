"""Folders of models whose families the package `renderers` knows: their tokens, and chat templates that render alike.

The part of such a template on tools is taken from the package itself; the turns are written here.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

QUOTE = '<|"|>'
TOKENS = {
    "qwen3.5": (
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
        *("<tool_response>", "</tool_response>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
        "<|video_pad|>",
    ),
    "gemma4": (
        *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", QUOTE),
        *("<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", "<|think|>", "<|image>", "<image|>"),
        *("<|image|>", "<|audio>", "<audio|>", "<|audio|>", "<|video|>"),
    ),
    "glm-4.5": (
        *("<|endoftext|>", "[MASK]", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>"),
        *("</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
    ),
    "minimax-m2": (
        *("]!p~[", "]~!b[", "]~b]", "[e~[", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
    ),
}
ENDS = {"qwen3.5": "<|im_end|>", "gemma4": "<turn|>", "glm-4.5": "<|endoftext|>", "minimax-m2": "[e~["}
CONTENT = "{% for m in messages %}{{ m.content }}{% endfor %}"
"""Template of families of which only calls are tested."""
TURNS = {
    "qwen3.5": (
        "{% for m in messages %}{% set is_tool = m.role == 'tool' %}"
        "{% if not is_tool %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
        "{% elif loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
        "{% if is_tool %}{{ '\n' }}<tool_response>\n{{ m.content | trim }}\n</tool_response>{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ '\n\n' if m.content | trim and loop.first else '\n' if not loop.first }}"
        "<tool_call>\n<function={{ c.function.name }}>\n{% for key, value in c.function.arguments.items() %}"
        "<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
        "</function>\n</tool_call>{% endfor %}"
        "{% if not is_tool or loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    ),
    "gemma4": (
        "{% for m in messages %}{% if m.role == 'tool' %}response:{{ m.name }}{value:QUOTE{{ m.content }}QUOTE}"
        "<tool_response|>{% elif m.tool_calls %}<|turn>model\n{{ m.content }}{% for c in m.tool_calls %}<|tool_call>"
        "call:{{ c.function.name }}{{ '{' }}{% for key, value in c.function.arguments.items() %}{{ key }}:"
        "QUOTE{{ value }}QUOTE{% endfor %}}<tool_call|>{% endfor %}"
        "{{ '<turn|>\n' if loop.last else '<|tool_response>' }}{% else %}<|turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<turn|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n{% endif %}"
    ).replace("QUOTE", QUOTE),
}
"""Templates of turns, without tools. A turn of Gemma that calls goes on behind the answer, which cannot be read off."""
SHOWN_TOOL = {"type": "function", "function": {"name": "f", "description": "g", "parameters": {"type": "object"}}}


def write_family(
    folder: Path, tokenizer: PreTrainedTokenizerFast, family: str, *, tool: dict[str, Any] = SHOWN_TOOL
) -> PreTrainedTokenizerFast:
    """Make the folder of a model of this family; return its tokenizer. Gemma's template shows `tool` and no other."""
    tokens = [AddedToken(token, special=True, normalized=False) for token in TOKENS[family]]
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.eos_token = ENDS[family]
    tokenizer.chat_template = told_of_tools(tokenizer, family, tool) + TURNS.get(family, CONTENT)
    if family == "gemma4":
        tokenizer.bos_token = "<bos>"
        tokenizer.chat_template = "<bos>" + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").touch()
    return tokenizer


def told_of_tools(tokenizer: PreTrainedTokenizerFast, family: str, tool: dict[str, Any]) -> str:
    """Return the part of a template in which the family describes its tools."""
    from renderers import config_from_name, create_renderer

    renderer = create_renderer(tokenizer, config_from_name(family))
    chat = [{"role": "user", "content": "?"}]
    plain, shown = (
        tokenizer.decode(renderer.render_ids(chat, tools=tools, add_generation_prompt=True)) for tools in (None, [tool])
    )
    user = plain.removeprefix("<bos>")
    told = shown.removeprefix("<bos>").removesuffix(user)
    before, spelled, behind = told.partition(json.dumps(tool))
    tools = "{% for t in tools %}{{ '\n' if not loop.first }}{{ t | tojson }}{% endfor %}" if spelled else ""
    return f"{{% if tools %}}{_raw(before)}{tools}{_raw(behind)}{{% endif %}}"


def _raw(text: str) -> str:
    """Return literal text of a template; a line break at its end stays."""
    return f"{{{{ {json.dumps(text)} }}}}"
