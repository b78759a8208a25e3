"""Where learners and workers go: GPUs of one host, and of several."""

import random
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mrl.config.schema import RunConfig
from mrl.errors import ConfigError
from mrl.processes.planning.placement import ProcessPlacement, has_own_gpus, least_gpus, most_gpus, seats
from tests.support.word_runs import word_run

ONE = ""


def policy(ranks: int = 1, workers: int = 1, engine: str = "vllm", device: str = "cuda", **keys: Any) -> dict[str, Any]:
    rollout = {"engine": engine, "workers": workers, "gpus": keys.pop("gpus", 1)}
    return {"model": "m", "device": device, "learner": {"processes": ranks}, "rollout": rollout, **keys}


def config_of(units: list[str] | None = None, **policies: dict[str, Any]) -> RunConfig:
    return word_run(policies, allocation={"slots": 1024, "floor_slots": 64, **({"units": units} if units else {})})


def on_one(config: RunConfig, num_gpus: int) -> dict[str, tuple[int, ...]]:
    return {f"{role}/{name}/{index}": seat.gpus for (role, name, index), seat in seats(config, {ONE: num_gpus}).items()}


def hosts_of(config: RunConfig, room: dict[str, int]) -> dict[str, str]:
    return {f"{role}/{name}/{index}": seat.host for (role, name, index), seat in seats(config, room).items()}


def test_learners_come_first_then_servers_each_with_its_own() -> None:
    """One GPU for each rank; a server of two gets two that lie together."""
    config = config_of(a=policy(2, 2), b=policy(1, 1, "sglang", gpus=2), c=policy(device="cpu"))
    assert on_one(config, 7) == {
        "learner/a/0": (0, 1),
        "learner/b/0": (2,),
        "worker/a/0": (3,),
        "worker/b/0": (4, 5),
        "worker/a/1": (6,),
        "learner/c/0": (),
        "worker/c/0": (),
    }


def test_embedded_engines_take_what_is_left_and_then_share() -> None:
    """Those that have fewest on them, never one of a server."""
    config = config_of(a=policy(2, 2, "embedded"), b=policy(1, 1, "embedded"), s=policy(0 + 1, 1))
    found = on_one(config, 6)
    assert (found["worker/s/0"], found["worker/a/0"]) == ((4,), (5,))
    assert (found["worker/b/0"], found["worker/a/1"]) == ((0,), (1,))
    assert on_one(config_of(a=policy(1, 1, "embedded")), 1) == {"learner/a/0": (0,), "worker/a/0": (0,)}


def test_in_turns_engines_are_on_the_gpus_of_their_learner() -> None:
    """Every policy on as few as its learner has, and two of them on one where there is one."""
    config = config_of(a=policy(2, 3, "embedded", turns=True), b=policy(1, 1, "embedded", turns=True))
    assert on_one(config, 3) == {
        "learner/a/0": (0, 1),
        "learner/b/0": (2,),
        "worker/a/0": (0,),
        "worker/b/0": (2,),
        "worker/a/1": (1,),
        "worker/a/2": (0,),
    }
    pair = config_of(**{name: policy(1, 1, "embedded", turns=True) for name in "ab"})
    assert set(on_one(pair, 1).values()) == {(0,)}
    assert (least_gpus(pair), most_gpus(pair)) == (1, 2)


def test_learners_in_turns_are_on_units_only_where_every_other_gpu_is_held() -> None:
    config = config_of(["gpu:0", "gpu:1"], **{name: policy(1, 1, "embedded", turns=True) for name in "abc"})
    assert on_one(config, 3) == {"learner/a/0": (2,), "learner/b/0": (0,), "learner/c/0": (1,)}


def test_gpus_that_run_out_are_refused_with_counts_that_would_fit() -> None:
    """4 + 4 ranks take all of 8 GPUs; two of the four servers of each would have to sit on learners."""
    config = config_of(a=policy(4, 4), b=policy(4, 4))
    with pytest.raises(ConfigError) as refused:
        seats(config, {ONE: 8})
    assert str(refused.value) == (
        "policies.a.rollout.workers: no GPU is left for the engine, and a server cannot share its GPU; "
        "got '8 GPUs; learner ranks need 8, engines 8'; wanted 16 GPUs; "
        "cure: set policies.a.learner.processes = 3, policies.a.rollout.workers = 1, "
        "policies.b.learner.processes = 3, policies.b.rollout.workers = 1"
    )
    cured = config_of(a=policy(3, 1), b=policy(3, 1))
    assert len({gpu for gpus in on_one(cured, 8).values() for gpu in gpus}) == 8


def test_fewer_workers_are_named_before_fewer_ranks() -> None:
    """And where nothing fits, more GPUs or the engine that shares."""
    with pytest.raises(ConfigError, match=r"cure: set policies.a.rollout.workers = 2$"):
        seats(config_of(a=policy(2, 3)), {ONE: 4})
    with pytest.raises(ConfigError, match="cure: use more GPUs, or the embedded engine"):
        seats(config_of(a=policy(1, 1)), {ONE: 1})


def test_a_learner_needs_its_ranks_on_one_host() -> None:
    """Two hosts of two GPUs are not four for one learner."""
    with pytest.raises(
        ConfigError, match=r"policies.a.learner.processes: too few GPUs on one host; got 3; wanted <= 2"
    ):
        seats(config_of(a=policy(3, 1, "embedded")), {"n1": 2, "n2": 2})


def test_servers_that_somebody_else_started_need_no_gpu() -> None:
    """Only the learner does."""
    config = config_of(a=policy(1, 1) | {"rollout": {"engine": "vllm", "server": {"url": "http://x:1"}}})
    assert on_one(config, 1) == {"learner/a/0": (0,), "worker/a/0": ()}


def test_frozen_policies_have_engines_alone() -> None:
    """No GPU is kept for a learner."""
    assert on_one(config_of(a=policy(1, 1), t=policy(4, 1, frozen=True)), 3) == {
        "learner/a/0": (0,),
        "worker/a/0": (1,),
        "worker/t/0": (2,),
    }


def test_workers_spill_over_to_hosts_with_free_gpus() -> None:
    """Their learner's host first; then always the one with most."""
    config = config_of(a=policy(2, 6), b=policy(2, 1))
    found = hosts_of(config, {"n1": 4, "n2": 4, "n3": 4})
    assert [found[f"worker/a/{index}"] for index in range(6)] == ["n1", "n1", "n3", "n3", "n3", "n2"]
    assert (found["learner/a/0"], found["learner/b/0"], found["worker/b/0"]) == ("n1", "n2", "n2")


def test_a_server_of_several_gpus_is_never_torn_apart() -> None:
    """Two free GPUs on each of two hosts hold no server of four."""
    config = config_of(a=policy(2, 1, gpus=4))
    with pytest.raises(ConfigError, match="no GPU is left for the engine"):
        seats(config, {"n1": 4, "n2": 3})
    assert seats(config, {"n1": 4, "n2": 4})["worker", "a", 0] == ProcessPlacement("n2", (0, 1, 2, 3))


def test_on_cores_the_hosts_with_the_fewest_processes_come_first() -> None:
    """One policy on two hosts has its worker on the other; two policies stay each on its own."""
    one = config_of(a=policy(1, 1, "embedded", "cpu"))
    assert hosts_of(one, {"n1": 0, "n2": 0}) == {"learner/a/0": "n1", "worker/a/0": "n2"}
    two = config_of(a=policy(1, 2, "embedded", "cpu"), b=policy(1, 1, "embedded", "cpu"))
    assert hosts_of(two, {"n1": 0, "n2": 0}) == {
        "learner/a/0": "n1", "learner/b/0": "n2", "worker/a/0": "n1", "worker/b/0": "n2", "worker/a/1": "n1",
    }  # fmt: skip
    full = seats(two, {"n1": 0, "n2": 0}, {"n1": 1})
    assert [full["worker", name, 0].host for name in ("a", "b")] == ["n2", "n2"], "with as many on both, at home"
    teacher = config_of(a=policy(1, 1, "embedded", "cpu"), t=policy(1, 1, "embedded", "cpu", frozen=True))
    assert set(hosts_of(teacher, {"n1": 0, "n2": 0}).values()) == {"n1", "n2"}
    assert hosts_of(teacher, {"n1": 0, "n2": 0})["worker/a/0"] == "n1"


def test_leased_units_count_as_load_and_need_no_seat() -> None:
    """Learners alone are placed then."""
    config = config_of(units=["gpu:0", "gpu:1"], a=policy(1, 5))
    assert seats(config, {ONE: 1}) == {("learner", "a", 0): ProcessPlacement(ONE, (0,))}
    teacher = config_of(a=policy(1, 1, "embedded", "cpu"))
    found = seats(teacher, {"n1": 0, "n2": 0}, {"n2": 3})
    assert found["worker", "a", 0].host == "n1"


@pytest.mark.parametrize("seed", range(20))
def test_no_server_ever_shares_and_nobody_is_forgotten(seed: int) -> None:
    """Random runs on random hosts: what is seated keeps the rules, and what is refused has no room by counting."""
    rng = random.Random(seed)
    for _ in range(25):
        tables = {
            f"p{number}": policy(
                rng.choice([1, 1, 2, 4]),
                rng.randrange(1, 5),
                rng.choice(["vllm", "sglang", "embedded"]),
                rng.choice(["cuda", "cuda", "cpu"]),
            )
            for number in range(rng.randrange(1, 4))
        }
        config = config_of(**tables)
        room = {f"n{number}": rng.randrange(0, 9) for number in range(rng.randrange(1, 4))}
        asked = sum(
            table["learner"]["processes"] + table["rollout"]["workers"]
            for table in tables.values()
            if table["device"] == "cuda"
        )
        try:
            found = seats(config, room)
        except ConfigError:
            assert asked > max(room.values())
            continue
        assert found == seats(config, dict(room)), "every host finds the same"
        num_seats = sum(1 + table["rollout"]["workers"] for table in tables.values())
        assert len(found) == num_seats
        users: dict[tuple[str, int], list[tuple[str, str]]] = {}
        for (role, name, _), seat in found.items():
            assert len(set(seat.gpus)) == len(seat.gpus)
            assert all(gpu < room[seat.host] for gpu in seat.gpus)
            for gpu in seat.gpus:
                users.setdefault((seat.host, gpu), []).append((role, name))
        for holders in users.values():
            servers = [1 for role, name in holders if role == "worker" and has_own_gpus(config.policies[name])]
            assert not servers or len(holders) == 1


def test_the_docs_show_what_the_plan_does() -> None:
    """The example of docs/placement.md and the table below it."""
    page = (Path(__file__).parents[3] / "docs" / "placement.md").read_text()
    example = page.split("```toml")[1].split("```")[0]
    rows = re.findall(r"^\| ((?:learner|worker)/\S+) \| ([\d ]+) \|$", page, re.MULTILINE)
    found = on_one(config_of(**tomllib.loads(example)["policies"]), 8)
    assert {name: tuple(map(int, gpus.split())) for name, gpus in rows} == {
        name.removesuffix("/0") if name.startswith("learner") else name: gpus for name, gpus in found.items()
    }


def spread(hosts: int, ranks: int, device: str = "cpu", **keys: Any) -> dict[str, Any]:
    table = policy(device=device, engine="embedded", **keys)
    return table | {"learner": {"processes": ranks, "hosts": hosts}}


def test_a_learner_over_hosts_has_a_seat_on_each_of_them() -> None:
    """As many ranks on each, on hosts that have room, from the policy's own on."""
    config = config_of(a=spread(2, 4, "cuda"), b=spread(2, 2))
    found = seats(config, {"h0": 3, "h1": 1, "h2": 3})
    assert [found["learner", "a", index] for index in (0, 1)] == [
        ProcessPlacement("h0", (0, 1)),
        ProcessPlacement("h2", (0, 1)),
    ]
    assert [found["learner", "b", index] for index in (0, 1)] == [ProcessPlacement("h1"), ProcessPlacement("h2")]
    assert found["worker", "a", 0] == ProcessPlacement("h0", (2,))
    assert found["worker", "b", 0].host == "h1", "the fewest processes"


def test_hosts_that_a_learner_asks_for_and_the_run_lacks() -> None:
    """None, fewer, or fewer with GPUs enough."""
    with pytest.raises(
        ConfigError,
        match=r"a.learner.hosts: the run has fewer hosts .*; got 2; wanted <= 1; cure: name more hosts with",
    ):
        seats(config_of(a=spread(2, 2)), {ONE: 0})
    with pytest.raises(ConfigError, match=r"the run has fewer hosts for policies; got 3; wanted <= 2$"):
        seats(config_of(a=spread(3, 3)), {"h0": 0, "h1": 0})
    with pytest.raises(ConfigError, match=r"got '1 hosts with 2 GPUs'; wanted 2 such hosts for processes = 4"):
        seats(config_of(a=spread(2, 4, "cuda")), {"h0": 2, "h1": 1})
