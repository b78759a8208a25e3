"""Records, keys and bounded waits for the exchange's tests."""

import time
from collections.abc import Callable

import pytest

from mrl.records.codec import pack_array
from mrl.records.experience import (
    GivenAnswer,
    OutcomeRecord,
    RolloutRecord,
    ScoreRecord,
    ScoreRequestRecord,
    SharedAnswer,
    TokenTrace,
    ValueRecord,
)
from mrl.records.finish import FinishReason
from mrl.records.version import Version
from mrl.transport.grants import Grant
from mrl.transport.keys import RunKeys, create_keys
from tests.support.successes import success


@pytest.fixture(scope="session")
def keys(tmp_path_factory) -> RunKeys:
    """The keys of a run of two policies."""
    grants = [Grant(role, policy) for role in ("learner", "worker") for policy in ("qwen", "llama")]
    return create_keys(tmp_path_factory.mktemp("run") / "keys", grants)


@pytest.fixture(scope="session")
def outcome() -> Callable[..., OutcomeRecord]:
    """Makes success records; `step` dates them."""
    return success


def tags(record_id: str, source: str, prompt_id: str, step: int) -> dict[str, object]:
    """What every record carries."""
    version = Version(0, step)
    return {
        "record_id": record_id, "source": source, "prompt_id": prompt_id, "oldest": version, "newest": version,
        "fingerprint": "f", "task": "t", "created_unix_s": 0.0,
    }  # fmt: skip


def trace(num_tokens: int) -> TokenTrace:
    """One byte per token."""
    numbers = [1] * num_tokens
    return TokenTrace(
        byte_lengths=pack_array(numbers, "i4"),
        logprobs=pack_array(numbers, "f4"),
        special=pack_array(numbers, "u1"),
        token_ids=pack_array(numbers, "i4"),
    )


@pytest.fixture(scope="session")
def rollout() -> Callable[..., RolloutRecord]:
    """Makes group records of `group` answers with `tokens` tokens each."""

    def make(record_id="g1", source="qwen", prompt_id="p1", step=0, *, group=2, tokens=3) -> RolloutRecord:
        answers = [
            SharedAnswer(
                completion=b"y" * tokens,
                finish_reason=FinishReason.STOP,
                reward=1.0,
                advantage=0.5,
                trace=trace(tokens),
            )
            for _ in range(group)
        ]
        return RolloutRecord(**tags(record_id, source, prompt_id, step), answers=answers)

    return make


@pytest.fixture(scope="session")
def value() -> Callable[..., ValueRecord]:
    """Makes records of rewards."""

    def make(record_id="v1", source="qwen", prompt_id="p1", step=0, *, group=2) -> ValueRecord:
        return ValueRecord(**tags(record_id, source, prompt_id, step), rewards=[0.5] * group)

    return make


@pytest.fixture(scope="session")
def request_for() -> Callable[..., ScoreRequestRecord]:
    """Makes score requests to `scorer`."""

    def make(
        scorer="llama", record_id="q1", source="qwen", prompt_id="p1", step=0, *, group=2, completion=b"yah"
    ) -> ScoreRequestRecord:
        answers = [GivenAnswer(completion=completion, finish_reason=FinishReason.STOP)] * group
        return ScoreRequestRecord(**tags(record_id, source, prompt_id, step), scorer=scorer, answers=answers)

    return make


@pytest.fixture(scope="session")
def score_of() -> Callable[..., ScoreRecord]:
    """Makes the score of a request, by its scorer or by another `source`."""

    def make(asked: ScoreRequestRecord, record_id="s1", source="", step=0, *, tokens=3) -> ScoreRecord:
        scores = [trace(tokens) for _ in asked.answers]
        by = source or asked.scorer
        return ScoreRecord(
            **tags(record_id, by, asked.prompt_id, step), request_id=asked.record_id, receiver=asked.source,
            scores=scores,
        )  # fmt: skip

    return make


@pytest.fixture(scope="session")
def until() -> Callable[..., object]:
    """Calls until something true comes back, at most two minutes."""

    def wait(what: Callable[[], object], *, within_s: float = 120.0) -> object:
        end_s = time.monotonic() + within_s
        while time.monotonic() < end_s:
            if found := what():
                return found
        raise AssertionError(f"nothing came within {within_s} s")

    return wait
