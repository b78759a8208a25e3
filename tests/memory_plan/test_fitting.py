"""Keys that nobody gave make room for a run in the memory of its host; those that somebody gave stay."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.config.defaults import Resolved
from mrl.config.load import load_config
from mrl.config.schema import RunConfig
from mrl.memory_plan.fitting import FILLED, fitted_to_memory
from mrl.memory_plan.policy_memory import PolicyMemory
from mrl.memory_plan.run_memory import memory_plan, too_little
from mrl.processes.planning.plan import planned
from mrl.processes.preparation.comparison_plan import FITTED
from tests.support.forgetful_template import FORGETFUL
from tests.support.model_folders import write_model

CONFIG = """
[run]
name = "r"
steps = 2
[pool]
train_prompts = 4
held_out_prompts = 2
[tasks.trim]
source = "words"
dataset = "trim"
[policies.large]
model = "not-there"
source = "maker/Large-{size}"
rollout = {{ max_new_tokens = 512 }}
"""
ROOT = Path(__file__).parents[2]
KEEPS_ALL = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
AMPLE_MIB = 1e6
ADAPTERS = ("--policies.large.learner.lora.rank", "8")
"""Of a learner with whole weights a checkpoint's copy is soon what needs most, and no pass."""


def config_of(folder: Path, *overrides: str, size: str = "1B") -> RunConfig:
    path = folder / "r.toml"
    path.write_text(CONFIG.format(size=size))
    return load_config(path, [*overrides])


def needed_mib(config: RunConfig) -> dict[str, float]:
    return {need.spec.name: need.host_mib for need in memory_plan(config, planned(config))}


def chosen(config: RunConfig, host_mib: float) -> tuple[RunConfig, dict[str, object]]:
    resolved = fitted_to_memory(config, planned(config), host_mib)
    return resolved.config, {one.key.removeprefix("policies.large."): one.value for one in resolved.choices}


def test_a_run_that_fits_and_one_of_small_models_stay_as_they_are(tmp_path: Path) -> None:
    fits = config_of(tmp_path)
    assert fitted_to_memory(fits, planned(fits), AMPLE_MIB) == Resolved(fits, ())
    small = config_of(tmp_path, size="0.01B")
    assert fitted_to_memory(small, planned(small), 1.0) == Resolved(small, ())


def test_whoever_supervises_a_run_of_small_models_waits_for_no_heavy_library() -> None:
    """It would take its seconds, and its memory, beside the roles that do need it."""
    code = (
        "import sys, mrl.processes.supervisor; from pathlib import Path; from mrl.config.load import load_config;"
        "from mrl.memory_plan.fitting import fitted_to_memory; from mrl.memory_plan.run_memory import check_sleepers;"
        "from mrl.processes.planning.plan import planned;"
        "config = load_config(Path('configs/quickstart.toml')); plan = planned(config);"
        "fitted_to_memory(config, plan, 1e6); check_sleepers(config, plan, host_mib=1e6, where='');"
        "sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT).returncode == 0


def test_a_run_that_would_fill_the_host_does_not_fit(tmp_path: Path) -> None:
    """A share of the memory is left to what the plan does not know."""
    config = config_of(tmp_path)
    needed = sum(needed_mib(config).values())
    assert chosen(config, 1.01 * needed / FILLED)[1] == {}
    assert chosen(config, 1.01 * needed)[1] != {}


def test_cache_and_passes_become_smaller_until_the_run_fits(tmp_path: Path) -> None:
    """The largest process first: here the engine, whose answers at once are whole groups, doubled."""
    config = config_of(tmp_path)
    before = needed_mib(config)
    host_mib = 0.8 * sum(before.values()) / FILLED
    fitting, values = chosen(config, host_mib)
    after = needed_mib(fitting)
    assert sum(after.values()) <= FILLED * host_mib < sum(before.values())
    assert values == {"rollout.answers_at_once": fitting.policies["large"].rollout.answers_at_once}
    groups = fitting.policies["large"].rollout.answers_at_once / config.policies["large"].rollout.group_size
    assert groups in (2**power for power in range(10))


def test_no_key_goes_below_what_a_run_can_do_with(tmp_path: Path) -> None:
    """One group, and one row of the longest prompt; without keys that help the run is left to the check's words."""
    _, values = chosen(config_of(tmp_path, *ADAPTERS), 1.0)
    assert values == {
        "rollout.answers_at_once": 8,
        "learner.microbatch_tokens": 1024,
        "learner.activation_checkpointing": True,
    }
    assert values.keys() == {f"{table}.{key}" for table, keys in FITTED.items() for key in keys}, "for comparisons"


@pytest.mark.parametrize(
    ("history", "max_episode_tokens", "microbatch_tokens"),
    [("sampled", 0, 2048), ("template", 0, None), ("template", 3000, 4096)],
)
def test_all_rows_of_an_episode_keep_their_pass(
    tmp_path: Path, history: str, max_episode_tokens: int, microbatch_tokens: int | None
) -> None:
    """One row ends where the model does; several have as many tokens together as their task or the pass gives them."""
    words = ["--tasks.trim.source", "environment", "--tasks.trim.dataset", "higher_lower"]
    words += ["--tasks.trim.max_episode_tokens", str(max_episode_tokens), "--policies.large.prompt.history", history]
    _, values = chosen(config_of(tmp_path, *ADAPTERS, *words), 1.0)
    assert values.get("learner.microbatch_tokens") == microbatch_tokens


@pytest.mark.parametrize(("template", "has_several"), [(FORGETFUL, True), (KEEPS_ALL, False), ("", False)])
def test_several_rows_are_planned_where_the_template_drops_reasoning(
    tmp_path: Path, template: str, has_several: bool
) -> None:
    """Of a model that is there; the longest example of one row is the row, and of several the whole pass."""
    model = write_model(tmp_path / "model")
    if template:
        (model / "chat_template.jinja").write_text(template)
    words = ["--tasks.trim.source", "environment", "--tasks.trim.dataset", "higher_lower"]
    config = config_of(tmp_path, "--policies.large.model", str(model), *words)
    table = config.policies["large"].learner.model_copy(update={"microbatch_tokens": 1 << 20})
    policy = config.policies["large"].model_copy(update={"learner": table})
    longest = PolicyMemory(config.model_copy(update={"policies": {"large": policy}}), "large").longest_example_tokens
    assert (longest == 1 << 20) == has_several


def test_keys_that_were_given_stay(tmp_path: Path) -> None:
    given = {"rollout.answers_at_once": 64, "learner.activation_checkpointing": "false"}
    words = [word for key, value in given.items() for word in (f"--policies.large.{key}", str(value))]
    _, values = chosen(config_of(tmp_path, *ADAPTERS, *words), 1.0)
    assert values == {"learner.microbatch_tokens": 1024}


def test_a_policy_on_a_gpu_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its processes have on the host follows from none of these keys."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert chosen(config_of(tmp_path, "--policies.large.device", "cuda"), 1.0)[1] == {}


def test_a_cure_names_the_most_answers_at_once_that_fit(tmp_path: Path) -> None:
    config = config_of(tmp_path, "--policies.large.rollout.answers_at_once", "512")
    needs = memory_plan(config, planned(config))
    host_mib = 0.6 * sum(need.host_mib for need in needs)
    (cure,) = [line for line in too_little(config, needs, host_mib, {}) if "cure" in line]
    told = re.search(r"policies\.large: set rollout\.answers_at_once = (\d+), which needs (\d+) MiB", cure)
    assert told, cure

    def total_mib(answers: int) -> float:
        return sum(needed_mib(config_of(tmp_path, "--policies.large.rollout.answers_at_once", str(answers))).values())

    assert total_mib(int(told[1])) <= host_mib < total_mib(2 * int(told[1]))
