"""The first hour on a GPU, on a CPU: every stage runs, tells its figures, and says how it ended."""

import json
import math
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch
from gpu_hour.bench import FILE, Bench, SkippedError
from gpu_hour.carry import needed
from gpu_hour.contact import QUICKSTART, leave_out_reasoning_gym
from gpu_hour.learner import COMBINATIONS
from gpu_hour.parts import run_stage
from gpu_hour.resume import apart

from mrl.config.load import validate

ROOT = Path(__file__).parents[2]
LEARNER = {"planned memory", "speed", "step", "work", "peak memory", "planned / measured memory"}
STEPS = {
    "copy on the device",
    "cast to bfloat16 on the device",
    "device to host, pageable",
    "device to host, pinned",
    "copy on the host",
    "XXH3 on the host",
    "write",
    "read",
}
WAY = {
    "make the canary",
    "publish",
    "load",
    "engine still while loading",
    "score the canary",
    "read back and hash",
    "learner to proved",
    "engine beside learner",
    "bytes compared",
}
RESUMED = {"resumed run", "trained tokens of a step", "resumed, beside unbroken"}


def call(*words: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(
        ["bash", "tools/gpu_hour.sh", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def measured(stage: str, folder: Path) -> dict[str, set[str]]:
    """Part -> names of the figures of a stage that ended well, all of them numbers or words."""
    done = call(stage, "--cpu", "--out", str(folder))
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines == [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    assert {line["device"] for line in lines} == {"cpu"}
    assert lines[-1]["status"] == "done"
    figures: dict[str, set[str]] = {}
    for line in lines:
        if "value" in line:
            assert isinstance(line["value"], str) or math.isfinite(line["value"])
            assert line["unit"]
            figures.setdefault(line["part"], set()).add(line["name"])
    return figures


def bench(folder: Path) -> Bench:
    return Bench("", "", "cpu", "cpu", folder, folder, time.monotonic(), os.open(os.devnull, os.O_WRONLY))


def told(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_a_part_that_fails_hides_nothing_and_costs_itself(tmp_path):
    """What it had measured stands, its reason is told, and the next part is begun."""

    def broken(at: Bench) -> None:
        at.tell("before", 1.0, "s")
        raise RuntimeError("no\nluck")

    def killed(at: Bench) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def lacking(at: Bench) -> None:
        raise SkippedError("no package")

    parts = {"broken": broken, "killed": killed, "lacking": lacking, "sound": lambda at: at.tell("after", 2, "s")}

    assert not run_stage("weights", parts, bench(tmp_path))

    lines = told(tmp_path)
    assert [line["name"] for line in lines if "value" in line] == ["before", "after"]
    statuses = {line["part"]: (line["status"], line["why"]) for line in lines if "part" in line and "status" in line}
    assert statuses == {
        "broken": ("failed", "RuntimeError: no luck"),
        "killed": ("failed", "its process ended with -9"),
        "lacking": ("skipped", "no package"),
        "sound": ("done", ""),
    }
    assert (lines[-1]["status"], "broken: RuntimeError: no luck" in str(lines[-1]["why"])) == ("failed", True)


def test_a_figure_that_is_no_number_fails_its_part(tmp_path):
    """And is not written."""
    assert not run_stage("weights", {"way": lambda at: at.tell("speed", math.nan, "GB/s")}, bench(tmp_path))
    assert "speed is nan" in str(told(tmp_path)[0]["why"])


def test_nothing_is_begun_when_the_time_is_used_up(tmp_path, monkeypatch):
    """It is skipped, with a line that says so; one that hangs is ended."""
    monkeypatch.setattr("gpu_hour.parts.STAGE_S", {"cpu": 1.0})
    monkeypatch.setattr("gpu_hour.parts.LEAST_S", 0.5)

    assert not run_stage("weights", {"hangs": lambda at: time.sleep(60), "way": lambda at: None}, bench(tmp_path))

    hangs, skipped, last = told(tmp_path)
    assert (hangs["status"], hangs["why"]) == ("failed", "not done when the stage's time was used up")
    assert (skipped["status"], skipped["why"]) == ("skipped", "the stage's time is used up")
    assert last["seconds"] < 30


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonsense"], "wanted contact"),
        pytest.param(["weights/x", "--cpu"], "wanted steps, way, sharing", marks=pytest.mark.thorough),
    ],
)
def test_a_stage_that_is_not_there_is_refused(words, said):
    """With those that are."""
    done = call(*words)
    assert done.returncode == 2
    assert said in done.stderr


def test_without_a_stage_all_of_them_are_listed():
    """And nothing is run."""
    done = call()
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "contact",
        "learner",
        "weights",
        "run",
        "resume",
        "vllm",
        "all",
    ]


def test_what_is_carried_is_what_a_run_needs_beside_torch():
    """Clients of the exchange, transformers and its tokenizers; neither torch nor what it brings."""
    carried = needed(["mrl[lora]"], beside=needed(["torch"]))
    assert {"pyzmq", "msgspec", "transformers", "tokenizers", "peft", "pydantic-core"} <= carried
    assert not {"torch", "sympy", "mrl", "ruff"} & carried


def test_the_quickstart_goes_without_tasks_that_were_not_carried():
    """Nobody is made skilled in what no task is left for."""
    tables = tomllib.loads(QUICKSTART.read_text())
    leave_out_reasoning_gym(tables)
    config = validate(tables, where="quickstart")
    operations = {task.operation for task in config.tasks.values()}
    assert len(operations) == 6
    assert all(policy.make.skilled_in and {*policy.make.skilled_in} < operations for policy in config.policies.values())


def test_runs_are_compared_by_every_tensor():
    """The largest difference beside the largest value; one that only one of them has is an error."""
    run = {"a": torch.tensor([1.0, -2.0]), "b": torch.zeros(2)}
    assert apart(run, run) == 0.0
    assert apart(run | {"a": torch.tensor([1.0, -2.5])}, run) == pytest.approx(0.25)
    with pytest.raises(RuntimeError, match="'b'"):
        apart(run, {"a": run["a"]})


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_learner_is_measured(tmp_path):
    """Every combination, with the plan's memory beside the measured one."""
    found = measured("learner", tmp_path)
    assert found.pop("1.7B-turns") == {"leaving", "coming back", "a step behind it"}
    assert found.keys() == COMBINATIONS.keys()
    assert all(names >= LEARNER for names in found.values())


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_way_of_weights_is_measured(tmp_path):
    """Its steps, and the way that runs take."""
    found = measured("weights", tmp_path)
    assert found["steps"] >= STEPS
    assert found["way"] >= WAY
    assert found["sharing"] >= {"learner still", "publish", "load", "read back and hash", "learner to proved"}
    assert found["sharing"] >= {"hashed as by vLLM"}


@pytest.mark.system
@pytest.mark.timeout(1800)
def test_first_contact_is_made(tmp_path):
    """Versions, tests, noise by number format, and a whole run of two policies."""
    found = measured("contact", tmp_path)
    assert found.keys() == {"probe", "gpu tests", "noise", "quickstart"}
    assert found["probe"] >= {"torch", "driver", "glibc", "python", "free main memory", "matrix product in bfloat16"}
    assert any("bfloat16, flash_attention, 1 at once" in name for name in found["noise"])
    assert found["quickstart"] >= {
        "qwen: steps",
        "llama: steps",
        "qwen: trained tokens",
        "llama: learner against engine",
    }


@pytest.mark.system
@pytest.mark.timeout(1800)
def test_two_policies_of_released_shapes_make_a_whole_run(tmp_path):
    """One of them with adapters; what learner and worker told, a resume, and an export that loads."""
    found = measured("run", tmp_path)["two policies"]
    assert found >= {"mrl train", "mrl train --resume"}
    for name in ("qwen", "smol"):
        assert found >= {f"{name}: {what}" for what in ("a step", "canary", "bytes compared", "exported and loaded")}


@pytest.mark.system
@pytest.mark.timeout(1800)
def test_a_killed_learner_is_resumed_and_restarted(tmp_path):
    """The same parameters wherever moments lie, and a run that comes to its end."""
    found = measured("resume", tmp_path)
    assert found["moments on the device"] >= RESUMED
    assert found["moments on the host"] >= RESUMED
    assert found["restart"] >= {"new process after the kill", "next step after the kill", "steps"}


@pytest.mark.engines
@pytest.mark.timeout(1800)
def test_a_server_beside_a_learner_is_measured(tmp_path):
    """Where its environment is there; else one line says what is missing."""
    found = measured("vllm", tmp_path)
    assert not found or found["server"] >= {"start", "sampling", "publish", "install and prove", "restart"}
