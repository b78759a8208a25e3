"""The records that the benchmark sends, and the check that they arrive.

rollout   a RolloutRecord of 37 KB: 8 answers of 352 tokens, each with its text, byte lengths, log-probs and flags
outcome   an OutcomeRecord of 1 KB: an answer of 49 tokens with the same
both      rollout and outcome records in turn
"""

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from mrl.records.codec import pack_array
from mrl.records.experience import (
    ExperienceRecord,
    OutcomeRecord,
    RecordKind,
    RolloutRecord,
    SharedAnswer,
    TokenTrace,
)
from mrl.records.finish import FinishReason
from mrl.records.version import Version

SINGLE_KINDS: tuple[RecordKind, ...] = ("rollout", "outcome")
KINDS = (*SINGLE_KINDS, "both")
SOURCE = "qwen"
GROUP_SIZE, ROLLOUT_TOKENS, OUTCOME_TOKENS = 8, 352, 49
BYTES_PER_TOKEN = 4


def make_records(kind: str, phase: str, count: int) -> list[ExperienceRecord]:
    """Make `count` different records; `phase` makes their ids differ from those of other calls."""
    if kind == "both":
        rollouts, outcomes = make_records("rollout", phase, count), make_records("outcome", phase, count)
        return [(outcomes if place % 2 else rollouts)[place] for place in range(count)]
    rng = np.random.default_rng(0)
    tags: dict[str, Any] = {
        "source": SOURCE,
        "oldest": Version(1, 1),
        "newest": Version(1, 1),
        "fingerprint": "0" * 64,
        "task": "bench",
        "created_unix_s": time.time(),
    }
    if kind == "rollout":
        answers = [
            SharedAnswer(**_answer(rng, ROLLOUT_TOKENS), reward=float(place % 2), advantage=0.5)
            for place in range(GROUP_SIZE)
        ]
        return [RolloutRecord(record_id=name, prompt_id=name, answers=answers, **tags) for name in ids_of(phase, count)]
    content = _answer(rng, OUTCOME_TOKENS) | {"verifier": "exact", "reward": 1.0} | tags
    return [OutcomeRecord(record_id=name, prompt_id=name, **content) for name in ids_of(phase, count)]


def ids_of(phase: str, count: int) -> list[str]:
    """Ids of the records of a phase, in their order."""
    return [f"{phase}/{number}" for number in range(count)]


def _answer(rng: np.random.Generator, tokens: int) -> dict[str, Any]:
    trace = TokenTrace(
        byte_lengths=pack_array(np.full(tokens, BYTES_PER_TOKEN), "i4"),
        logprobs=pack_array(-rng.exponential(1.0, tokens), "f4"),
        special=pack_array(np.zeros(tokens), "u1"),
    )
    text = rng.integers(97, 123, tokens * BYTES_PER_TOKEN).astype(np.uint8).tobytes()
    return {"completion": text, "finish_reason": FinishReason.STOP, "trace": trace}


class Checklist:
    """Checklist of the records of a phase: each comes once, in any order, since a record that is put again comes later.

    While the clock runs ids are only noted; `check` compares them afterwards, for every system alike.
    """

    def __init__(self, phase: str, count: int) -> None:
        self.ids = ids_of(phase, count)
        """Ids of the records, equal to their prompts' ids, in the order of sending."""
        self._came: list[str] = []

    @property
    def num_came(self) -> int:
        """Number of records that have come."""
        return len(self._came)

    @property
    def num_missing(self) -> int:
        """Number of records that are still to come."""
        return max(0, len(self.ids) - len(self._came))

    def tick_off(self, records: Iterable[ExperienceRecord]) -> None:
        """Note records that came."""
        self._came += [record.record_id for record in records]

    def check(self) -> None:
        """Check the records that came. Raises RuntimeError when one came twice, was never sent, or is missing."""
        missing = set(self.ids)
        for record_id in self._came:
            if record_id not in missing:
                raise RuntimeError(f"{record_id} came twice, or nobody sent it")
            missing.remove(record_id)
        if missing:
            raise RuntimeError(f"{len(missing)} records never came, {missing.pop()} among them")
