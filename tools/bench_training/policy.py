"""A policy that answers in a known way, so that the lengths of its answers are neither forced nor left to chance.

Its next token depends on the newest one alone: thinking token i is followed by thinking token i + 1, or by the closing
tokens. That makes a policy of known lengths a matter of algebra, where training one would take many minutes. Its blocks
are those of any Qwen3 and are computed and trained in full; they only begin with small outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from bench_training.answers import Float64s
from mrl.models.tokenizers import TOKENIZERS

HIDDEN, LAYERS, HEADS, MAX_POSITIONS = 256, 5, 4, 512
"""Shape of the model: 4.2 M parameters with the vocabulary."""
VOCAB_SIZE = 640
VARIANTS = 2
"""Number of equally likely tokens for every place of the chain, so that log-probabilities are not all 0."""
DIGITS = "12"
"""Digits that a policy answers, one as likely as the other."""
LIFT = 16.0
"""Logit of a certain token above that of one that never follows: all others together have a share of 1e-4."""
BLOCK_SHARE = 0.1
"""Share of the outputs of random weights with which the blocks begin."""


@dataclass(frozen=True)
class Follower:
    """Tokens that may follow a state, with their probabilities."""

    token_ids: list[int]
    probabilities: list[float]


def make_tokenizer(prompts: Sequence[str]) -> PreTrainedTokenizerBase:
    """Make a byte-level BPE tokenizer that knows the words of the prompts."""
    closings = [f"<answer>{digit}</answer>" for digit in DIGITS for _ in prompts]
    words = [f"{first}{second} " for first in _SYLLABLES for second in _SYLLABLES for _ in range(3)]
    return TOKENIZERS["byte_level"]([prompt + "\n" for prompt in prompts] + closings + words, VOCAB_SIZE)


_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


def make_policy(folder: Path, tokenizer: PreTrainedTokenizerBase, stops: Float64s, *, seed: int) -> None:
    """Write a Hugging Face folder with a policy whose chains stop by `stops` ([S], see `answers.py`)."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        head_dim=HIDDEN // HEADS,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    states, followers = next_tokens(tokenizer, stops)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(BLOCK_SHARE)
        embedding_VD, head_VD = fit(states, followers, vocab_size=len(tokenizer), hidden=HIDDEN)
        model.model.embed_tokens.weight.copy_(embedding_VD)
        model.lm_head.weight.copy_(head_VD)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def next_tokens(tokenizer: PreTrainedTokenizerBase, stops: Float64s) -> tuple[list[list[int]], list[Follower]]:
    """Return the states, each as the tokens that put the policy there, and for each the tokens that follow it.

    The states are the end of the prompt, S places of the chain, `<answer>`, a digit, `</answer>`.
    """
    (line_end,) = _ids(tokenizer, "\n")
    (opening,), (closing,) = _ids(tokenizer, "<answer>"), _ids(tokenizer, "</answer>")
    digits = [token for digit in DIGITS for token in _ids(tokenizer, digit)]
    taken = {line_end, opening, closing, *digits, *tokenizer.all_special_ids}
    free = [token for token in range(len(tokenizer)) if token not in taken and "<" not in tokenizer.decode([token])]
    chain = [free[place * VARIANTS : (place + 1) * VARIANTS] for place in range(len(stops))]
    assert len(chain[-1]) == VARIANTS, "the vocabulary has a token for every place"
    followers = [_either(chain[0])]
    for stop, after in zip(stops, [*chain[1:], chain[-1]], strict=True):
        followers.append(Follower([opening, *after], [stop, *_shared(1.0 - stop, after)]))
    followers += [_either(digits), _either([closing]), _either([tokenizer.eos_token_id])]
    return [[line_end], *chain, [opening], digits, [closing]], followers


def fit(
    states: Sequence[Sequence[int]], followers: Sequence[Follower], *, vocab_size: int, hidden: int
) -> tuple[Tensor, Tensor]:
    """Return [V, D] embedding and head: head @ norm(embedding[token]) = LIFT + log p of a possible next token, else 0.

    Every state has a direction of its own, so there are at most D of them; tokens without a state share the rest.
    """
    directions_DD = torch.linalg.qr(torch.randn(hidden, hidden)).Q
    length = hidden**0.5  # a root mean square of 1, which the norm leaves as it is
    rest = directions_DD[len(states) :]
    others_VD = torch.randn(vocab_size, len(rest)) @ rest
    embedding_VD = length * others_VD / others_VD.norm(dim=-1, keepdim=True)
    head_VD = torch.zeros(vocab_size, hidden)
    for direction_D, tokens, follower in zip(directions_DD, states, followers, strict=False):
        embedding_VD[list(tokens)] = length * direction_D
        for token, probability in zip(follower.token_ids, follower.probabilities, strict=True):
            if probability > 0.0:
                head_VD[token] += (LIFT + float(np.log(probability))) / length * direction_D
    return embedding_VD, head_VD


def _either(tokens: list[int]) -> Follower:
    return Follower(tokens, _shared(1.0, tokens))


def _shared(probability: float, tokens: Sequence[int]) -> list[float]:
    return [probability / len(tokens)] * len(tokens)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
