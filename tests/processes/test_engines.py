"""What the configuration says of a server reaches its engine."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mrl.config.policy_tables import ServerTable
from mrl.config.schema import RunConfig
from mrl.engines.server_backend import Launch
from mrl.engines.server_timeouts import ServerTimeouts, timeouts_of
from mrl.processes import engines
from mrl.processes.engines import answers_at_once
from tests.support.word_runs import word_run


def test_every_bound_of_a_server_is_the_configured_one(tmp_path):
    """Each is another number."""
    table = ServerTable(start_s=1.0, silence_s=2.0, stall_s=3.0, load_s=4.0)

    assert timeouts_of(table, tmp_path) == ServerTimeouts(start_s=1.0, silence_s=2.0, stall_s=3.0, load_s=4.0)


def test_without_a_word_about_it_the_time_for_new_weights_follows_the_model(tmp_path):
    """Half a gigabyte of files without content."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(500_000_000)

    assert timeouts_of(ServerTable(), tmp_path).load_s == 70.0


def config_of(engine: str = "embedded", **allocation: object) -> RunConfig:
    policy = {"device": "cuda", "rollout": {"engine": engine, "threads": 2}}
    return word_run({"a": policy, "b": policy}, allocation={"slots": 96, **allocation})


UNITS = {"units": ["gpu:0", "gpu:1", "cpu:0"]}


@pytest.fixture
def launched(monkeypatch) -> Callable[..., Launch]:
    """What a worker would start a server with."""
    monkeypatch.setattr(engines, "engine_python", lambda *_, **__: Path("python"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return lambda **allocation: engines._launch(config_of("vllm", **allocation), "a")


def test_a_server_is_told_how_many_gpus_it_has(launched, monkeypatch):
    """Those of its table, or all of the unit that its worker is on."""
    monkeypatch.delenv("MRL_UNIT", raising=False)
    assert launched().gpus == 1
    monkeypatch.setenv("MRL_UNIT", "n2/gpu:0,3")
    assert launched(units=["gpu:0,1", "n2/gpu:0,3"]).gpus == 2
    monkeypatch.setenv("MRL_UNIT", "cpu:0-3")
    assert launched(units=["cpu:0-3"]).gpus == 1


def test_a_server_is_started_so_that_it_can_sleep_where_it_may_and_nowhere_else(launched):
    """Sleep has its price: another allocator, another package."""
    assert launched(**UNITS, residency="sleep").may_sleep
    assert not launched(**UNITS).may_sleep
    assert not launched(residency="sleep").may_sleep, "without units nobody asks it to"


@pytest.mark.parametrize(("regime", "scores"), [("independent", False), ("rlad", True)])
def test_a_server_is_told_whether_peers_ask_it_for_scores(monkeypatch, regime, scores):
    """It needs memory for them."""
    monkeypatch.setattr(engines, "engine_python", lambda *_, **__: Path("python"))
    config = config_of("vllm").model_copy(update={"sharing": {"regime": regime}})

    assert engines._launch(config, "a").scores == scores


def test_a_server_has_the_threads_that_the_plan_gave_its_worker(launched, monkeypatch):
    """On a unit one for each core, whatever the table says."""
    assert launched().threads == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert launched(**UNITS).threads == 4


@pytest.mark.parametrize("changes", [{}, {"router_replay": True}, {"router_replay": True, "frozen": True}])
def test_engines_tell_experts_where_a_learner_replays_them(launched, changes):
    """A server is started able to, and each answer asks for them; nobody trains a frozen policy."""
    config = config_of("vllm")
    table = config.policies["a"]
    learner = table.learner.model_copy(update={"router_replay": "router_replay" in changes})
    table = table.model_copy(update={"learner": learner, "frozen": "frozen" in changes})
    config = config.model_copy(update={"policies": config.policies | {"a": table}})
    receiver = SimpleNamespace(eos_ids=[1])

    told = changes == {"router_replay": True}
    assert engines._launch(config, "a").tells_experts is told
    assert engines._sampling(table, receiver).tells_experts is told  # type: ignore[arg-type]


def test_an_engine_on_a_unit_samples_its_part_of_the_slots_at_once():
    """A third here; a server on cores makes room for as many from the start."""
    assert answers_at_once(config_of(), "a") == 96
    assert answers_at_once(config_of(**UNITS), "a") == 32
