"""Training examples become packed tensors: the only bridge from what regimes say to what the model sees.

Rows are laid end to end into sequences of L tokens. Position ids start again at every row, from which transformers
derives that attention never crosses a row. The last answer token is a target only, so a row takes P + T - 1 places.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl.sharing.regime import Component, TrainingExample

COLUMNS = {
    "predict_at_T": torch.int64,
    "target_ids_T": torch.int64,
    "component_T": torch.int64,
    "advantages_T": torch.float32,
    "weights_T": torch.float32,
    "behaviour_logprobs_T": torch.float32,
    "teacher_logprobs_T": torch.float32,
    "row_T": torch.int64,
}
"""The token-wise tensors that every batch has."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One forward pass: N sequences of L tokens that hold T answer tokens.

    The token-wise tensors are flat over all rows. `predict_at_T[t]` is the place, in the flattened [N * L] sequences,
    whose hidden state predicts answer token t. `behaviour_logprobs_T` is 0 for rows without behaviour,
    `teacher_logprobs_T` NaN for rows without a teacher. Both hold the log-prob of the token's span; spans are numbered
    from 0 over all rows, None says that every token is one. A row is in one batch, and its tokens stand together.
    """

    input_ids_NL: Tensor
    position_ids_NL: Tensor
    predict_at_T: Tensor
    target_ids_T: Tensor
    component_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor
    behaviour_logprobs_T: Tensor
    teacher_logprobs_T: Tensor
    row_T: Tensor
    """Which of the packed examples each token belongs to."""
    behaviour_span_T: Tensor | None = None
    teacher_span_T: Tensor | None = None

    def to(self, device: torch.device) -> "PackedBatch":
        """The same batch on another device."""
        tensors: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        return PackedBatch(**{name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None})


def row_tokens(example: TrainingExample) -> int:
    """Places that a row takes."""
    return example.prompt_token_ids.size + example.answer_token_ids.size - 1


def fill_bins(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: indices of rows per bin, every bin holding at most `capacity` tokens.

    A row longer than `capacity` is a mistake of the caller.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        assert lengths[index] <= capacity, "the caller sets capacity to at least the longest row"
        place = next((b for b, free in enumerate(room) if free >= lengths[index]), None)
        if place is None:
            bins.append([])
            room.append(capacity)
            place = len(bins) - 1
        bins[place].append(index)
        room[place] -= lengths[index]
    return bins


def deal(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Rows of so many tokens dealt over ranks, the longest first, each to the rank that has least so far.

    Indices per rank, ascending. No rank has more than the least loaded one and a longest row beside it.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + lengths[index], rank))
    return [sorted(share) for share in shares]


def pack(
    examples: Sequence[TrainingExample],
    components: Sequence[Component],
    *,
    pack_tokens: int,
    microbatch_tokens: int,
    rank: int = 0,
    world_size: int = 1,
) -> list[PackedBatch]:
    """This rank's share of the rows as forward passes of at most `microbatch_tokens` (at least one sequence) each.

    All ranks call it with the same arguments but `rank`; together they hold every row once. All get the same number of
    passes, the last of them without a row where a rank has less to do: a forward is a matter of all ranks.
    """
    if not examples:
        return []
    lengths = [row_tokens(example) for example in examples]
    capacity = max(pack_tokens, max(lengths))
    bins_of = [
        [[share[index] for index in rows] for rows in fill_bins([lengths[place] for place in share], capacity)]
        for share in deal(lengths, world_size)
    ]
    per_pass = max(1, microbatch_tokens // capacity)
    index_of = {component.name: index for index, component in enumerate(components)}
    longest = max(len(bins) for bins in bins_of)
    starts = range(0, longest, per_pass)
    return [_lay_out(examples, bins_of[rank][start : start + per_pass], capacity, index_of) for start in starts]


def _lay_out(
    examples: Sequence[TrainingExample], bins: list[list[int]], capacity: int, index_of: dict[str, int]
) -> PackedBatch:
    if not bins:
        return _empty()
    input_ids = np.zeros((len(bins), capacity), dtype=np.int64)
    position_ids = np.zeros((len(bins), capacity), dtype=np.int64)
    columns: list[dict[str, npt.NDArray[Any]]] = []
    for sequence, rows in enumerate(bins):
        start = 0
        for place in rows:
            row = examples[place]
            tokens = np.concatenate([row.prompt_token_ids, row.answer_token_ids])[:-1]
            input_ids[sequence, start : start + tokens.size] = tokens
            position_ids[sequence, start : start + tokens.size] = np.arange(tokens.size)
            first = sequence * capacity + start + row.prompt_token_ids.size - 1
            columns.append(_token_columns(row, place, first, index_of[row.component]))
            start += tokens.size
    packed = [examples[place] for rows in bins for place in rows]
    sizes = [row.answer_token_ids.size for row in packed]
    return PackedBatch(
        input_ids_NL=torch.from_numpy(input_ids),
        position_ids_NL=torch.from_numpy(position_ids),
        behaviour_span_T=_spans([row.behaviour_spans for row in packed], sizes),
        teacher_span_T=_spans([row.teacher_spans for row in packed], sizes),
        **{name: torch.from_numpy(np.concatenate([row[name] for row in columns])) for name in columns[0]},
    )


def _empty() -> PackedBatch:
    """A pass over one place that belongs to no row."""
    place_NL = torch.zeros((1, 1), dtype=torch.int64)
    nothing = {name: torch.zeros(0, dtype=dtype) for name, dtype in COLUMNS.items()}
    return PackedBatch(input_ids_NL=place_NL, position_ids_NL=place_NL, **nothing)


def _spans(spans: Sequence[npt.NDArray[np.int32] | None], sizes: Sequence[int]) -> Tensor | None:
    """[T] spans of all rows, numbered on; a row without any has one per token. None when no row has any."""
    if all(of_row is None for of_row in spans):
        return None
    starts = np.cumsum([0, *sizes])[:-1]  # a row has at most as many spans as tokens
    rows = zip(starts, sizes, spans, strict=True)
    return torch.from_numpy(np.concatenate([start + (np.arange(n) if row is None else row) for start, n, row in rows]))


def _token_columns(row: TrainingExample, place: int, first: int, component: int) -> dict[str, npt.NDArray[Any]]:
    """One row's part of the token-wise tensors, by their names in `PackedBatch`."""
    num_tokens = row.answer_token_ids.size
    behaviour = np.zeros(num_tokens) if row.behaviour_logprobs is None else row.behaviour_logprobs
    teacher = np.full(num_tokens, np.nan) if row.teacher_logprobs is None else row.teacher_logprobs
    return {
        "predict_at_T": np.arange(first, first + num_tokens, dtype=np.int64),
        "target_ids_T": row.answer_token_ids.astype(np.int64),
        "component_T": np.full(num_tokens, component, dtype=np.int64),
        "advantages_T": row.advantages.astype(np.float32),
        "weights_T": row.weights.astype(np.float32),
        "behaviour_logprobs_T": behaviour.astype(np.float32),
        "teacher_logprobs_T": teacher.astype(np.float32),
        "row_T": np.full(num_tokens, place, dtype=np.int64),
    }
