"""What engines that take turns on units need, in the plan that `mrl check` shows and before a run where they sleep."""

from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.config.load import load_config
from mrl.config.schema import RunConfig
from mrl.engines.sglang_launch import SPARE_TOKENS
from mrl.errors import ConfigError
from mrl.memory_plan.needs import (
    AGENT_MIB,
    CUDA_CONTEXT_MIB,
    FLOAT_BYTES,
    MIB,
    SERVER_MIB,
    TORCH_MIB,
    TRACKER_MIB,
    VOCABULARY_BYTES,
)
from mrl.memory_plan.policy_memory import PolicyMemory
from mrl.memory_plan.run_memory import ProcessNeed, by_device, check_sleepers, memory_plan, too_little
from mrl.metrics.trackers.kinds import TRACKERS
from mrl.processes.planning.plan import Plan, build_plan
from mrl.processes.unit_memory import SLEEPER_MIB

CONFIG = """
[run]
name = "r"
steps = 2
folder = "{folder}"
[pool]
train_prompts = 4
held_out_prompts = 2
[tasks.trim]
source = "words"
dataset = "trim"
[allocation]
units = ["cpu:0", "cpu:1", "gpu:0"]
floor_units = 0
[policies.large]
model = "{folder}/large"
source = "maker/Large-2B"
[policies.small]
model = "{folder}/small"
source = "maker/Small-1B"
rollout = {{ engine = "vllm" }}
[policies.one]
model = "{folder}/one"
source = "maker/One-2B"
device = "cuda"
[policies.two]
model = "{folder}/two"
source = "maker/Two-1B"
device = "cuda"
"""
LARGE, SMALL = ("worker/large/0", "cpu:0"), ("worker/small/0", "cpu:0")
GPUS = "CUDA_VISIBLE_DEVICES"
ONE, TWO = ("worker/one/2", "gpu:0"), ("worker/two/2", "gpu:0")
BILLION_MIB = FLOAT_BYTES * 1e9 / MIB
VOCABULARY = VOCABULARY_BYTES * 32_000.0
"""That of a model of which nothing is known."""
PROCESS_MIB = TORCH_MIB + VOCABULARY / MIB


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two policies on cores, one of them in a server, and two on a GPU; no model is there."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    path = tmp_path / "r.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


def planned(path: Path, residency: str, *overrides: str) -> tuple[RunConfig, Plan]:
    config = load_config(path, ["--allocation.residency", residency, *overrides])
    return config, build_plan(config, Path("r"), gpus=["a", "b", "c"])


def on_units(needs: list[ProcessNeed]) -> dict[tuple[str, str], ProcessNeed]:
    return {(need.spec.name, need.spec.env["MRL_UNIT"]): need for need in needs if "MRL_UNIT" in need.spec.env}


def test_engines_that_end_count_once_on_each_unit(config: Path) -> None:
    """The largest that may be there; the others are listed with nothing."""
    needs = memory_plan(*planned(config, "stop", "--policies.large.rollout.weights", "broadcast"))
    staged = {
        need.spec.name: need.host.parts["published weights"] / MIB for need in needs if need.spec.role == "learner"
    }
    assert staged["learner/large"] == pytest.approx(2 * 2 * BILLION_MIB, rel=0.2), "two copies of two billion numbers"
    found = on_units(needs)
    assert len(found) == 6, "two policies on each of three units"
    assert found[LARGE].host.mib > TORCH_MIB + 2 * 2 * BILLION_MIB, "served and next weights, and a cache"
    assert (found[SMALL].host_mib, found[SMALL].device) == (0.0, None)
    one = found[ONE].device
    assert one is not None
    assert found[TWO].device is None
    arriving_mib = found[ONE].host.parts["new weights"] / MIB
    assert (found[ONE].host_mib, found[TWO].host_mib) == (PROCESS_MIB + arriving_mib, 0.0), "whichever it is"
    assert by_device(needs)["a"] == one.mib


def test_fewer_units_are_no_cure_for_a_gpu_that_is_too_small(config: Path) -> None:
    """Each has a GPU of its own."""
    given = planned(config, "stop")
    needs = memory_plan(*given)
    room_mib = by_device(needs)["a"] - 1
    first, cure = too_little(given[0], needs, float("inf"), {"a": room_mib})
    assert first.startswith("cuda a:")
    assert "units" not in cure


@pytest.mark.parametrize(("engine", "kept_mib"), [("embedded", CUDA_CONTEXT_MIB), ("sglang", SLEEPER_MIB)])
def test_a_unit_that_a_learner_has_too_in_turns_needs_the_larger_of_them(
    config: Path, engine: str, kept_mib: int
) -> None:
    """And what the others keep."""
    words = [
        [f"--policies.{name}.turns", "true", f"--policies.{name}.rollout.engine", engine] for name in ("one", "two")
    ]
    in_turns, _ = planned(config, "stop", *words[0], *words[1])
    plan = build_plan(in_turns, Path("r"), gpus=["a"])
    needs = memory_plan(in_turns, plan)
    on_a = {need.spec.name: need.device.mib for need in needs if need.device and need.spec.env.get(GPUS) == "a"}
    assert on_a.keys() == {"learner/one", "learner/two", "worker/one/2"}
    assert by_device(needs)["a"] == max(on_a.values()) + CUDA_CONTEXT_MIB + kept_mib
    assert {spec.name for spec in plan.leased if spec.env.get(GPUS) == "a"} == {"worker/one/2", "worker/two/2"}


def test_engines_that_sleep_lie_beside_the_one_that_is_awake(config: Path) -> None:
    """Transformers keeps the weights that it served: from a GPU they go into main memory. On cores engines end."""
    needs = memory_plan(*planned(config, "sleep"))
    found = on_units(needs)
    awake = on_units(memory_plan(*planned(config, "stop")))
    one = awake[ONE].device
    assert one is not None
    assert (found[LARGE].host, found[SMALL].host) == (awake[LARGE].host, awake[SMALL].host)
    assert (found[SMALL].host.moment, found[TWO].host.moment) == ("ended", "asleep")
    assert found[ONE].device == one
    served_mib = one.parts["weights"] / 2 / MIB
    assert found[ONE].host_mib == pytest.approx(PROCESS_MIB + served_mib), "new weights on their way to the GPU"
    kept_mib = found[TWO].host.parts["weights"] / MIB
    assert found[TWO].host_mib == pytest.approx(PROCESS_MIB + kept_mib), "while one has it"
    assert by_device(needs)["a"] == one.mib + CUDA_CONTEXT_MIB, "a process keeps its context"


def test_a_server_that_sleeps_keeps_more_of_a_gpu_than_a_process_of_torch(config: Path) -> None:
    """Its graphs and its workspaces lie beside its context; a unit is quiet when sleepers hold no more than that."""
    server = planned(config, "sleep", "--policies.two.rollout.engine", "vllm")
    more_mib = by_device(memory_plan(*server))["a"] - by_device(memory_plan(*planned(config, "sleep")))["a"]
    assert more_mib == SLEEPER_MIB - CUDA_CONTEXT_MIB


@pytest.mark.thorough
def test_a_server_has_its_processes_on_the_host_and_on_cores_its_cache_too(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's cache is what its variable says, SGLang's as long as all its answers; a GPU's is not mrl's to say.

    The server on cores has its units alone: beside a larger engine it would count for nothing. For a GPU new weights,
    in bfloat16, are read into main memory first.
    """
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")

    def parts(which: tuple[str, str], *overrides: str) -> tuple[dict[str, float], dict[str, float]]:
        """On the host, and on a device."""
        need = on_units(memory_plan(*planned(config, "sleep", *overrides)))[which]
        return need.host.parts, {} if need.device is None else need.device.parts

    processes = {"process": TORCH_MIB * MIB, "vocabulary": VOCABULARY, "server's processes": SERVER_MIB["vllm"] * MIB}
    alone = ["--policies.large.device", "cuda"]
    once = parts(SMALL, *alone, "--policies.small.rollout.engine", "embedded")[0]["weights"] / 2
    cache = {"key-value cache": 3 * 1024 * MIB}
    assert parts(SMALL, *alone)[0] == {**processes, **cache, "server's weights": once, "new weights": 2 * once}
    sglang = [*alone, "--policies.small.rollout.engine", "sglang", "--policies.small.rollout.server.context_tokens"]
    short, long = (parts(SMALL, *sglang, tokens)[0]["key-value cache"] for tokens in ("100", "300"))
    assert long / short == pytest.approx((300 + SPARE_TOKENS) / (100 + SPARE_TOKENS))
    more = parts(SMALL, *sglang, "100", "--policies.small.learner.prompts_per_step", "1", "--allocation.slots", "1020")
    assert more[0]["key-value cache"] == 2 * short, "as many as the server is started for, not as the learner wants"
    host, device = parts(ONE, "--policies.one.rollout.engine", "vllm", "--policies.two.rollout.engine", "vllm")
    assert host == processes | {"new weights": pytest.approx(4 * BILLION_MIB / FLOAT_BYTES * MIB, rel=0.1)}
    assert device.keys() == {"server's weights", "CUDA context"}


@pytest.mark.thorough
def test_nothing_of_a_server_that_somebody_else_started_is_counted(config: Path) -> None:
    """It may be on another host."""
    url = ["--policies.small.rollout.server.url", "http://127.0.0.1:1"]
    needs = memory_plan(*planned(config, "stop", "--allocation.units", "[]", "--allocation.floor_units", "1", *url))
    (worker,) = [need for need in needs if need.spec.name == "worker/small/0"]
    assert worker.host.parts.keys() == {"process", "vocabulary"}


def test_a_cache_that_is_no_number_is_one_line(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the environment's, which nothing else looks at."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "much")
    with pytest.raises(ConfigError, match=r"variable VLLM_CPU_KVCACHE_SPACE; got 'much'; wanted a whole number of GiB"):
        memory_plan(*planned(config, "sleep"))


@pytest.mark.thorough
def test_an_engine_on_a_unit_has_the_cache_of_its_part_of_the_slots(config: Path) -> None:
    """A third of them here."""
    slots = on_units(memory_plan(*planned(config, "stop", "--allocation.slots", "48")))
    answers = on_units(memory_plan(*planned(config, "stop", "--policies.large.rollout.answers_at_once", "16")))
    assert slots[LARGE].host == answers[LARGE].host


@pytest.mark.thorough
def test_what_sleeps_and_all_that_runs_beside_it_have_to_fit(config: Path) -> None:
    """Engines that end are never too many."""
    asleep, ending = planned(config, "sleep"), planned(config, "stop")
    needs = memory_plan(*asleep)
    wanted_mib = sum(need.host_mib for need in needs)
    leased_mib = sum(need.host_mib for need in on_units(needs).values())
    assert leased_mib < wanted_mib, "learners count, too"
    check_sleepers(*asleep, host_mib=1.01 * wanted_mib, where="r.toml")
    with pytest.raises(
        ConfigError, match=rf"r.toml: .*got '{wanted_mib:.0f} MiB, {leased_mib:.0f} of them for engines on units"
    ):
        check_sleepers(*asleep, host_mib=0.99 * wanted_mib, where="r.toml")
    check_sleepers(*ending, host_mib=1.0, where="r.toml")


def test_requests_outside_of_episodes_count_where_a_run_answers_them(config: Path) -> None:
    """The longest that one may be makes the cache of all rows wider, and has a pass of its own to score it."""

    def parts(*overrides: str) -> dict[str, float]:
        return PolicyMemory(load_config(config, list(overrides)), "large").engine().parts

    def served(tokens: int) -> dict[str, float]:
        return parts("--gateway.serve", "true", "--gateway.max_prompt_tokens", str(tokens))

    alone, long = parts("--gateway.max_prompt_tokens", "2000"), served(2000)
    assert alone == served(1)
    assert long["key-value cache"] > 3 * alone["key-value cache"]
    assert long["canary"] > alone["canary"]
    assert served(1_000_000) == served(2048), "no more than the model can read"


def test_new_weights_on_their_way_to_a_gpu_count_on_its_host(config: Path) -> None:
    """An embedded engine there has all of them in main memory first, but for what it opens on its learner's GPU."""

    def arriving_mib(*rollout: str) -> float:
        found = on_units(memory_plan(*planned(config, "stop", *rollout)))
        assert "new weights" not in found[LARGE].host.parts, "on a CPU they are part of the engine"
        return found[ONE].host.parts.get("new weights", 0.0) / MIB

    assert arriving_mib() == pytest.approx(BILLION_MIB, rel=0.2), "two billion numbers in bfloat16"
    assert arriving_mib("--policies.one.rollout.weights", "broadcast") == arriving_mib()
    assert arriving_mib("--policies.one.rollout.weights_in", "gpu") == 0


def test_answers_of_peers_count_where_an_engine_scores_them(config: Path) -> None:
    """The longest of any policy, behind a prompt; what is read before it is kept. Nobody asks an engine otherwise."""

    def scoring(regime: str, *overrides: str) -> float:
        loaded = load_config(config, ["--sharing.regime", regime, *overrides])
        return PolicyMemory(loaded, "large").engine().parts["canary"]

    def scored(tokens: int) -> float:
        return scoring("rlad", "--policies.one.rollout.max_new_tokens", str(tokens))

    kept = PolicyMemory(load_config(config, []), "large")._size.cached_per_token * FLOAT_BYTES
    assert scoring("prp", "--policies.one.rollout.max_new_tokens", "8000") == scoring("prp")
    assert 4000 * kept < scored(8000) - scored(4000) < 1.5 * 4000 * kept, "and no more logits at once"
    assert scored(4000) > scoring("prp")


def test_an_engine_has_room_for_whole_episodes_of_what_is_played(config: Path) -> None:
    """Their environment says as much as the policy, in the rows that its context and a pass of the learner hold."""

    rollout = "--policies.large.rollout.max_new_tokens"
    game = ["--tasks.trim.source", "environment", "--tasks.trim.dataset", "higher_lower"]

    def cache(new_tokens: int, *overrides: str) -> float:
        loaded = load_config(config, [rollout, str(new_tokens), *overrides])
        return PolicyMemory(loaded, "large").engine().parts["key-value cache"]

    def played(turns: int, most: int = 0) -> float:
        return cache(8, *game, "--tasks.trim.max_turns", str(turns), "--tasks.trim.max_episode_tokens", str(most))

    assert played(8) == cache(2 * 8 * 8, *game, "--tasks.trim.max_turns", "1", "--tasks.trim.max_episode_tokens", "1")
    assert played(8) == played(9, 2 * 8 * 8), "no more than its task lets it have"
    assert played(128) == played(1000) > played(60), "nor than its context holds"

    policy = PolicyMemory(load_config(config, [rollout, "8", *game, "--tasks.trim.max_turns", "128"]), "large")
    shorter, _ = policy.fullest_pass(policy.table.learner.model_copy(update={"microbatch_tokens": 512}))
    assert shorter.rows == 1
    assert shorter.prompt_tokens + shorter.answer_tokens == 512, "what a table of shorter passes lets a row have"


def test_versions_on_a_learners_gpu_count_there_and_on_its_host(config: Path) -> None:
    """Two of them on either, in the number format of the engine; shared out over ranks."""

    def published(weights_in: str, *overrides: str) -> tuple[float, float]:
        loaded = load_config(config, ["--policies.one.rollout.weights_in", weights_in, *overrides])
        policy = PolicyMemory(loaded, "one")
        host, device = policy.ranks(policy.table.learner)[0]
        return host.parts["published weights"], device.parts.get("published weights", 0.0)

    on_host, nothing = published("memory")
    assert nothing == 0.0
    assert published("gpu") == (on_host, on_host)
    halves = published("gpu", "--policies.one.learner.processes", "2")
    assert halves == (on_host / 2, on_host / 2)


@pytest.mark.parametrize("command", [["train"], ["launch", "--dry-run"]])
def test_it_is_looked_at_before_a_run_where_engines_sleep(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """In one line, before anything is written."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("M", (), {"total": 2**30})())
    monkeypatch.setattr("mrl.processes.preparation.preflight.missing_model", lambda *_: None)
    monkeypatch.setattr("mrl.processes.preparation.preflight.check_model_folder", lambda *_, **__: None)
    monkeypatch.setattr("mrl.processes.preparation.preflight.check_built", lambda *_, **__: None)
    monkeypatch.setattr("mrl.processes.preparation.preflight.check_engines", lambda *_: None)
    monkeypatch.setattr("mrl.processes.preparation.preflight.check_prompts", lambda *_: None)
    monkeypatch.setattr("mrl.processes.preparation.hub_models.unfetched", lambda _: [])
    assert main([*command, str(config), "--allocation.residency", "sleep"]) == 2
    line = capsys.readouterr().err
    assert 'allocation.residency = "sleep": sleeping engines and running processes do not fit' in line
    assert line.count("\n") == 1
    assert [path.name for path in config.parent.iterdir()] == ["r.toml"]


@pytest.mark.thorough
def test_check_lists_what_leases_may_start(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with its unit, and what it needs while another policy has that."""
    assert main(["check", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (large,) = [line for line in lines if "worker/large/1" in line]
    assert "cpu:1" in large
    assert "sampling" in large
    (small,) = [line for line in lines if "worker/small/1" in line]
    assert "0 MiB" in small
    assert "ended" in small
    (total,) = [line for line in lines if " processes  " in line and "MiB" in line]
    assert total.split()[0] == str(2 + 4 + 3), "daemons, learners, one engine on each unit"


def test_the_process_of_each_tracker_counts_on_the_first_host(config: Path) -> None:
    """As measured; every kind has its figure."""
    tables = [{"kind": kind} for kind in ("wandb", "tensorboard", "wandb")]
    run, plan = planned(config, "stop", "--trackers", repr(tables).replace("'kind':", "kind =").replace("'", '"'))
    found = {need.spec.name: need for need in memory_plan(run, plan) if need.spec.role == "tracker"}
    assert {name: need.host_mib for name, need in found.items()} == {
        "tracker/wandb": TRACKER_MIB["wandb"],
        "tracker/tensorboard": TRACKER_MIB["tensorboard"],
        "tracker/wandb-2": TRACKER_MIB["wandb"],
    }
    assert {need.spec.host for need in found.values()} == {plan.first_host}
    assert TRACKER_MIB.keys() == TRACKERS.keys()


def test_torchrun_counts_where_several_ranks_need_it(config: Path) -> None:
    """A rank that is alone has none beside it."""
    two = load_config(config, ["--policies.small.learner.processes=2"])
    plan = build_plan(two, Path("/r"), gpus="abc")
    agents = {need.spec.name: need.agent_mib for need in memory_plan(two, plan) if need.spec.role == "learner"}
    assert (agents["learner/large"], agents["learner/small"]) == (0.0, AGENT_MIB)
