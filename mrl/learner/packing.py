"""Training examples become packed tensors: the only bridge from the rows of regimes to the input of the model.

A pass is a line of places: a prompt, then the answers to it, one behind the other, then the next prompt. Rows with one
prompt share its places; every answer's positions go on from the prompt's, and no answer attends to another
(`mrl.models.row_attention`). The last answer token is only a target: an answer takes one place less than it has tokens.
Tokens that an environment gave in an episode take places, and are no targets. An episode whose chat template rendered
earlier turns anew is several rows to the model, and one row to the loss.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl.models.routing.router_replay import OWN
from mrl.models.routing.routers import RoutingShape
from mrl.models.row_attention import RowLayout
from mrl.records.chosen_experts import Experts
from mrl.sharing.regime import Component, TrainingExample

Int64s: TypeAlias = npt.NDArray[np.int64]

PIECES_PER_RANK = 8
"""Rows of one prompt go to ranks in pieces, so small that at least so many pieces make up a rank's share."""

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
"""Name -> number format of the token-wise tensors that every batch has."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One forward pass: L places, and T answer tokens that are trained on.

    The token-wise tensors are flat over all rows. `predict_at_T[t]` is the place whose hidden state predicts answer
    token t. `behaviour_logprobs_T` is 0 for rows without behaviour, `teacher_logprobs_T` NaN for rows without a
    teacher. Both hold the log-probability of the token's span. Spans are numbered from 0 over all rows; None says that
    every token is a span of its own. A row is in one batch, and its tokens stand together.
    """

    input_ids_L: Tensor
    position_ids_L: Tensor
    rows: RowLayout
    predict_at_T: Tensor
    target_ids_T: Tensor
    component_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor
    behaviour_logprobs_T: Tensor
    teacher_logprobs_T: Tensor
    row_T: Tensor
    """Index of the row that each token belongs to, among the examples given to `pack`."""
    behaviour_span_T: Tensor | None = None
    teacher_span_T: Tensor | None = None
    unit_ids_TK: Tensor | None = None
    """int64 own ids of the K units that a teacher finds likeliest in the place of each token; None without any."""
    unit_logprobs_TK: Tensor | None = None
    """float32 log-probabilities of the units under the teacher; NaN where there is no unit."""
    experts_LNK: Tensor | None = None
    """int16, the K experts that each of N layers uses at each place; None where all routers choose for themselves. It
    stays in main memory, being larger than all else together: each forward takes its own along."""

    def to(self, device: torch.device) -> "PackedBatch":
        """Return the same batch on another device."""
        tensors: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__ if name != "experts_LNK"}
        moved = {name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None}
        return PackedBatch(**moved, experts_LNK=self.experts_LNK)


def row_tokens(example: TrainingExample) -> int:
    """Return the places that a row takes with its prompt."""
    return example.prompt_token_ids.size + _answer_places(example)


def _answer_places(example: TrainingExample) -> int:
    return example.answer_token_ids.size - example.num_rows


def deal(sizes: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Deal pieces of these sizes to ranks, the largest first, each to the rank that has least so far.

    Returns indices per rank, ascending. No rank has more than the least loaded rank and one largest piece.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + sizes[index], rank))
    return [sorted(share) for share in shares]


def pack(
    examples: Sequence[TrainingExample],
    components: Sequence[Component],
    *,
    microbatch_tokens: int,
    rank: int = 0,
    world_size: int = 1,
    routing: RoutingShape | None = None,
) -> list[PackedBatch]:
    """Return this rank's share of the rows as forward passes of at most `microbatch_tokens`, or of one longer row.

    Every row counts with its prompt, as attention is over whole rows: the memory of a pass then has a bound that the
    number of answers to a prompt does not change. With a `routing`, routers use the experts that rows bring.

    All ranks call it with the same arguments but `rank`; together they hold every row once. All get the same number of
    passes, the last ones without a row where a rank has less to do: all ranks take part in every forward.
    """
    if not examples:
        return []
    passes_of = [
        list(_fill_passes(examples, share, microbatch_tokens)) for share in _rows_of_ranks(examples, world_size)
    ]
    index_of = {component.name: index for index, component in enumerate(components)}
    own, num_passes = passes_of[rank], max(map(len, passes_of))
    told = None if routing is None else _Told(examples, routing)
    laid_out = [_lay_out(examples, rows, index_of, told) for rows in own]
    return laid_out + [_empty()] * (num_passes - len(own))


def _rows_of_ranks(examples: Sequence[TrainingExample], num_ranks: int) -> list[list[int]]:
    """Return the rows of each rank, those with one prompt together; ranks have about equally many places."""
    share = sum(map(row_tokens, examples)) / num_ranks
    groups: dict[bytes, list[int]] = {}
    for place, example in enumerate(examples):
        groups.setdefault(example.prompt_token_ids.tobytes(), []).append(place)
    pieces = list(itertools.chain.from_iterable(_cut(examples, rows, share, num_ranks) for rows in groups.values()))
    sizes = [_places(examples, piece) for piece in pieces]
    return [[row for index in of_rank for row in pieces[index]] for of_rank in deal(sizes, num_ranks)]


def _cut(examples: Sequence[TrainingExample], rows: list[int], share: float, num_ranks: int) -> Iterator[list[int]]:
    """Cut the rows of one prompt, the longest first, into pieces to deal; a single rank takes them uncut."""
    rows = sorted(rows, key=lambda row: -_answer_places(examples[row]))
    most = float("inf") if num_ranks == 1 else share / PIECES_PER_RANK
    return _fill_passes(examples, rows, most)


def _fill_passes(examples: Sequence[TrainingExample], rows: Sequence[int], most_tokens: float) -> Iterator[list[int]]:
    """Yield rows in their order, as many at a time as fit into `most_tokens`."""
    filling: list[int] = []
    tokens = 0
    for row in rows:
        needed = row_tokens(examples[row])
        if filling and tokens + needed > most_tokens:
            yield filling
            filling, tokens = [], 0
        filling.append(row)
        tokens += needed
    if filling:
        yield filling


def _more_places(examples: Sequence[TrainingExample], row: int, after: int | None) -> int:
    """Return the places that a row adds behind another row, whose prompt it may share."""
    shares = after is not None and _have_one_prompt(examples[after], examples[row])
    return _answer_places(examples[row]) if shares else row_tokens(examples[row])


def _have_one_prompt(one: TrainingExample, other: TrainingExample) -> bool:
    return np.array_equal(one.prompt_token_ids, other.prompt_token_ids)


def _places(examples: Sequence[TrainingExample], rows: Sequence[int]) -> int:
    return sum(_more_places(examples, row, after) for after, row in zip([None, *rows], rows, strict=False))


def _lay_out(
    examples: Sequence[TrainingExample], rows: list[int], index_of: dict[str, int], told: "_Told | None"
) -> PackedBatch:
    packed = [examples[row] for row in rows]
    places_of = list(_places_of_rows(packed))
    all_places = list(itertools.chain.from_iterable(places_of))
    num_places = 1 + max(int(places[-1]) for places in all_places)
    input_ids, position_ids = np.zeros((2, num_places), dtype=np.int64)
    for row, places_B in zip(packed, places_of, strict=True):
        for seen, places in zip(seen_rows(row), places_B, strict=True):
            input_ids[places], position_ids[places] = seen, np.arange(places.size)
    columns = [
        _token_columns(row, place, _predict_at(row, places_B), index_of[row.component])
        for row, place, places_B in zip(packed, rows, places_of, strict=True)
    ]
    sizes = [row.num_trained_tokens for row in packed]
    return PackedBatch(
        input_ids_L=torch.from_numpy(input_ids),
        position_ids_L=torch.from_numpy(position_ids),
        rows=_row_layout(all_places, num_places),
        behaviour_span_T=_spans([row.behaviour_spans for row in packed], sizes),
        teacher_span_T=_spans([row.teacher_spans for row in packed], sizes),
        **_unit_columns(packed),
        experts_LNK=None if told is None else told.places(packed, places_of, num_places),
        **{name: torch.from_numpy(np.concatenate([row[name] for row in columns])) for name in columns[0]},
    )


def seen_rows(row: TrainingExample) -> list[npt.NDArray[np.int32]]:
    """Return the ids that the model reads of each of an example's rows: all but the last token."""
    first, *others = np.split(row.answer_token_ids, [] if row.row_starts is None else row.row_starts)
    return [np.concatenate([row.prompt_token_ids, first[:-1]]), *(other[:-1] for other in others)]


def _predict_at(row: TrainingExample, places_B: Sequence[Int64s]) -> Int64s:
    """Return the place that predicts each token, [T]; any place for the first token of a later row, which is given."""
    first, *others = places_B
    parts = [first[row.prompt_token_ids.size - 1 :], *(np.concatenate([other[:1], other]) for other in others)]
    return np.concatenate(parts)


def _places_of_rows(rows: Sequence[TrainingExample]) -> Iterator[list[Int64s]]:
    """Yield for each example the places of all its rows, those of a row's last token excepted."""
    prompt_at = end = 0
    for before, row in zip([None, *rows], rows, strict=False):
        if before is None or not _have_one_prompt(before, row):
            prompt_at, end = end, end + row.prompt_token_ids.size
        prompt = np.arange(prompt_at, prompt_at + row.prompt_token_ids.size)
        found = []
        for behind, seen in zip([prompt, *[prompt[:0]] * (row.num_rows - 1)], seen_rows(row), strict=True):
            at, end = end, end + seen.size - behind.size
            found.append(np.concatenate([behind, np.arange(at, end)]))
        yield found


def _row_layout(places_of: Sequence[Int64s], num_places: int) -> RowLayout:
    places = np.concatenate(places_of)
    lengths = tuple(one.size for one in places_of)
    if places.size == num_places:
        return RowLayout(lengths)
    positions = np.empty(num_places, dtype=np.int64)
    positions[places] = np.arange(places.size)
    return RowLayout(lengths, torch.from_numpy(places), torch.from_numpy(positions))


class _Told:
    """Experts for the routers of passes, by the experts that rows bring.

    A prompt has those of the first row that brings any, in every pass with that prompt: also where the rows in the pass
    bring none, so that no value depends on how rows are dealt out. Its last place, at which first tokens are predicted,
    has those of the first row that brings experts of its first token.
    """

    def __init__(self, examples: Sequence[TrainingExample], shape: RoutingShape) -> None:
        self._shape = shape
        self._of_prompts: dict[bytes, npt.NDArray[np.int16]] = {}
        for row in examples:
            name, num_before = row.prompt_token_ids.tobytes(), row.prompt_token_ids.size - 1
            if name not in self._of_prompts:
                self._of_prompts[name] = self._nothing(num_before + 1)
            told_PX = self._of_prompts[name]
            if told_PX[0, 0] == OWN and (before_PX := self._fitting(row.prompt_experts, num_before)) is not None:
                told_PX[:-1] = before_PX
            begins = row.is_trained is None or row.is_trained[0]
            if told_PX[-1, 0] == OWN and begins and (experts_SX := self._of_tokens(row)) is not None:
                told_PX[-1] = experts_SX[0]

    def places(
        self, rows: Sequence[TrainingExample], places_of: Sequence[Sequence[Int64s]], num_places: int
    ) -> Tensor | None:
        """Return the experts of a pass, [L, N, K]; None where there are none."""
        told_LX = self._nothing(num_places)
        for row, places_B in zip(rows, places_of, strict=True):
            predict_at, experts_SX = _predict_at(row, places_B), self._of_tokens(row)
            if experts_SX is not None:
                told_LX[predict_at if row.is_trained is None else predict_at[row.is_trained]] = experts_SX
            of_prompt = self._of_prompts[row.prompt_token_ids.tobytes()]
            told_LX[places_B[0][: len(of_prompt)]] = of_prompt
        told_LNK = torch.from_numpy(told_LX).unflatten(1, (self._shape.num_layers, self._shape.top_k))
        return told_LNK if (told_LX != OWN).any() else None

    def _nothing(self, num_places: int) -> npt.NDArray[np.int16]:
        return np.full((num_places, self._shape.num_slots), OWN, dtype=np.int16)

    def _of_tokens(self, row: TrainingExample) -> Experts | None:
        return self._fitting(row.experts, row.num_trained_tokens)

    def _fitting(self, experts_RX: Experts | None, num_rows: int) -> Experts | None:
        return experts_RX if experts_RX is not None and self._shape.fits(experts_RX, num_rows) else None


def _empty() -> PackedBatch:
    """Return a pass over one place that belongs to no row."""
    place_L = torch.zeros(1, dtype=torch.int64)
    nothing = {name: torch.zeros(0, dtype=dtype) for name, dtype in COLUMNS.items()}
    return PackedBatch(input_ids_L=place_L, position_ids_L=place_L, rows=RowLayout((1,)), **nothing)


def _spans(spans: Sequence[npt.NDArray[np.int32] | None], sizes: Sequence[int]) -> Tensor | None:
    """Return the spans of all rows, [T], numbered on; a row without any has one per token. None when no row has any."""
    if all(of_row is None for of_row in spans):
        return None
    starts = np.cumsum([0, *sizes])[:-1]  # a row has at most as many spans as tokens
    rows = zip(starts, sizes, spans, strict=True)
    return torch.from_numpy(np.concatenate([start + (np.arange(n) if row is None else row) for start, n, row in rows]))


def _unit_columns(rows: Sequence[TrainingExample]) -> dict[str, Tensor]:
    """Return the units of all rows, [T, K], with the largest K of any row. Empty when no row has any."""
    most = max((row.teacher_units.token_ids.shape[1] for row in rows if row.teacher_units is not None), default=0)
    if not most:
        return {}
    num_tokens = [row.num_trained_tokens for row in rows]
    ids_TK = np.zeros((sum(num_tokens), most), dtype=np.int64)
    logprobs_TK = np.full((sum(num_tokens), most), np.nan, dtype=np.float32)
    for row, start in zip(rows, np.cumsum([0, *num_tokens]), strict=False):
        if (units := row.teacher_units) is not None:
            here = slice(start, start + len(units.token_ids)), slice(units.token_ids.shape[1])
            ids_TK[here], logprobs_TK[here] = units.token_ids, units.logprobs
    return {"unit_ids_TK": torch.from_numpy(ids_TK), "unit_logprobs_TK": torch.from_numpy(logprobs_TK)}


def _token_columns(row: TrainingExample, place: int, predict_at: Int64s, component: int) -> dict[str, npt.NDArray[Any]]:
    """Return one row's part of the token-wise tensors, by their names in `PackedBatch`."""
    num_tokens, target_ids = row.num_trained_tokens, row.answer_token_ids
    if row.is_trained is not None:
        predict_at, target_ids = predict_at[row.is_trained], target_ids[row.is_trained]
    behaviour = np.zeros(num_tokens) if row.behaviour_logprobs is None else row.behaviour_logprobs
    teacher = np.full(num_tokens, np.nan) if row.teacher_logprobs is None else row.teacher_logprobs
    return {
        "predict_at_T": predict_at,
        "target_ids_T": target_ids.astype(np.int64),
        "component_T": np.full(num_tokens, component, dtype=np.int64),
        "advantages_T": row.advantages.astype(np.float32),
        "weights_T": row.weights.astype(np.float32),
        "behaviour_logprobs_T": behaviour.astype(np.float32),
        "teacher_logprobs_T": teacher.astype(np.float32),
        "row_T": np.full(num_tokens, place, dtype=np.int64),
    }
