"""The order of one step: everything that the ranks of a learner need to train on the same batch."""

import itertools
from dataclasses import dataclass

import msgspec
import numpy as np

from mrl.records.codec import pack_array, unpack_array
from mrl.sharing.regime import TrainingExample


@dataclass(frozen=True, slots=True)
class StepOrder:
    """The rows of one step in training order, and the denominators of the loss components over all of them."""

    examples: list[TrainingExample]
    denominators: dict[str, float]


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


class _Order(msgspec.Struct, frozen=True):
    rows: list[_Row]
    denominators: dict[str, float]


def encode_order(order: StepOrder) -> bytes:
    """The order as msgpack, arrays as raw bytes."""
    return msgspec.msgpack.encode(_Order([_to_row(example) for example in order.examples], order.denominators))


def decode_order(data: bytes) -> StepOrder:
    """The order behind `encode_order`; it comes from the first rank of the same process group."""
    wire = msgspec.msgpack.decode(data, type=_Order)
    return StepOrder([_from_row(row) for row in wire.rows], wire.denominators)


def split_minibatches(order: StepOrder, num_minibatches: int, rng: np.random.Generator) -> list[StepOrder]:
    """Rows dealt into minibatches: shuffled within each phase, lower phases first, denominators divided evenly.

    With one minibatch the rows keep their order.
    """
    if num_minibatches == 1:
        return [order]
    shuffled = [order.examples[i] for i in rng.permutation(len(order.examples))]
    rows = sorted(shuffled, key=lambda example: example.phase)
    bounds = np.linspace(0, len(rows), num_minibatches + 1).astype(int)
    share = {name: value / num_minibatches for name, value in order.denominators.items()}
    return [StepOrder(rows[a:b], share) for a, b in itertools.pairwise(bounds)]


def _to_row(example: TrainingExample) -> _Row:
    behaviour = example.behaviour_logprobs
    return _Row(
        pack_array(example.prompt_token_ids, "i4"),
        pack_array(example.answer_token_ids, "i4"),
        example.component,
        pack_array(example.advantages, "f4"),
        pack_array(example.weights, "f4"),
        None if behaviour is None else pack_array(behaviour, "f4"),
        example.prompt_id,
        example.source,
        example.phase,
    )


def _from_row(row: _Row) -> TrainingExample:
    return TrainingExample(
        prompt_token_ids=unpack_array(row.prompt, "i4"),
        answer_token_ids=unpack_array(row.answer, "i4"),
        component=row.component,
        advantages=unpack_array(row.advantages, "f4"),
        weights=unpack_array(row.weights, "f4"),
        behaviour_logprobs=None if row.behaviour is None else unpack_array(row.behaviour, "f4"),
        prompt_id=row.prompt_id,
        source=row.source,
        phase=row.phase,
    )
