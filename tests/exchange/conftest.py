"""Records, keys and bounded waits for the exchange's tests."""

import time
from collections.abc import Callable

import pytest

from mrl.records.experience import OutcomeRecord
from mrl.records.version import Version
from mrl.transport.keys import RunKeys, create_keys


@pytest.fixture(scope="session")
def keys(tmp_path_factory) -> RunKeys:
    """One run's keys."""
    return create_keys(tmp_path_factory.mktemp("run") / "keys")


@pytest.fixture(scope="session")
def outcome() -> Callable[..., OutcomeRecord]:
    """Makes success records; `step` dates them."""

    def make(record_id="r1", source="qwen", prompt_id="p1", step=0, epoch=0, completion=b"yah") -> OutcomeRecord:
        return OutcomeRecord(
            record_id=record_id,
            source=source,
            oldest=Version(epoch, step),
            newest=Version(epoch, step),
            fingerprint="f",
            prompt_id=prompt_id,
            task="t",
            created_unix_s=0.0,
            completion=completion,
            finished=True,
            verifier="v",
            reward=1.0,
        )

    return make


@pytest.fixture(scope="session")
def until() -> Callable[..., object]:
    """Calls until something true comes back, at most ten seconds."""

    def wait(what: Callable[[], object], *, within_s: float = 10.0) -> object:
        end_s = time.monotonic() + within_s
        while time.monotonic() < end_s:
            if found := what():
                return found
        raise AssertionError(f"nothing came within {within_s} s")

    return wait
