"""TRL's side of the training benchmark: one process per policy, each on a core of its own."""

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench_peers.process import end

from bench_training.load import ANSWERS_PER_STEP, GROUP_SIZE, LR, PROMPTS_PER_STEP, Workplace
from bench_training.spent import Spent
from mrl import parent_death

TOOLS = Path(__file__).resolve().parents[1]
ROWS_PER_PASS = 16
"""Rows of one forward and backward pass: at 221 places a row, small enough for the caches."""
ENVIRONMENT = {
    "PYTHONPATH": str(TOOLS),
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "HF_HUB_OFFLINE": "1",
}


def run_trl(place: Workplace, python: Path, run: str, *, steps: int, cores: Sequence[str]) -> Spent:
    """Train all policies of the load at once. Raises RuntimeError when one of them fails."""
    with ExitStack() as stack:
        processes = []
        for name, core in zip(place.load.policies, cores, strict=True):
            job = write_job(place, f"{run}-{name}", name, steps=steps, lr=LR)
            processes.append(start(python, job, core))
            stack.callback(end, processes[-1])
        told = [listen(process, job) for process in processes]
    parts = [_spent(lines) for lines in told]
    return sum(parts[1:], parts[0])


def write_job(place: Workplace, run: str, policy: str, *, steps: int, lr: float, rollouts: str = "") -> Path:
    """Write and return the file that tells a TRL process what to do; it holds the fields of `trl_side.Job`."""
    job = {
        "model": str(place.policy(policy)),
        "prompts": str(place.prompts),
        "output": str(place.folder / "runs" / run),
        "steps": steps,
        "prompts_per_step": PROMPTS_PER_STEP,
        "group_size": GROUP_SIZE,
        "limit_tokens": place.load.limit_tokens,
        "lr": lr,
        "rows_per_pass": ROWS_PER_PASS,
        "rollouts": rollouts,
    }
    file = place.folder / f"{run}.json"
    file.write_text(json.dumps(job), encoding="utf-8")
    return file


def start(python: Path, job: Path, core: str) -> "subprocess.Popen[str]":
    """Start a TRL process on one core; its standard error goes to a file beside the job."""
    argv = ("taskset", "-c", core, str(python), "-m", "bench_training.trl_side", str(job))
    with job.with_suffix(".log").open("w") as log:
        return subprocess.Popen(
            parent_death.command(os.getpid(), argv),
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | ENVIRONMENT,
            text=True,
        )


def listen(process: "subprocess.Popen[str]", job: Path) -> list[dict[str, Any]]:
    """Read the lines of a TRL process until its end. Raises RuntimeError when it fails."""
    assert process.stdout is not None
    with process.stdout:
        lines = [json.loads(line) for line in process.stdout if line.startswith('{"step"')]
    if process.wait():
        raise RuntimeError(f"TRL failed: {job.with_suffix('.log').read_text(errors='replace')[-2000:]}")
    return lines


def _spent(lines: list[dict[str, Any]]) -> Spent:
    began, ended = lines[0], lines[-1]
    cpu_s, rollout_cpu_s = (ended[name] - began[name] for name in ("cpu_s", "rollout_cpu_s"))
    return Spent(
        samples=ANSWERS_PER_STEP * ended["step"],
        tokens=ended["tokens"],
        cpu_s=cpu_s,
        train_cpu_s=cpu_s - rollout_cpu_s,
        rollout_cpu_s=rollout_cpu_s,
        startup_cpu_s=began["cpu_s"],
    )
