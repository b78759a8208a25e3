"""Which of several EOS ids closes what a policy is given as its own answer."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from mrl.config.policy_tables import PolicyTable
from mrl.models.tokenizers import train_byte_level
from mrl.processes.episode_setup import own_receiver

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HEADERS = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}"
)
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
OPENED_BY_ROLE = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
ONLY_PROMPTS = "{% for m in messages %}{{ raise_exception('no answers') if m.role == 'assistant' }}{% endfor %}"
GEMMA_ENDS = ["<eos>", "<end_of_turn>"]


@pytest.fixture
def policy(tmp_path):
    """Makes a folder: its EOS tokens, the one that its tokenizer names, its template."""

    def make(ends: list[str], template: str, **prompt: str) -> tuple[PolicyTable, PreTrainedTokenizerFast]:
        tokenizer = train_byte_level(["answer yah one two three"] * 3, 400)
        tokenizer.add_special_tokens({"eos_token": ends[0], "additional_special_tokens": ends[1:]})
        tokenizer.chat_template = template or None
        tokenizer.save_pretrained(tmp_path)
        ids = sorted(tokenizer.convert_tokens_to_ids(ends))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        return PolicyTable.model_validate({"model": str(tmp_path), "prompt": prompt}), tokenizer

    return make


@pytest.mark.parametrize(
    ("ends", "template", "prompt", "closes"),
    [
        (["<|im_end|>", "<|endoftext|>"], CHATML, {}, "<|im_end|>"),
        (["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], HEADERS, {}, "<|eot_id|>"),
        (GEMMA_ENDS, GEMMA, {}, "<end_of_turn>"),
        (["<|endoftext|>", "<|assistant|>", "<|end|>"], PHI, {}, "<|end|>"),
        (["</s>"], INST, {}, "</s>"),
        (["<|endoftext|>", "<|user|>", "<|observation|>"], OPENED_BY_ROLE, {}, "<|user|>"),
        (["<|endoftext|>", "<|observation|>"], OPENED_BY_ROLE, {}, "<|endoftext|>"),
        (GEMMA_ENDS, CHATML, {"chat_template": GEMMA}, "<end_of_turn>"),
        (GEMMA_ENDS, CHATML, {}, "<eos>"),
        (GEMMA_ENDS, ONLY_PROMPTS, {}, "<eos>"),
        (GEMMA_ENDS, "<end_of_turn>", {}, "<eos>"),
        (GEMMA_ENDS, "", {}, "<eos>"),
    ],
    ids=[
        *("qwen", "llama", "gemma", "phi", "mistral", "glm", "roles that end nothing"),
        *("own template", "another end", "a template of prompts alone", "one that shows no answer", "no template"),
    ],
)
def test_the_template_says_what_closes_an_answer(policy, ends, template, prompt, closes):
    """Where it writes none of the ids behind an answer, the one that the tokenizer names; all of them end sampling."""
    table, tokenizer = policy(ends, template, **prompt)
    receiver = own_receiver(table)
    assert tokenizer.convert_ids_to_tokens(receiver.eos_id) == closes
    assert set(receiver.eos_ids) == set(tokenizer.convert_tokens_to_ids(ends))
