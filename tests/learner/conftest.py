"""Groups and rows for the learner's tests."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from mrl.records.codec import pack_array
from mrl.records.finish import FinishReason
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.records.version import Version, VersionSpan
from mrl.sharing.regime import TrainingExample


@pytest.fixture
def make_group() -> Callable[..., ScoredGroup]:
    """A group whose answers have 2, 3, ... tokens and the given rewards."""

    def make(ticket: str, rewards: tuple[float, ...] = (1.0, 0.0), *, epoch: int = 0, step: int = 0) -> ScoredGroup:
        answers = [
            Answer(
                token_ids=pack_array(np.arange(i + 2) + 5, "i4"),
                logprobs=pack_array(-np.ones(i + 2), "f4"),
                versions=[VersionSpan(i + 2, Version(epoch, step))],
                completion=b"x",
                finish_reason=FinishReason.STOP,
                reward=reward,
            )
            for i, reward in enumerate(rewards)
        ]
        return ScoredGroup(
            ticket=ticket,
            prompt_id=f"p{ticket.partition('.')[2]}",
            task="t",
            prompt_token_ids=pack_array([3, 4], "i4"),
            answers=answers,
        )

    return make


@pytest.fixture
def make_rows() -> Callable[..., list[TrainingExample]]:
    """Random rows: three of four "own" with advantages and behaviour, the fourth a "rescue" without.

    With `shared`, the second of four is a peer's: "shared" with one behaviour value for the row, or "pooled" with those
    of spans; and own rows have teachers, for tokens or for spans.
    """

    def make(
        count: int, *, seed: int = 0, vocab_size: int = 64, longest: int = 12, shared: bool = False
    ) -> list[TrainingExample]:
        rng = np.random.default_rng(seed)
        rows = []
        for index in range(count):
            prompt, answer = rng.integers(1, longest, size=2)
            kind = kind_of(index, shared)
            behaviour = -rng.exponential(3.0, answer).astype(np.float32)
            row = TrainingExample(
                prompt_token_ids=rng.integers(0, vocab_size, prompt).astype(np.int32),
                answer_token_ids=rng.integers(0, vocab_size, answer).astype(np.int32),
                component=kind,
                advantages=np.full(answer, 0.0 if kind == "rescue" else rng.normal(), np.float32),
                weights=np.full(answer, 1.0 / answer, np.float32),
                behaviour_logprobs=None if kind == "rescue" else behaviour,
                prompt_id=f"p{index}",
                source="me" if kind == "own" else "peer",
                phase=int(kind == "shared"),
            )
            rows.append(with_peers(row, index, rng) if shared else row)
        return rows

    def kind_of(index: int, shared: bool) -> str:
        if not shared or index % 4 != 1:
            return "rescue" if index % 4 == 3 else "own"
        return "pooled" if index % 8 == 5 else "shared"

    def with_peers(row: TrainingExample, index: int, rng: np.random.Generator) -> TrainingExample:
        size = row.answer_token_ids.size
        spans = np.cumsum(rng.random(size) < 0.6).astype(np.int32)
        spans -= spans[0]
        of_spans = -rng.exponential(4.0, size).astype(np.float32)
        if row.component == "shared":
            return replace(row, behaviour_logprobs=np.full(size, -4.0, np.float32))
        if row.component == "pooled":
            return replace(row, behaviour_logprobs=of_spans[spans], behaviour_spans=spans)
        if row.component == "own" and index % 8:
            of_spans[rng.random(size) < 0.2] = np.nan
            if index % 4 == 2:
                return replace(row, teacher_logprobs=of_spans[spans], teacher_spans=spans)
            return replace(row, teacher_logprobs=of_spans)
        return row

    return make
