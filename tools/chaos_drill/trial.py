"""One training run under faults: its processes, the versions that it publishes, and the processes that outlive it."""

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
    """A run started by its command line, and what was observed of it."""

    folder: Path
    """Folder of the run; its output goes to a log beside it."""
    argv: tuple[str, ...]
    seen: set[int] = field(default_factory=set)
    """Pids of all processes that were descendants of the supervisor."""
    versions: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Policy -> versions (run_epoch, step), in the order in which they were found published."""
    ends: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Role -> Unix times at which each of its ended processes was seen last, and was first missing."""
    alive: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Role -> pid of its process, and Unix time at which it was seen last."""
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
        """Run the command until it ends by itself; kill it after `limit_s`.

        Faults begin with the first published version and go on for `faults_for_s`.
        """
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
        """Return the pid of each role's process; note processes, versions and ends."""
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
        """Number of the run's processes that still live `within_s` after its end."""
        end_s = time.monotonic() + within_s
        while (alive := [pid for pid in self.seen if _lives(pid)]) and time.monotonic() < end_s:
            time.sleep(TURN_S)
        return len(alive)

    def disorders(self) -> list[str]:
        """Descriptions of versions that are not later than the version published before them."""
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
    """Make the trial of `mrl train CONFIG` with this run name."""
    argv = (sys.executable, "-m", "mrl", "train", str(config), "--run.name", name, "--run.folder", str(runs))
    return Trial(runs / name, (*argv, *overrides))


def resume(trial: Trial) -> Trial:
    """Make the trial that resumes the run of a trial."""
    return Trial(trial.folder, (*trial.argv, "--resume"), seen=trial.seen, versions=trial.versions)


def roles_of(policies: Iterable[str]) -> tuple[str, ...]:
    """Roles of a run of these policies beside its supervisor, with one worker each and one daemon."""
    of_policies = (role for policy in policies for role in (f"learner/{policy}", f"worker/{policy}/0"))
    return ("exchange", "allocator", *of_policies)


def _by_age(folder: Path) -> list[str]:
    """Names of the published versions, oldest first; a version may be pruned meanwhile."""
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
