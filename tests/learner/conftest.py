"""Groups and rows for the learner's tests."""

from collections.abc import Callable

import numpy as np
import pytest

from mrl.records.codec import pack_array
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
                finished=True,
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
    """Random rows of two components: "own" with advantages and behaviour, "rescue" without."""

    def make(count: int, *, seed: int = 0, vocab_size: int = 64, longest: int = 12) -> list[TrainingExample]:
        rng = np.random.default_rng(seed)
        rows = []
        for index in range(count):
            prompt, answer = rng.integers(1, longest, size=2)
            rescue = index % 4 == 3
            rows.append(
                TrainingExample(
                    prompt_token_ids=rng.integers(0, vocab_size, prompt).astype(np.int32),
                    answer_token_ids=rng.integers(0, vocab_size, answer).astype(np.int32),
                    component="rescue" if rescue else "own",
                    advantages=np.full(answer, 0.0 if rescue else rng.normal(), np.float32),
                    weights=np.full(answer, 1.0 / answer, np.float32),
                    behaviour_logprobs=None if rescue else -rng.exponential(3.0, answer).astype(np.float32),
                    prompt_id=f"p{index}",
                    source="peer" if rescue else "me",
                )
            )
        return rows

    return make
