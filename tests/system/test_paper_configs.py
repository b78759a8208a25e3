"""The configurations of papers, run for two steps: regime and objective as they say, tiny policies and easy sums."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from mrl.config.load import load_config
from mrl.config.policy_tables import MakeTable, ServerTable
from mrl.config.run_folder import read_run_config
from mrl.config.schema import RunConfig
from mrl.metrics.jsonl import each_metrics
from mrl.models.make import make_policy
from mrl.tasks.math_source import PROMPT

PAPERS = sorted((Path(__file__).parents[2] / "configs" / "paper").glob("*.toml"))
REGIMES = [(path, "") for path in PAPERS]
REGIMES += [(path, regime) for path in PAPERS if path.stem == "mrl_math" for regime in ("independent", "prp", "xgrpo")]
QUICK = ("mrl_math",)
"""RLAD is compared below; the others, which differ in regimes, numbers and models only, are run by name."""
RUNS = [
    pytest.param(
        path,
        regime,
        id=f"{path.stem}-{regime}".strip("-"),
        marks=() if path.stem in QUICK and not regime else pytest.mark.slow,
    )
    for path, regime in REGIMES
]
STEPS = 2
HEARD = {
    "prp": "sharing/peer_rows",
    "xgrpo": "sharing/hit_prompts",
    "sgt": "sharing/rescues",
    "hacpo": "sharing/peer_rows",
    "graft": "sharing/hit_prompts",
    "rlad": "sharing/scored_rows",
}
"""Regime -> what counts that a peer was heard."""
ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": ""}

pytestmark = pytest.mark.system


class Pair(NamedTuple):
    """A supervised example."""

    turns: tuple[tuple[str, str], ...]


class Guesses:
    """Sums whose answer is 1, 2 or 3, answered by a guess: right in a third of the cases, so that groups are mixed."""

    def draw(self, rng: random.Random, *, practice: bool) -> Pair:
        """One example."""
        problem = PROMPT.replace("{problem}", sum_of(rng.randrange(1000)))
        return Pair(((problem, rf"\boxed{{{rng.choice('123')}}}"),))


def sum_of(number: int) -> str:
    return f"What is {number} - {number - 1 - number % 3}?"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A policy of each family that answers in a box."""
    folders = []
    for architecture, tokenizer in (("qwen3", "byte_level"), ("llama", "metaspace")):
        shape = {"vocab_size": 400, "hidden_size": 32, "num_layers": 1, "num_heads": 2}
        steps = {"warm_start_steps": 80, "warm_start_batch": 16, "warm_start_lr": 1e-2}
        recipe = MakeTable(architecture=architecture, tokenizer=tokenizer, **shape, **steps)
        folders.append(tmp_path_factory.mktemp("models") / architecture)
        make_policy(recipe, Guesses(), folders[-1], on_step=lambda step, loss: None)
    return folders


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """A file of sums."""
    rows = [{"problem": sum_of(number), "answer": str(1 + number % 3)} for number in range(200)]
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def tiny(config: RunConfig, models: list[Path], problems: Path, folder: Path) -> list[str]:
    """Overrides that keep what the paper says of regime and objective, and shrink everything else."""
    keys: dict[str, object] = {
        "run.steps": STEPS, "run.folder": folder, "run.name": "tiny", "run.min_free_mib": 1, "run.sync_timeout_s": 120,
        "pool.train_prompts": 16, "pool.held_out_prompts": 4, "evaluation.every": 0,
        "evaluation.samples": 1, "evaluation.k": [1],
        "exchange.budget_mib": 16,
    }  # fmt: skip
    for task, table in config.tasks.items():
        if table.source == "math":
            keys |= {f"tasks.{task}.dataset": problems, f"tasks.{task}.options.held_out": "", f"tasks.{task}.get": ""}
            keys |= {f"tasks.{task}.verifier_processes": 1}
    for number, (name, policy) in enumerate(config.policies.items()):
        here = {
            "model": models[number % 2],
            "device": "cpu",
            "rollout.max_new_tokens": 16,
            "rollout.answers_at_once": 9,
            "rollout.engine": "embedded",
            "rollout.workers": 1,
            "rollout.server.context_tokens": ServerTable().context_tokens,
            "rollout.server.options": [],
            "learner.processes": 1,
            "learner.sharding": "replicate",
        }
        if not policy.frozen:
            here |= {"learner.prompts_per_step": 4, "learner.lr": 1e-3, "learner.data_timeout_s": 400}
            here |= {"learner.microbatch_tokens": 512, "rollout.group_size": 4}
        keys |= {f"policies.{name}.{key}": value for key, value in here.items()}
    return [f"--{key}={value}" for key, value in keys.items()]


@pytest.mark.parametrize(("path", "regime"), RUNS)
def test_two_steps_of_every_configuration(path, regime, models, problems, tmp_path):
    """Every policy that learns makes two steps with finite losses, and answers are verified by `math-verify`."""
    config = load_config(path)
    words = tiny(config, models, problems, tmp_path) + ([f"--sharing.regime={regime}"] if regime else [])
    assert run([sys.executable, "-m", "mrl", "train", str(path), *words], tmp_path / "log") == 0, tail(tmp_path)

    assert_trained(config, tmp_path / "tiny")


def assert_trained(config: RunConfig, folder: Path) -> None:
    """Two steps of every learner, what the verifier said of answers, and that learners heard of peers.

    Where all answers fail, as those of tiny policies on logic do, there is nothing to ask a teacher.
    """
    records = [record for record in each_metrics(folder / "metrics.jsonl") if "values" in record]
    regime = read_run_config(folder).sharing["regime"]
    records = [one for one in records if "eval/accuracy" not in one["values"]]
    learners = [one["values"] for one in records if one["role"].startswith("learner/")]
    if regime in HEARD and any(0 < values["reward/mean"] < 1 for values in learners if "reward/mean" in values):
        assert sum(values.get(HEARD[regime], 0) for values in learners) > 0, f"{regime}: nobody heard of a peer"
    for name in config.learning:
        steps = {one["step"]: one["values"] for one in records if one["role"].startswith(f"learner/{name}")}
        assert sorted(steps) == list(range(1, STEPS + 1))
        assert all(math.isfinite(values["loss/total"]) for values in steps.values())
        if config.tasks.get("math"):
            sampled = [one["values"] for one in records if one["role"].startswith(f"worker/{name}")]
            assert max(values.get("verify/answers", 0) for values in sampled) > 0
            assert any(0 < values["reward/mean"] < 1 for values in steps.values())
            assert any(values["optim/grad_norm"] > 0 for values in steps.values())


@pytest.mark.slow
def test_grpo_against_rlad_is_one_command_that_goes_on_after_a_kill(models, problems, tmp_path):
    """The baseline trains without the teacher; a killed comparison takes its run along, and a second call ends it."""
    path = next(path for path in PAPERS if path.stem == "rlad_math")
    folder, log = tmp_path / "compare", tmp_path / "log"
    words = ["--regimes", "independent,rlad", "--seeds", "1", "--jobs", "1", "--folder", str(folder)]
    argv = [sys.executable, "-m", "mrl", "compare", str(path), *words]
    tiny_words = tiny(load_config(path), models, problems, tmp_path)
    argv += [word for word in tiny_words if not word.startswith("--run.folder=")]  # each run of it has its own
    with log.open("wb") as out:
        process = subprocess.Popen(argv, env=ENVIRONMENT, stdout=out, stderr=out)
    lock = folder / "rlad-1" / "lock"
    try:
        while process.poll() is None and not (lock.exists() and lock.read_text().strip()):
            time.sleep(0.05)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL, log.read_text()
    supervisor = int(lock.read_text())
    while psutil.pid_exists(supervisor) and psutil.Process(supervisor).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)

    assert run(argv, log) == 0, log.read_text() + (folder / "rlad-1.log").read_text()
    assert "2 runs, 1 already done" in log.read_text()
    found = {name: json.loads((folder / name / "config.json").read_text()) for name in ("independent-1", "rlad-1")}
    for name in found:
        assert_trained(load_config(path), folder / name)
    assert [sorted(one["policies"]) for one in found.values()] == [["student"], ["student", "teacher"]]
    tables = (folder / "comparison.md").read_text()
    assert "mean over policies and seeds (1 each)" in tables
    assert "independent: runs without teacher (frozen), which this regime never uses" in tables
    seeds = {name: told["seeds"]["1"] for name, told in json.loads((folder / "comparison.json").read_text()).items()}
    assert seeds["independent"]["scored_tokens"] == 0 < seeds["rlad"]["scored_tokens"]


def run(argv: list[str], log: Path) -> int:
    """Exit code of the command; it is killed, and all it started with it, when it takes longer than ten minutes."""
    with log.open("wb") as out:
        process = subprocess.Popen(argv, env=ENVIRONMENT, stdout=out, stderr=out, start_new_session=True)
    try:
        return process.wait(600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def tail(folder: Path) -> str:
    """The last lines of the command and of every role."""
    logs = [folder / "log", *sorted((folder / "tiny" / "logs" / "latest").glob("*.log"))]
    return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in logs)
