"""A small policy with a chat template, trained here in seconds to play mrl's games and to call their tool.

Its turns open and end as those of Qwen; tools are called in Qwen's way. It plays badly, so that episodes have several
turns, and misspells some calls.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mrl.config.policy_tables import PromptTable
from mrl.models.tokenizers import train_byte_level
from mrl.models.turn_renderer import TurnRenderer
from mrl.models.warm_start import EncodedTurn, completion_loss, lr_factor, pad_rows
from mrl.records.episodes import Message
from mrl.tasks.environments.opening import named_class
from mrl.tasks.environments.tool_syntax import PLAIN
from mrl.tasks.environments.user_class import tools_of
from mrl.tasks.games.demonstrations import Said, demonstrated
from mrl.tasks.games.game_names import GAMES
from tests.support.engine_rig import Weights
from tests.support.forgetful_template import END, FORGETFUL, OPEN

TEMPLATE = (
    '{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }}{% endfor %}: <tool_call>{"name": ..., '
    '"arguments": ...}</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THOUGHT = "<think>hm</think>"
VOCAB = 320
ROWS, PEAK_LR = 24, 6e-3
SKILL = {"higher_lower": 0.0, "lookup": 0.8}


def talking_policy(folder: Path, *, steps: int, reasons: bool = False) -> Weights:
    """Make the folder of a policy trained for `steps` steps. The template of one that `reasons` drops its reasoning."""
    torch.manual_seed(1)
    rng = random.Random(1)
    episodes = [(game, _played(game, seed, rng)) for game in SKILL for seed in range(400)]
    thought = THOUGHT * reasons
    texts = [thought * 9] + [f"{prompt}\n{completion}\n" for _, turns in episodes for prompt, completion in turns]
    tokenizer = train_byte_level([*texts, '<tool_call>{"name": "lookup", "arguments": {"key": "'] * 2, VOCAB - 2)
    tokenizer.add_special_tokens({"eos_token": END, "additional_special_tokens": [OPEN]})
    tokenizer.chat_template = FORGETFUL if reasons else TEMPLATE
    tokenizer.save_pretrained(folder)
    end = int(tokenizer.convert_tokens_to_ids(END))
    shape = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the smallest of vLLM's attention on a CPU
        intermediate_size=128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=end,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(shape)
    model.save_pretrained(folder)
    renderer = TurnRenderer(folder, PromptTable(history="template" if reasons else "sampled"), eos_ids=[end])
    rows = [row for game, turns in episodes for row in _rows(game, turns, renderer, end, thought)]
    _learn(model, rows, steps, rng)
    model.eval().save_pretrained(folder)
    return Weights(folder, model)


def _played(game: str, seed: int, rng: random.Random) -> Said:
    return demonstrated(game, seed, rng, skill=SKILL[game])


def _rows(game: str, turns: Said, renderer: TurnRenderer, end: int, thought: str) -> list[list[EncodedTurn]]:
    """Make a training row for every turn, each of which begins with a thought."""
    name = GAMES[game]
    tools = [tool.spec.as_chat() for tool in tools_of(named_class(name), name).values()]
    conversation = [Message("user", turns[0][0])]
    row = renderer.opening(conversation, tools).tolist()
    found = []
    for (_, completion), following in zip(turns, [*turns[1:], None], strict=True):
        said = PLAIN.read(completion)
        text = renderer.said(thought + said.content, said.tool_calls)
        assert text is not None
        spelled = renderer.turn(text, eos_id=end)
        found.append([(row, spelled.tolist())])
        if following:
            answer = Message("tool" if said.tool_calls else "user", following[0])
            conversation += [Message("assistant", thought + said.content, said.tool_calls), answer]
            anew = renderer.anew(conversation, tools)
            bridge = renderer.bridge(spelled.tolist(), said.tool_calls, [answer])
            row = [*row, *spelled.tolist(), *bridge.tolist()] if anew is None else anew[0].tolist()
    return found


def _learn(model: Qwen3ForCausalLM, rows: Sequence[Sequence[EncodedTurn]], steps: int, rng: random.Random) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * lr_factor(step, steps)
        loss = completion_loss(model, *pad_rows(rng.sample(rows, ROWS), model.device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
