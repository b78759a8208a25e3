"""Training examples become packed tensors: the only bridge from what regimes say to what the model sees.

Rows are laid end to end into sequences of L tokens. Position ids start again at every row, from which transformers
derives that attention never crosses a row. The last answer token is a target only, so a row takes P + T - 1 places.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl.sharing.regime import Component, TrainingExample


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One forward pass: N sequences of L tokens that hold T answer tokens.

    The token-wise tensors are flat over all rows. `predict_at_T[t]` is the place, in the flattened [N * L] sequences,
    whose hidden state predicts answer token t. `behaviour_logprobs_T` is 0 where `component_T` has no behaviour.
    """

    input_ids_NL: Tensor
    position_ids_NL: Tensor
    predict_at_T: Tensor
    target_ids_T: Tensor
    component_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor
    behaviour_logprobs_T: Tensor
    row_T: Tensor
    """Which of the packed examples each token belongs to."""

    def to(self, device: torch.device) -> "PackedBatch":
        """The same batch on another device."""
        return PackedBatch(*(getattr(self, name).to(device) for name in self.__slots__))


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

    All ranks call it with the same arguments but `rank`; together they hold every row once. All sequences have the same
    length, so ranks get equal work when the number of sequences divides evenly.
    """
    if not examples:
        return []
    lengths = [row_tokens(example) for example in examples]
    capacity = max(pack_tokens, max(lengths))
    own_bins = fill_bins(lengths, capacity)[rank::world_size]
    per_pass = max(1, microbatch_tokens // capacity)
    index_of = {component.name: index for index, component in enumerate(components)}
    return [
        _lay_out(examples, own_bins[start : start + per_pass], capacity, index_of)
        for start in range(0, len(own_bins), per_pass)
    ]


def _lay_out(
    examples: Sequence[TrainingExample], bins: list[list[int]], capacity: int, index_of: dict[str, int]
) -> PackedBatch:
    input_ids = np.zeros((len(bins), capacity), dtype=np.int64)
    position_ids = np.zeros((len(bins), capacity), dtype=np.int64)
    columns: list[list[npt.NDArray[np.generic]]] = [[] for _ in range(7)]
    for sequence, rows in enumerate(bins):
        start = 0
        for place in rows:
            row = examples[place]
            tokens = np.concatenate([row.prompt_token_ids, row.answer_token_ids])[:-1]
            input_ids[sequence, start : start + tokens.size] = tokens
            position_ids[sequence, start : start + tokens.size] = np.arange(tokens.size)
            first = sequence * capacity + start + row.prompt_token_ids.size - 1
            for column, values in zip(columns, _token_columns(row, place, first, index_of[row.component]), strict=True):
                column.append(values)
            start += tokens.size
    predict_at, targets, component, advantages, weights, behaviour, places = (
        np.concatenate(column) for column in columns
    )
    return PackedBatch(
        torch.from_numpy(input_ids),
        torch.from_numpy(position_ids),
        torch.from_numpy(predict_at),
        torch.from_numpy(targets),
        torch.from_numpy(component),
        torch.from_numpy(advantages),
        torch.from_numpy(weights),
        torch.from_numpy(behaviour),
        torch.from_numpy(places),
    )


def _token_columns(row: TrainingExample, place: int, first: int, component: int) -> list[npt.NDArray[np.generic]]:
    num_tokens = row.answer_token_ids.size
    behaviour = np.zeros(num_tokens) if row.behaviour_logprobs is None else row.behaviour_logprobs
    return [
        np.arange(first, first + num_tokens, dtype=np.int64),
        row.answer_token_ids.astype(np.int64),
        np.full(num_tokens, component, dtype=np.int64),
        row.advantages.astype(np.float32),
        row.weights.astype(np.float32),
        behaviour.astype(np.float32),
        np.full(num_tokens, place, dtype=np.int64),
    ]
