"""mrl's side of the training benchmark: a whole `mrl train`, with all its processes.

Counted are the CPU seconds of supervisor, learners, workers, exchange and allocator from the first published weights to
the report of the last step. In between as many answers are sampled as are trained: nothing is granted beyond the last
step.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench_peers.process import end

from bench_training.load import ANSWERS_PER_STEP, Workplace
from bench_training.spent import Clocks, Spent, between_s, clocks, total_s
from mrl import parent_death
from mrl.config.run_folder import RunFolder
from mrl.metrics.jsonl import each_metrics

LOOK_EVERY_S = 0.2
DEADLINE_S = 3600.0
LEARNER = ("mrl::learner", "torch.distributed.run")
WORKER = ("mrl::worker",)


def run_mrl(place: Workplace, run: str, *, steps: int, cores: str) -> Spent:
    """Run `mrl train` bound to `cores` ("0" or "0,1"), and return its CPU seconds.

    Raises RuntimeError when it fails or takes longer than DEADLINE_S.
    """
    file = place.config_file(run, steps=steps)
    argv = ("taskset", "-c", cores, sys.executable, "-m", "mrl", "train", str(file))
    said = place.folder / f"{run}.log"
    with said.open("wb") as log:
        process = subprocess.Popen(parent_death.command(os.getpid(), argv), stdout=log, stderr=log)
    watch = _Watch(process, said, time.monotonic() + DEADLINE_S)
    folder = RunFolder(place.folder / "runs" / run)
    try:
        began = watch.look_when(lambda: _has_weights(folder, place.load.policies))
        ended = watch.look_when(lambda: len(_steps(folder)) == steps * len(place.load.policies))
    finally:
        end(process)
    return _spent(_steps(folder), began, ended, watch.seen)


class _Watch:
    """Watches the processes of a run until a condition holds."""

    def __init__(self, process: "subprocess.Popen[bytes]", said: Path, deadline_s: float) -> None:
        self._process, self._said, self._deadline_s = process, said, deadline_s
        self.seen: Clocks = {}
        """Last seen clock of every process, by pid: a learner may have ended when its last report is read."""

    def look_when(self, is_there: Callable[[], bool]) -> Clocks:
        """Return the clocks when `is_there()` becomes true. Raises RuntimeError when the run ends or is late."""
        while not is_there():
            if self._process.poll() is not None or time.monotonic() > self._deadline_s:
                last_words = self._said.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"mrl train ended early or took too long; it said: {last_words}")
            self._look()
            time.sleep(LOOK_EVERY_S)
        return self._look()

    def _look(self) -> Clocks:
        found = clocks(self._process.pid)
        for pid, clock in found.items():  # a process that has ended has lost its title
            title = clock.title or self.seen.get(pid, clock).title
            self.seen[pid] = clock._replace(title=title)
        return found


def _has_weights(folder: RunFolder, policies: tuple[str, ...]) -> bool:
    return any(any(folder.weights(name).glob("*/manifest.json")) for name in policies)


def _steps(folder: RunFolder) -> list[dict[str, float]]:
    """Metrics of every step that a learner has reported."""
    if not folder.metrics_jsonl.exists():
        return []
    lines = list(each_metrics(folder.metrics_jsonl))
    return [line["values"] for line in lines if "tokens/trained" in line.get("values", {})]


def _spent(steps: list[dict[str, float]], began: Clocks, ended: Clocks, seen: Clocks) -> Spent:
    return Spent(
        samples=ANSWERS_PER_STEP * len(steps),
        tokens=round(sum(ANSWERS_PER_STEP * values["tokens/answer_mean"] for values in steps)),
        cpu_s=total_s(ended) - total_s(began),
        train_cpu_s=between_s(began, seen, *LEARNER),
        rollout_cpu_s=between_s(began, seen, *WORKER),
        startup_cpu_s=total_s(began),
    )
