"""Train the runs of a comparison that are not done, as many at once as the machine holds.

A lane is a place for one run at a time. GPUs have the names that CUDA_VISIBLE_DEVICES takes.
"""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from mrl.files import replace_file
from mrl.parent_death import command
from mrl.processes.display import RunConsole
from mrl.processes.planning.devices import visible_gpus
from mrl.processes.planning.log_lines import reason_in
from mrl.processes.preparation.comparison_plan import PlannedRun, config_toml

POLL_S = 0.5
MIB = 1024 * 1024
Lane = tuple[str, ...]
"""GPUs of the runs in this place, which follow one another; empty where no policy is on a GPU."""


@dataclass(frozen=True, slots=True)
class FreeMachine:
    """Resources of this machine for runs."""

    cores: int
    memory_mib: float
    gpus: tuple[str, ...]

    @classmethod
    def here(cls) -> "FreeMachine":
        """Return the cores that this process may use, the memory that is free now, and the GPUs that it sees."""
        free_mib = psutil.virtual_memory().available / MIB
        return cls(len(os.sched_getaffinity(0)), free_mib, tuple(visible_gpus(os.environ)))


@dataclass(frozen=True, slots=True)
class RunNeed:
    """Resources that one run takes."""

    policies: int
    host_mib: float
    """Planned peak of the main memory of all its processes."""
    least_gpus: int
    """Number of GPUs without which the run cannot start; 0 where no policy is on a GPU."""
    most_gpus: int
    """Number of GPUs with which none of its processes has to share one."""
    is_alone: bool = False
    """Whether the run names cores or ports, which no two runs can have at once."""


def lanes(machine: FreeMachine, needs: Sequence[RunNeed], *, jobs: int = 0) -> list[Lane]:
    """Return places for runs of any of `needs`, each with GPUs of its own; at least one place.

    `jobs` > 0 asks for that many places, whatever fits; if GPUs do not suffice for all, all places share all GPUs.
    """
    least, most = max(need.least_gpus for need in needs), max(need.most_gpus for need in needs)
    if not jobs:
        by_cores = machine.cores // max(need.policies for need in needs)
        fitted_to_memory = int(machine.memory_mib / max(need.host_mib for need in needs))
        by_gpus = [len(machine.gpus) // most] if most else []
        by_names = [1] if any(need.is_alone for need in needs) else []
        jobs = max(1, min([by_cores, fitted_to_memory, *by_gpus, *by_names]))
    if not most:
        return [()] * jobs
    share = len(machine.gpus) // jobs
    if share < max(1, least):
        return [machine.gpus] * jobs
    return [machine.gpus[place * share : (place + 1) * share] for place in range(jobs)]


def train_missing(runs: Sequence[PlannedRun], places: Sequence[Lane]) -> None:
    """Train every run that is not done, one per place at a time. A signal to this process ends the runs first."""
    missing = [one for one in runs if not one.state().is_done]
    console = RunConsole()
    console.say(f"{len(runs)} runs, {len(runs) - len(missing)} already done, {len(places)} at a time")
    waiting, free = deque(missing), deque(places)
    running: dict[subprocess.Popen[bytes], tuple[PlannedRun, Lane]] = {}
    started_s, done = time.monotonic(), 0
    with _terminated_as_interrupted():
        try:
            while waiting or running:
                while waiting and free:
                    one, lane = waiting.popleft(), free.popleft()
                    running[_start(one, lane)] = one, lane
                time.sleep(POLL_S)
                for process in [process for process in running if process.poll() is not None]:
                    done += 1
                    minutes = (time.monotonic() - started_s) / 60
                    one, lane = running.pop(process)
                    free.append(lane)
                    minutes_left = minutes / done * (len(missing) - done)
                    console.say(_told(one, process.returncode, minutes, minutes_left))
        except KeyboardInterrupt:
            console.say("interrupted; run the same command again to continue")
            raise
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()


def _told(one: PlannedRun, code: int, minutes: float, minutes_left: float) -> str:
    outcome = "done"
    if code:
        reason = reason_in(one.output.read_text(errors="replace").splitlines())
        outcome = f"failed with exit code {code} ({reason}), see {one.output} and {one.folder / 'logs'}"
    return f"{one.folder}: {outcome}; {minutes:.1f} minutes, about {minutes_left:.0f} left"


def _start(one: PlannedRun, lane: Lane) -> subprocess.Popen[bytes]:
    """Begin or resume a run. It dies with this process, so that no later call finds it still running."""
    how = "--resume" if one.state().can_resume else "--clean"
    one.config_toml.parent.mkdir(parents=True, exist_ok=True)
    replace_file(one.config_toml, config_toml(one.config).encode())
    argv = command(os.getpid(), (sys.executable, "-m", "mrl", "train", how, str(one.config_toml)))
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(lane)} if lane else {})
    with one.output.open("wb") as log:
        return subprocess.Popen(argv, env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, so that the started runs are ended.

    A SIGHUP that is ignored already stays ignored, as under `nohup`.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    is_kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = (signal.SIGTERM,) if is_kept else (signal.SIGTERM, signal.SIGHUP)
    earlier = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
