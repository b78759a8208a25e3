"""What comes to a vLLM server while its weights change: 0.32 keeps it, 0.33 refuses it with status 503."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mrl.engines.engine import FinishedAnswer, GenerationRequest, Sampling, ScoringRequest
from mrl.engines.server_engine import ServerEngine
from mrl.engines.server_timeouts import ServerTimeouts
from mrl.engines.vllm import VLLM
from mrl.errors import EngineLost
from mrl.records.version import Version, VersionSpan
from tests.support.pausing_vllm import PausingVLLM

SAMPLING = Sampling(temperature=1.0, max_new_tokens=4, eos_ids=(0,))
BOUNDS = ServerTimeouts(start_s=120.0, silence_s=60.0, stall_s=120.0, load_s=120.0)
NUM_UPDATES, NUM_REQUESTS = 20, 16
QUEUE_FULL = {"message": "The engine is currently busy", "type": "Service Unavailable", "param": None, "code": 503}
DEAD = {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "param": None, "code": 500}


@pytest.fixture(params=[True, False], ids=["0.33", "0.32"])
def server(request) -> Iterator[PausingVLLM]:
    """One that refuses, and one that queues."""
    made = PausingVLLM(refuses=request.param)
    yield made
    made.close()


@pytest.fixture
def engine(server) -> Iterator[ServerEngine]:
    """With weights of version 0.0."""
    made = ServerEngine(VLLM(), SAMPLING, launch=None, url=server.url, bounds=BOUNDS)
    made.label(Version(0, 0))
    yield made
    made.close()


def ask(count: int) -> list[GenerationRequest]:
    prompt, seeds = np.array([7], dtype=np.int32), np.zeros(1, dtype=np.uint64)
    return [GenerationRequest(f"r{number}", prompt, seeds) for number in range(count)]


def collect(engine: ServerEngine, count: int) -> list[FinishedAnswer]:
    found: list[FinishedAnswer] = []
    while len(found) < count:
        found += engine.collect(20.0)
    return found


def test_an_update_loses_nothing_of_what_is_on_its_way_to_the_server(server, engine):
    """Each of 20 updates meets 16 requests that arrive behind its pause; all are sampled under its weights."""
    num_lost = 0
    for number in range(1, NUM_UPDATES + 1):
        version, server.is_slow = Version(0, number), True
        engine.submit(ask(NUM_REQUESTS))
        server.await_under_way(NUM_REQUESTS)
        try:
            engine.load(Path("w"), version)
            answers = [one.generation for one in collect(engine, NUM_REQUESTS)]
        except EngineLost:
            num_lost, server.is_slow = num_lost + 1, False
            engine.restart()
            engine.label(version)
            continue
        assert {tuple(answer.token_ids.tolist()) for answer in answers} == {(8, 9, 10, 11)}
        assert all(answer.versions == [VersionSpan(4, version)] for answer in answers)

    assert num_lost == 0


def test_a_score_that_an_update_meets_is_asked_for_once_more(server, engine):
    """When the gate is open, and not before: nothing is asked again and again."""
    request = ScoringRequest(np.array([5], dtype=np.int32), [np.array([6], dtype=np.int32)] * 3)
    before, server.is_slow = server.num_asked, True
    with ThreadPoolExecutor(1) as beside:
        scores = beside.submit(engine.score_answers, request)
        server.await_under_way(3)
        engine.load(Path("w"), Version(0, 1))
        scored = scores.result(120)

    assert [one.logprobs.tolist() for one in scored] == [[-6.0]] * 3
    assert server.num_asked - before == 6


def lose_in_an_update(server: PausingVLLM, engine: ServerEngine) -> None:
    server.is_slow = True
    engine.submit(ask(1))
    server.await_under_way(1)
    engine.load(Path("w"), Version(0, 1))
    collect(engine, 1)


def lose_at_rest(server: PausingVLLM, engine: ServerEngine) -> None:
    engine.submit(ask(1))
    collect(engine, 1)


def score_at_rest(server: PausingVLLM, engine: ServerEngine) -> None:
    engine.score([[5, 6]])


PAUSED = (503, {"message": "Generation is paused.", "type": "ServiceUnavailableError"})


@pytest.mark.parametrize(
    ("fault", "meet", "told"),
    [
        (PAUSED, lose_at_rest, "503.*Generation is paused"),
        (PAUSED, score_at_rest, "503.*Generation is paused"),
        ((503, QUEUE_FULL), lose_in_an_update, "503.*currently busy"),
        ((500, DEAD), lose_in_an_update, "500.*EngineCore"),
    ],
)
@pytest.mark.parametrize("server", [True], indirect=True, ids=["0.33"])
def test_any_other_failure_is_a_lost_server(
    server, engine, fault, meet: Callable[[PausingVLLM, ServerEngine], None], told
):
    """A pause that is not ours, a full queue, an engine process that is dead."""
    server.fault = fault

    with pytest.raises(EngineLost, match=told):
        meet(server, engine)


def test_a_server_that_an_earlier_life_left_paused_takes_requests_again(server, engine):
    """It was killed in the middle of an update, and somebody else's server lived on."""
    engine._run(engine._link().post("/pause", mode="abort"), 20.0)

    other = ServerEngine(VLLM(), SAMPLING, launch=None, url=server.url, bounds=BOUNDS)
    try:
        other.label(Version(1, 0))
        other.submit(ask(1))
        assert collect(other, 1)[0].generation.token_ids.tolist() == [8, 9, 10, 11]
    finally:
        other.close()
