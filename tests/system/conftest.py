"""Real runs of small policies: a configuration, the command, and what its processes and files say.

Counting letters is easy (the answer is mostly 1). The warm start of qwen names counting rarely and that of llama often,
so that a few dozen steps raise qwen's reward, and its first failures find successes of llama. More than a few held-out
prompts would cost more than the steps.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from mrl.metrics.jsonl import each_metrics
from mrl.parent_death import command

CONFIG = """
[run]
name = "{name}"
folder = "{folder}"
steps = {steps}

[pool]
train_prompts = 256
held_out_prompts = 8

[tasks.trim]
source = "words"
dataset = "trim"
operation = "trim"

[tasks.letter_counting]
source = "reasoning_gym"
dataset = "letter_counting"
options = {{ min_words = 1, max_words = 1 }}
max_prompt_chars = 67
operation = "count"

[evaluation]
every = 0

[allocation]
slots = 128
floor_slots = 32

[policies.qwen.make]
architecture = "qwen3"
tokenizer = "byte_level"
vocab_size = 400
hidden_size = 64
num_layers = 2
skilled_in = ["trim"]
rare_share = 0.05
warm_start_steps = 120
warm_start_batch = 32
warm_start_lr = 4e-3

[policies.llama.make]
architecture = "llama"
tokenizer = "metaspace"
vocab_size = 500
hidden_size = 64
num_layers = 2
skilled_in = ["count"]
rare_share = 0.05
warm_start_steps = 120
warm_start_batch = 32
warm_start_lr = 4e-3
{policies}
"""
POLICY = """
[policies.{name}.rollout]
max_new_tokens = 16
[policies.{name}.learner]
prompts_per_step = 8
lr = 5e-4
checkpoint_every = 4
data_timeout_s = 240
processes = {processes}
"""

SGT = """
[sharing]
regime = "sgt"
"""
TRACKED = """
[[trackers]]
kind = "tensorboard"
samples = 2
samples_every = 1
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs wait for much in turn, and the machine may be busy: the guard against hangs is a wider one."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))


class Run:
    """One `mrl train` in its own session."""

    def __init__(self, config: Path, folder: Path, log: Path) -> None:
        self.config, self.folder, self.log = config, folder, log
        self.process: subprocess.Popen[bytes] | None = None
        self.temporary = Path(tempfile.mkdtemp(prefix="t-"))
        """What its processes take for the host's."""
        self._seen: set[int] = set()

    def start(self, *arguments: str, argv: Sequence[str] = ()) -> None:
        """Start `mrl train`, or the command `argv`, output into the log; it ends with this process."""
        argv = tuple(argv or [sys.executable, "-m", "mrl", "train", str(self.config), *arguments])
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command(os.getpid(), argv),
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(self.temporary)},
            )

    def metrics(self, role: str = "") -> list[dict[str, Any]]:
        """Metric records so far, of roles that start with `role`; of learners those of their steps."""
        path = self.folder / "metrics.jsonl"
        records = list(each_metrics(path)) if path.exists() else []
        found = [record for record in records if "values" in record and record["role"].startswith(role)]
        return [record for record in found if not role.startswith("learner") or "loss/total" in record["values"]]

    def result(self, policy: str, step: int) -> dict[str, Any]:
        """An evaluation result of the run."""
        return json.loads((self.folder / "evaluation" / f"{policy}-{step}.json").read_text())

    def step(self, policy: str) -> int:
        """Newest step of a learner."""
        return max((record["step"] for record in self.metrics(f"learner/{policy}")), default=0)

    def pid(self, title: str) -> int:
        """The process that carries this title, or 0."""
        return next((p.pid for p in self.children() if f"mrl::{title}" in " ".join(_words_of(p))), 0)

    def titles(self) -> dict[str, int]:
        """The pid of every process of a role, by its title."""
        first = {process.pid: [*_words_of(process), ""][0].strip() for process in self.children()}
        return {word.removeprefix("mrl::"): pid for pid, word in first.items() if word.startswith("mrl::")}

    def children(self) -> list[psutil.Process]:
        """All live processes of the run below the supervisor; remembers every pid it saw."""
        assert self.process is not None
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        live = [process for process in found if _is_live(process)]
        self._seen |= {process.pid for process in live}
        return live

    def left_over(self) -> list[int]:
        """Processes that were seen in the run and are still alive."""
        return [process.pid for process in psutil.process_iter() if process.pid in self._seen and _is_live(process)]

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 480.0) -> Any:
        """Poll until the condition holds; fails with the run's log when it does not in time or the run ends first."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            found = condition()
            if found:
                return found
            assert self.process is not None
            if self.process.poll() is not None and not condition():
                break
            time.sleep(0.2)
        pytest.fail(f"{what}: did not happen; log of the run:\n{self.tail()}")

    def finish(self, timeout_s: float = 480.0) -> int:
        """Wait for the end; returns the exit code."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run does not end; its log:\n{self.tail()}")

    def tail(self) -> str:
        """The last lines of the run's own output and of every role's log."""
        text = self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""
        for path in sorted((self.folder / "logs" / "latest").glob("*.log")):
            text += f"\n--- {path.name}\n" + path.read_text(errors="replace")[-1500:]
        return text

    def kill(self) -> None:
        """End the run and everything it started, whatever state it is in."""
        if self.process is not None:
            self.children()
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(120)
        shutil.rmtree(self.temporary, ignore_errors=True)


def _is_live(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _words_of(process: psutil.Process) -> list[str]:
    """Its command line; nothing of one that has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """A factory of runs; whatever is still alive is killed at the end."""
    runs: list[Run] = []

    def make(*, steps: int, processes: int = 1, name: str = "system", more: str = SGT) -> Run:
        runs.append(_run_in(tmp_path, steps=steps, processes=processes, name=name, more=more))
        return runs[-1]

    yield make
    for run in runs:
        run.kill()


def _run_in(folder: Path, *, steps: int, processes: int = 1, name: str = "system", more: str = SGT) -> Run:
    policies = "".join(POLICY.format(name=policy, processes=processes) for policy in ("qwen", "llama"))
    config = folder / f"{name}.toml"
    config.write_text(CONFIG.format(folder=folder / "runs", name=name, steps=steps, policies=policies + more))
    return Run(config, folder / "runs" / name, folder / f"{name}.log")


def keep_qwen(config: Path, weights: str = "files") -> None:
    """Leaves one policy in a configuration of two, and gives its engine new weights in this way."""
    recipe, sampling = (config.read_text().partition(f"[policies.llama.{table}]") for table in ("make", "rollout"))
    own = sampling[0][sampling[0].index("[policies.qwen.rollout]") :]
    own = own.replace("max_new_tokens", f'weights = "{weights}"\nmax_new_tokens')
    config.write_text(recipe[0] + own)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, list[str]]]:
    """A tracked run of forty steps to which nothing happened, and what its processes listened at while it trained.

    For the tests of one file: each file is a process of its own, which would train it again.
    """
    run = _run_in(tmp_path_factory.mktemp("finished"), steps=40, more=SGT + TRACKED)
    try:
        run.start("--pool.held_out_prompts=64")
        run.until(lambda: min(run.step("qwen"), run.step("llama")) >= 2, "both train")
        found = list(_listening(run))
        assert run.finish() == 0, run.tail()
        yield run, found
    finally:
        run.kill()


def _listening(run: Run) -> Iterator[str]:
    """Title and address of what a process of the run listens at, datagram sockets included."""
    assert run.process is not None
    for process in (psutil.Process(run.process.pid), *run.children()):
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in process.net_connections("inet"):
                if one.laddr and not one.raddr:
                    yield f"{' '.join(_words_of(process)[:2])} {one.laddr}"
