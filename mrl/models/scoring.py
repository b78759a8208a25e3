"""Log-probabilities of given texts by plain forwards: for the canary, and for peers that ask for scores."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from mrl.models.heads import head_shape

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]

MAX_LOGITS = 1 << 26
"""Logits that one forward may make: 256 MiB of float32."""
TOKENS_AT_ONCE = 8192
"""Tokens of several answers with their prompts in one forward, at most; a longer answer is read alone."""


def writes_in_forwards(model: nn.Module) -> bool:
    """Whether a forward changes the model: rotary frequencies that follow the longest row lie in its buffers."""
    kinds = (getattr(module, "rope_type", "") for module in model.modules())
    names = {name for kind in kinds for name in (kind.values() if isinstance(kind, dict) else [kind])}
    return any(name == "longrope" or "dynamic" in name for name in names)


def rows_at_once(longest: int, vocab_size: int, max_logits: int = MAX_LOGITS) -> int:
    """Return how many rows of `longest` tokens one forward may read, at least one."""
    return max(1, max_logits // (longest * vocab_size))


@torch.no_grad()
def score_tokens(
    model: nn.Module, token_ids: Sequence[Sequence[int]], *, max_logits: int = MAX_LOGITS
) -> list[list[float]]:
    """Return log-probabilities in nats of every token of each sequence after its first, at temperature 1.

    Sequences are padded on the right, where causal attention never looks. They go through the model in as few forwards
    as `max_logits` allows, one sequence at least in each.
    """
    longest = max((len(row) for row in token_ids), default=1)
    per_pass = rows_at_once(longest, _vocab_size(model), max_logits)
    scored: list[list[float]] = []
    for start in range(0, len(token_ids), per_pass):
        scored += _score_sequences(model, token_ids[start : start + per_pass])
    return scored


def _score_sequences(model: nn.Module, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
    filled = np.zeros((len(token_ids), max(len(row) for row in token_ids)), dtype=np.int64)
    for row, ids in enumerate(token_ids):
        filled[row, : len(ids)] = ids
    logprobs = next_token_logprobs(model, torch.from_numpy(filled).to(next(model.parameters()).device))
    return [found[: len(ids) - 1] for found, ids in zip(logprobs.tolist(), token_ids, strict=True)]


def next_token_logprobs(model: nn.Module, ids: Tensor) -> Tensor:
    """Return [rows, T - 1] log-probabilities in nats of the tokens of [rows, T] after the first."""
    output: Any = model(input_ids=ids, use_cache=False)
    logits: Tensor = output.logits[:, :-1].float()
    norms = torch.stack([row.logsumexp(-1) for row in logits])  # a row at a time: exponentials need memory
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1) - norms


@torch.inference_mode()
def score_beside_likeliest(model: nn.Module, token_ids: Sequence[int]) -> list[tuple[float, int, float]]:
    """Return, for every token after the first, its log-probability in nats at temperature 1, the likeliest token in its
    place, and that token's log-probability.
    """
    found = beside_likeliest(model, torch.tensor([list(token_ids)], device=next(model.parameters()).device))
    return list(zip(*(values.tolist() for values in found), strict=True))


def beside_likeliest(model: nn.Module, ids: Tensor, *, max_logits: int = MAX_LOGITS) -> tuple[Tensor, Tensor, Tensor]:
    """Return three [T - 1] tensors for the tokens of [1, T] after the first: their log-probabilities, the likeliest
    tokens in their places, and the log-probabilities of these.

    The blocks run once over all tokens. The head takes as many places at a time as make `max_logits`, one at least.
    """
    hidden: Tensor = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]  # type: ignore[operator]
    at_once = rows_at_once(1, _vocab_size(model), max_logits)
    parts = [
        _beside_likeliest(model, some, given)
        for some, given in zip(hidden.split(at_once), ids[0, 1:].split(at_once), strict=True)
    ]
    logprobs, places, likeliest = (torch.cat(values) for values in zip(*parts, strict=True))
    return logprobs, places, likeliest


def _beside_likeliest(model: nn.Module, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same three, [N] each, for [N] tokens that follow [N, D] hidden states."""
    logits = _logits(model, hidden).float()
    norms = logits.logsumexp(-1)
    likeliest, places = logits.max(-1)
    return logits.gather(-1, ids[:, None]).squeeze(-1) - norms, places, likeliest - norms


def _logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """Return [N, V] logits of [N, D] hidden states as the model itself computes them, in its own number format."""
    shape = head_shape(model)
    logits: Tensor = model.get_output_embeddings()(hidden)  # type: ignore[operator]
    if shape.divisor != 1:
        logits = logits / shape.divisor
    return logits if shape.softcap is None else (logits / shape.softcap).tanh() * shape.softcap


def _vocab_size(model: nn.Module) -> int:
    return model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]


@torch.inference_mode()
def score_answers(
    model: nn.Module,
    prompt_token_ids: npt.NDArray[np.int32],
    answers: Sequence[npt.NDArray[np.int32]],
    *,
    temperature: float,
    num_likeliest: int = 0,
    max_logits: int = MAX_LOGITS,
) -> list[tuple[Float32s, Int32s, Float32s]]:
    """Return [T] log-probabilities in nats of the tokens of each answer to one prompt, at the sampling temperature.

    With them come, [T, K] each, the `num_likeliest` ids in the place of each token, best first, and their
    log-probabilities.

    Answers follow the prompt, padded on the right, where causal attention never looks; so no mask is needed. They go
    through the model in as few forwards as `max_logits` allows, a long answer in several that keep keys and values. The
    split depends on the arguments alone: the same arguments give the same bits.
    """
    if not answers:
        return []
    longest = max(answer.size for answer in answers)
    several = TOKENS_AT_ONCE // (prompt_token_ids.size + longest)
    per_pass = max(1, min(several, rows_at_once(longest, _vocab_size(model), max_logits)))
    scored: list[tuple[Float32s, Int32s, Float32s]] = []
    for start in range(0, len(answers), per_pass):
        some = answers[start : start + per_pass]
        ids = np.zeros((len(some), prompt_token_ids.size + longest), dtype=np.int64)
        ids[:, : prompt_token_ids.size] = prompt_token_ids
        for row, answer in enumerate(some):
            ids[row, prompt_token_ids.size : prompt_token_ids.size + answer.size] = answer
        rows = torch.from_numpy(ids).to(next(model.parameters()).device)
        found = last_logprobs(
            model, rows, longest, temperature=temperature, num_likeliest=num_likeliest, max_logits=max_logits
        )
        logprobs, ids_RTK, logprobs_RTK = (values.cpu().numpy() for values in found)
        for row, answer in enumerate(some):
            here = row, slice(answer.size)
            scored.append((logprobs[here], ids_RTK[here].astype(np.int32), logprobs_RTK[here]))
    return scored


def last_logprobs(
    model: nn.Module,
    ids: Tensor,
    count: int,
    *,
    temperature: float,
    num_likeliest: int = 0,
    max_logits: int = MAX_LOGITS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return [rows, count] log-probabilities in nats of the last `count` tokens of [rows, T]; at least one token is
    before them.

    With them come, [rows, count, K] each, the `num_likeliest` ids in the place of each token, best first, and their
    log-probabilities.

    With a long answer and a large vocabulary the logits would take more memory than the model. So each forward reads
    only as many tokens as make `max_logits`, and the first one reads the tokens before the last `count` as well.
    """
    at_once = rows_at_once(len(ids), _vocab_size(model), max_logits)
    cache = DynamicCache() if at_once < count else None
    parts, first, read = [], ids.shape[1] - count, 0
    for start in range(first, ids.shape[1], at_once):
        wanted = ids[:, start : start + at_once]
        end = start + wanted.shape[1] - 1  # the last token predicts nothing
        output: Any = model(
            input_ids=ids[:, read:end],
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=wanted.shape[1],
        )
        logits: Tensor = output.logits.float() / temperature
        norms = logits.logsumexp(-1, keepdim=True)
        best, best_ids = logits.topk(num_likeliest)
        parts.append(((logits.gather(-1, wanted[..., None]) - norms).squeeze(-1), best_ids, best - norms))
        read = end
    logprobs, best_ids, best = (torch.cat(values, dim=1) for values in zip(*parts, strict=True))
    return logprobs, best_ids, best
