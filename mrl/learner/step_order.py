"""Order of one step: everything that the ranks of a learner need to train on the same batch."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from mrl.alignment.next_units import NextUnits
from mrl.records.chosen_experts import ChosenExperts
from mrl.records.codec import pack_array, unpack_array
from mrl.sharing.regime import TrainingExample


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Rows of one step in training order, and the denominators of the loss components over all of them.

    `expansion` multiplies the policy's number of minibatches.
    """

    examples: list[TrainingExample]
    denominators: dict[str, float]
    expansion: float = 1.0


class _Row(msgspec.Struct, frozen=True):
    prompt: bytes
    answer: bytes
    component: str
    advantages: bytes
    weights: bytes
    behaviour: bytes | None
    prompt_id: str
    source: str
    phase: int
    behaviour_spans: bytes | None
    teacher: bytes | None
    teacher_spans: bytes | None
    is_trained: bytes | None
    row_starts: bytes | None
    experts: ChosenExperts | None
    prompt_experts: int
    """Place in the order's `prompt_experts`; -1 for none."""
    units: tuple[bytes, bytes] | None


class _Order(msgspec.Struct, frozen=True):
    rows: list[_Row]
    denominators: dict[str, float]
    expansion: float
    prompt_experts: list[ChosenExperts] = []
    """Experts of each prompt, once for all its rows."""


def encode_order(order: StepOrder) -> bytes:
    """Return the order as msgpack, arrays as raw bytes."""
    prompts = {id(told): told for row in order.examples if (told := row.prompt_experts) is not None}
    places = {name: place for place, name in enumerate(prompts)}
    rows = [_to_row(example, places.get(id(example.prompt_experts), -1)) for example in order.examples]
    packed = [ChosenExperts.packed(told) for told in prompts.values()]
    return msgspec.msgpack.encode(_Order(rows, order.denominators, order.expansion, packed))


def decode_order(data: bytes) -> StepOrder:
    """Return the order that `encode_order` encoded; it comes from the first rank of the same process group."""
    wire = msgspec.msgpack.decode(data, type=_Order)
    rows = [_from_row(row, wire.prompt_experts) for row in wire.rows]
    return StepOrder(rows, wire.denominators, wire.expansion)


def split_minibatches(order: StepOrder, num_minibatches: int, rng: np.random.Generator) -> list[StepOrder]:
    """Split the rows into parts of equal size, one optimizer update each, denominators divided evenly.

    There are `num_minibatches` parts times the order's expansion, rounded, at least one. Rows are shuffled within each
    phase, lower phases first. With one part the rows keep their order.
    """
    num_parts = max(1, round(num_minibatches * order.expansion))
    if num_parts == 1:
        return [order]
    shuffled = [order.examples[i] for i in rng.permutation(len(order.examples))]
    rows = sorted(shuffled, key=lambda example: example.phase)
    bounds = np.linspace(0, len(rows), num_parts + 1).astype(int)
    share = {name: value / num_parts for name, value in order.denominators.items()}
    return [StepOrder(rows[a:b], share) for a, b in itertools.pairwise(bounds)]


def _to_row(example: TrainingExample, prompt_experts: int) -> _Row:
    return _Row(
        pack_array(example.prompt_token_ids, "i4"),
        pack_array(example.answer_token_ids, "i4"),
        example.component,
        pack_array(example.advantages, "f4"),
        pack_array(example.weights, "f4"),
        _pack_optional(example.behaviour_logprobs, "f4"),
        example.prompt_id,
        example.source,
        example.phase,
        _pack_optional(example.behaviour_spans, "i4"),
        _pack_optional(example.teacher_logprobs, "f4"),
        _pack_optional(example.teacher_spans, "i4"),
        _pack_optional(example.is_trained, "?"),
        _pack_optional(example.row_starts, "i4"),
        None if example.experts is None else ChosenExperts.packed(example.experts),
        prompt_experts,
        None if example.teacher_units is None else example.teacher_units.packed(),
    )


def _from_row(row: _Row, of_prompts: Sequence[ChosenExperts]) -> TrainingExample:
    prompt, weights = unpack_array(row.prompt, "i4"), unpack_array(row.weights, "f4")
    of_prompt = None if row.prompt_experts < 0 else of_prompts[row.prompt_experts]
    return TrainingExample(
        prompt_token_ids=prompt,
        answer_token_ids=unpack_array(row.answer, "i4"),
        component=row.component,
        advantages=unpack_array(row.advantages, "f4"),
        weights=weights,
        behaviour_logprobs=_unpack_optional(row.behaviour, "f4"),
        prompt_id=row.prompt_id,
        source=row.source,
        phase=row.phase,
        behaviour_spans=_unpack_optional(row.behaviour_spans, "i4"),
        teacher_logprobs=_unpack_optional(row.teacher, "f4"),
        teacher_spans=_unpack_optional(row.teacher_spans, "i4"),
        is_trained=_unpack_optional(row.is_trained, "?"),
        row_starts=_unpack_optional(row.row_starts, "i4"),
        experts=None if row.experts is None else row.experts.unpacked(weights.size),
        prompt_experts=None if of_prompt is None else of_prompt.unpacked(prompt.size - 1),
        teacher_units=None if row.units is None else NextUnits.unpacked(*row.units, num_tokens=weights.size),
    )


def _pack_optional(values_T: npt.NDArray[Any] | None, dtype: str) -> bytes | None:
    return None if values_T is None else pack_array(values_T, dtype)


def _unpack_optional(data: bytes | None, dtype: str) -> npt.NDArray[Any] | None:
    return None if data is None else unpack_array(data, dtype)
