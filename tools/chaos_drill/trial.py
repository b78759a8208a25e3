"""One training run under faults: its processes, what it publishes, and what it leaves behind."""

import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil

from chaos_drill.faults import Saboteur, send
from mrl.parent_death import command

TURN_S = 0.1
GONE_S = 10.0
TITLE = re.compile(r"mrl::(\S+)")


@dataclass
class Trial:
    """A run by the command line, and what was seen of it."""

    folder: Path
    """Of the run; its output goes to a log beside it."""
    argv: tuple[str, ...]
    seen: set[int] = field(default_factory=set)
    """Every process that lived below the supervisor."""
    versions: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Policy -> versions (run_epoch, step) in the order in which they were found published."""
    ends: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Role -> when each of its processes that is gone was seen last, and when it was missed first, as Unix times."""
    alive: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Role -> its process, and when that was seen last."""
    code: int | None = None
    seconds: float = 0.0
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the command, which ends when this process does."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with self.folder.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen(
                command(os.getpid(), self.argv), stdout=log, stderr=log, start_new_session=True
            )

    def run(self, saboteur: Saboteur | None, *, faults_for_s: float, limit_s: float) -> None:
        """Until it ends by itself; faults come until its first version is so old. After `limit_s` it is killed."""
        self.start()
        assert self.process is not None
        started_s, under_way_s = time.monotonic(), math.inf
        while self.process.poll() is None:
            now_s = time.monotonic()
            pids = self.look()
            if any(self.versions.values()):
                under_way_s = min(under_way_s, now_s)
            if saboteur is not None:
                saboteur.turn(pids, now_s, more=now_s - under_way_s < faults_for_s, kill=send)
            if now_s - started_s > limit_s:
                self.process.kill()
            time.sleep(TURN_S)
        self.code, self.seconds = self.process.returncode, time.monotonic() - started_s

    def look(self) -> dict[str, int]:
        """Role -> its process now; notes processes and versions."""
        assert self.process is not None
        pids: dict[str, int] = {}
        for child in _descendants(self.process.pid):
            self.seen.add(child.pid)
            title = TITLE.match(_command(child))
            if title:
                pids[title[1]] = child.pid
        for policy in self.folder.glob("weights/*"):
            self._note_versions(policy)
        self._note_ends(pids, time.time())
        return pids

    def left_behind(self, *, within_s: float = GONE_S) -> int:
        """Processes of the run that live longer than so many seconds after its end."""
        end_s = time.monotonic() + within_s
        while (alive := [pid for pid in self.seen if _lives(pid)]) and time.monotonic() < end_s:
            time.sleep(TURN_S)
        return len(alive)

    def disorders(self) -> list[str]:
        """Versions that did not come after the one before."""
        return [
            f"{policy}: {after} after {before}"
            for policy, found in self.versions.items()
            for before, after in pairwise(found)
            if after <= before
        ]

    def _note_ends(self, pids: Mapping[str, int], now_unix_s: float) -> None:
        for role, (pid, seen_unix_s) in list(self.alive.items()):
            if pids.get(role) != pid:
                self.ends.setdefault(role, []).append((seen_unix_s, now_unix_s))
                del self.alive[role]
        self.alive |= {role: (pid, now_unix_s) for role, pid in pids.items()}

    def _note_versions(self, policy: Path) -> None:
        found = self.versions.setdefault(policy.name, [])
        for name in _by_age(policy):
            epoch, _, step = name.partition(".")
            version = (int(epoch), int(step))
            if version not in found:
                found.append(version)


def train(config: Path, runs: Path, name: str, *overrides: str) -> Trial:
    """The trial of `mrl train CONFIG` under this name."""
    argv = (sys.executable, "-m", "mrl", "train", str(config), "--run.name", name, "--run.folder", str(runs))
    return Trial(runs / name, (*argv, *overrides))


def resume(trial: Trial) -> Trial:
    """The trial that goes on where this one ended."""
    return Trial(trial.folder, (*trial.argv, "--resume"), seen=trial.seen, versions=trial.versions)


def roles_of(policies: Iterable[str]) -> tuple[str, ...]:
    """What a run of these policies has beside its supervisor, with one worker each and one daemon."""
    of_policies = (role for policy in policies for role in (f"learner/{policy}", f"worker/{policy}/0"))
    return ("exchange", "allocator", *of_policies)


def _by_age(folder: Path) -> list[str]:
    """Names of the published versions, oldest first; one may be pruned while we look."""
    found = []
    for manifest in folder.glob("[0-9]*/manifest.json"):
        with suppress(FileNotFoundError):
            found.append((manifest.stat().st_mtime_ns, manifest.parent.name))
    return [name for _, name in sorted(found)]


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and os.getpid() != pid
    except psutil.NoSuchProcess:
        return False
