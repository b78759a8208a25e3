"""First contact with a machine: its equipment, the tests that need a GPU, the noise of equal weights, a whole run."""

import importlib.util
import os
import platform
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.etree import ElementTree

import psutil
import tomli_w
import torch

from gpu_hour.bench import Bench
from gpu_hour.noise import measure_noise
from mrl import parent_death
from mrl.memory_plan.needs import CUDA_CONTEXT_MIB, MIB
from mrl.metrics.jsonl import each_metrics

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.toml"
GIB = 1024**3
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "pyzmq", "peft", "liger-kernel")
TINY_RUN = (
    "--run.steps=3",
    "--pool.train_prompts=64",
    "--pool.held_out_prompts=16",
    *(f"--policies.{name}.make.warm_start_steps=4" for name in ("qwen", "llama")),
    *(f"--policies.{name}.make.num_layers=1" for name in ("qwen", "llama")),
    # With an entropy bonus, groups whose answers all fail are trained on too.
    *(f"--policies.{name}.objective.entropy_coefficient=0.001" for name in ("qwen", "llama")),
)
POLICIES = ("qwen", "llama")
TOO_LATE = 124
"""Exit code, as of `timeout`, of a command that was ended because the stage's time was used up."""


def contact_parts() -> dict[str, Callable[[Bench], None]]:
    """Parts of the stage, the most basic first."""
    return {"probe": probe, "gpu tests": run_tests, "noise": measure_noise, "quickstart": run_quickstart}


def probe(bench: Bench) -> None:
    """Write versions, memory, and the highest speed of the device."""
    for name, said in {
        "python": platform.python_version(),
        "glibc": platform.libc_ver()[1] or "none",
        "kernel": platform.release(),
        "driver": _driver(),
        "CUDA of torch": str(torch.version.cuda or "none"),
        **{name: _version(name) for name in PACKAGES},
    }.items():
        bench.tell(name, said, "version", wanted=_pins().get(name.lower(), ""))
    bench.tell("cores", len(os.sched_getaffinity(0)), "cores")
    bench.tell("free main memory", psutil.virtual_memory().available / GIB, "GiB")
    bench.tell("free on disk", psutil.disk_usage(str(bench.folder)).free / GIB, "GiB")
    if bench.device == "cuda":
        before_mib = _used_mib()
        free, total = torch.cuda.mem_get_info()
        bench.tell("free GPU memory", free / GIB, "GiB", total_gib=total / GIB)
        bench.tell("compute capability", ".".join(map(str, torch.cuda.get_device_capability())), "version")
        bench.tell("NCCL", ".".join(map(str, torch.cuda.nccl.version())), "version")
        bench.tell("GPUs", torch.cuda.device_count(), "GPUs")
    width = bench.of(8192, 256)
    first = torch.randn(width, width, device=bench.device, dtype=torch.bfloat16)
    bench.tell("matrix product in bfloat16", 2 * width**3 / bench.seconds(lambda: first @ first) / 1e12, "TFLOP/s")
    if bench.device == "cuda":
        beside_mib = _used_mib() - before_mib - torch.cuda.memory_reserved() / MIB
        bench.tell("CUDA context", beside_mib, "MiB", planned_mib=CUDA_CONTEXT_MIB)


def run_tests(bench: Bench) -> None:
    """Run `tests/gpu`. Raises RuntimeError that names the failed tests."""
    found = bench.scratch / "tests.xml"
    words = ("-m", "pytest", "tests/gpu", "-q", "--tb=short", "-p", "no:cacheprovider", "-W", "default")
    _call(bench, (*words, f"--junitxml={found}"))
    (suite,) = ElementTree.parse(found).getroot().iter("testsuite")
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    bench.tell("passed", counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"], "tests", **counts)
    wrong = [case.attrib["name"] for case in suite.iter("testcase") if {"failure", "error"} & {one.tag for one in case}]
    if wrong:
        raise RuntimeError(f"failed: {', '.join(wrong)}")


def run_quickstart(bench: Bench) -> None:
    """Run the quickstart's configuration, with both policies and their engines on this device.

    Without reasoning-gym the run goes without its tasks. Raises RuntimeError when `mrl train` fails.
    """
    tables = tomllib.loads(QUICKSTART.read_text())
    if importlib.util.find_spec("reasoning_gym") is None:
        leave_out_reasoning_gym(tables)
    config = bench.scratch / "quickstart.toml"
    config.write_text(tomli_w.dumps(tables))
    bench.tell("tasks", len(tables["tasks"]), "tasks")
    name = "gpu-hour-quickstart"
    where = (f"--run.folder={bench.scratch}", f"--run.name={name}")
    devices = [f"--policies.{policy}.device={bench.device}" for policy in POLICIES]
    began_s = time.monotonic()
    code = _call(bench, ("-m", "mrl", "train", str(config), *where, *devices, *bench.of((), TINY_RUN)))
    bench.tell("whole run, policies made first", time.monotonic() - began_s, "s")
    metrics = bench.scratch / name / "metrics.jsonl"
    records = list(each_metrics(metrics)) if metrics.exists() else []
    for policy in POLICIES:
        of_policy = [one["values"] | one for one in records if one["role"] == f"learner/{policy}" and "values" in one]
        _tell_policy(bench, policy, [one for one in of_policy if "tokens/trained" in one])
    if code:
        raise RuntimeError(f"mrl train ended with {code}; see {bench.stage}.log")


def leave_out_reasoning_gym(tables: dict[str, Any]) -> None:
    """Remove reasoning-gym's tasks, and the skills that policies would be made with for these tasks alone."""
    tables["tasks"] = {name: task for name, task in tables["tasks"].items() if task["source"] != "reasoning_gym"}
    operations = {task["operation"] for task in tables["tasks"].values()}
    for policy in tables["policies"].values():
        policy["make"]["skilled_in"] = [one for one in policy["make"]["skilled_in"] if one in operations]


def _tell_policy(bench: Bench, policy: str, steps: list[dict[str, Any]]) -> None:
    bench.tell(f"{policy}: steps", len(steps), "steps")
    if not steps:
        return
    seconds = steps[-1]["time_unix_s"] - steps[0]["time_unix_s"]
    last_tenth = steps[-(len(steps) // 10 or 1) :]
    bench.tell(f"{policy}: a step", seconds / max(1, len(steps) - 1), "s")
    bench.tell(f"{policy}: reward at the end", fmean(one["reward/mean"] for one in last_tenth), "reward")
    bench.tell(f"{policy}: trained tokens", sum(one["tokens/trained"] for one in steps), "tokens")
    bench.tell(f"{policy}: learner against engine", fmean(one["mismatch/k3_nats"] for one in steps), "nats")


def _call(bench: Bench, words: tuple[str, ...]) -> int:
    """Run a command of this Python, which ends with this process or the stage's time; return its exit code."""
    argv = parent_death.command(os.getpid(), (sys.executable, *words))
    try:
        return subprocess.run(argv, cwd=ROOT, timeout=max(1.0, bench.left_s - 10.0), check=False).returncode
    except subprocess.TimeoutExpired:
        return TOO_LATE


def _driver() -> str:
    try:
        return _of_gpu("driver_version")
    except (OSError, subprocess.SubprocessError, IndexError):
        return "none"


def _used_mib() -> float:
    """Memory used on the first GPU by all processes, asked without opening the GPU in this process."""
    return float(_of_gpu("memory.used"))


def _of_gpu(figure: str) -> str:
    words = ["nvidia-smi", f"--query-gpu={figure}", "--format=csv,noheader,nounits"]
    return subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {name.lower(): pin for name, mark, pin in (line.partition("==") for line in lines) if mark}
