"""Versions of policies that clients ask for by step: each is served from its checkpoint by a process of its own.

The process starts for the first request, answers over a WebSocket as rollout workers do, and ends when it is idle.
"""

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from mrl.gateway.chat_wire import ChatRefusal
from mrl.parent_death import command

KEPT_VERSIONS = "kept_versions"
"""Folder in the run's folder for weights that are written to load a checkpoint, and not needed afterwards."""
IDLE_S = 300.0
"""Seconds without a request after which the process of a version ends, and its memory is free again."""
RESTING_S = 1.0
"""Seconds without a request after which the process of a version may make room for another version."""
END_S = 10.0
CLOSE_S = 1.0
"""Seconds from the order to end until a process is killed: of one process, and of all where the gateway ends."""
PAUSE_S = 60.0
"""Seconds after a version's process failed, before it is started again."""
MAX_STEP_DIGITS = 18

log = structlog.get_logger()


@dataclass(slots=True)
class _Served:
    process: "subprocess.Popen[bytes]"
    wanted_s: float
    """Clock time at which the version last had a request."""
    is_loaded: bool = False
    ends_s: float | None = None
    """Clock time at which the process was told to end; None before."""

    @property
    def is_ending(self) -> bool:
        return self.ends_s is not None

    def end(self, now_s: float) -> None:
        self.ends_s = now_s
        self.process.terminate()


class CheckpointServers:
    """The checkpoints of a run's policies, and the processes that serve some of them. They end with this process."""

    def __init__(
        self,
        run_folder: Path,
        steps: Callable[[str], Collection[int]],
        *,
        most: int,
        start: Callable[[str, int], tuple[Sequence[str], Mapping[str, str]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`steps` gives the steps of a policy's checkpoints now; at most `most` versions are served at a time.

        `start` gives the command that serves a policy's step, and environment variables beside those of this process.
        """
        self._run_folder, self._steps, self._most = run_folder, steps, most
        self._start, self._clock = start, clock
        self._served: dict[tuple[str, int], _Served] = {}
        self._failed: dict[tuple[str, int], tuple[float, str]] = {}
        """(policy, step) -> clock time of its last failure, and the reason."""

    @property
    def num_alive(self) -> int:
        """Number of processes that are alive."""
        return len(self._served)

    @property
    def is_changing(self) -> bool:
        """Whether a process loads or ends: no other starts before that is over."""
        return any(not served.is_loaded or served.is_ending for served in self._served.values())

    def steps(self, policy: str) -> list[int]:
        """Steps that clients can ask for: those of checkpoints, and any whose process lives without its checkpoint."""
        served = {step for (of, step), one in self._served.items() if of == policy and not one.is_ending}
        return sorted(served | set(self._steps(policy))) if self._most else []

    def told(self, policy: str, wanted: str) -> str:
        """Describe a policy's checkpoints in one line, for a refusal of the step `wanted`.

        Where the run serves none, the line names the commands for that step, or for the nearest with a checkpoint.
        """
        steps = sorted(self._steps(policy))
        if not steps:
            return f"other versions are not served; {policy} has no checkpoint yet"
        kept = f"checkpoints of {policy} exist for step {', '.join(map(str, steps))}"
        if self._most:
            return kept
        near = min(steps, key=lambda step: abs(step - int(wanted))) if is_step(wanted) else steps[-1]
        run = shlex.quote(str(self._run_folder))
        return (
            f"other versions are not served; {kept}: `mrl export {run} --policy {policy} --step {near}` writes "
            f"one as a model folder for your own server, `mrl eval {run}@{near} --policy {policy}` evaluates it, and a "
            "run with gateway.kept_versions = 1 serves them"
        )

    def want(self, policy: str, step: int) -> None:
        """Start the process that serves a step, or end another to make room for it; call again until `use` is true.

        Nothing happens while another process loads or ends. Raises ChatRefusal where all processes are in use, or the
        step's own failed less than PAUSE_S ago.
        """
        failed_s, words = self._failed.get((policy, step), (None, ""))
        if failed_s is not None and self._clock() - failed_s < PAUSE_S:
            raise ChatRefusal(words, code="not_served", status=503)
        if self.is_changing:
            return
        if len(self._served) >= self._most:
            self._make_room(f"{policy}@{step}")
            return
        argv, environment = self._start(policy, step)
        try:
            process = subprocess.Popen(
                command(os.getpid(), tuple(argv)), stdin=subprocess.DEVNULL, env={**os.environ, **environment}
            )
        except OSError as error:
            self._note_failure(policy, step, f"{policy}@{step} cannot be served: {error}")
            return
        self._served[policy, step] = _Served(process, self._clock())
        log.info("kept version requested; starting its process", policy=policy, step=step)

    def is_loaded(self, policy: str, step: int) -> None:
        """Note that a version's process has loaded its weights and answers now."""
        if (served := self._served.get((policy, step))) is not None:
            served.is_loaded = True

    def use(self, policy: str, step: int) -> bool:
        """Whether a version's process lives and is not ending; if so, note that it is in use now."""
        served = self._served.get((policy, step))
        if served is None or served.is_ending:
            return False
        served.wanted_s = self._clock()
        return True

    def tend(self) -> list[tuple[str, int, str]]:
        """End idle processes, kill those that do not end; return (policy, step, reason) of those that failed."""
        failed, now_s = [], self._clock()
        for (policy, step), served in list(self._served.items()):
            if (code := served.process.poll()) is not None:
                self._forget(policy, step)
                if not served.is_ending:
                    words = f"the process of {policy}@{step} exited with code {code}; see the gateway's log"
                    self._note_failure(policy, step, words)
                    failed.append((policy, step, words))
            elif served.ends_s is not None and now_s - served.ends_s > END_S:
                served.process.kill()
            elif not served.is_ending and now_s - served.wanted_s > IDLE_S:
                log.info("kept version idle; stopping its process", policy=policy, step=step)
                served.end(now_s)
        return failed

    def close(self) -> None:
        """End all processes; those that do not end within CLOSE_S are killed."""
        for served in self._served.values():
            served.end(self._clock())
        deadline_s = time.monotonic() + CLOSE_S
        for served in self._served.values():
            try:
                served.process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                served.process.kill()
                served.process.wait()
        for policy, step in list(self._served):
            self._forget(policy, step)

    def _forget(self, policy: str, step: int) -> None:
        """Remove a process that ended, and the weights that it may have left behind while it loaded."""
        del self._served[policy, step]
        shutil.rmtree(self._run_folder / KEPT_VERSIONS / f"{policy}-{step}", ignore_errors=True)

    def _note_failure(self, policy: str, step: int, words: str) -> None:
        log.warning("kept version could not be served", policy=policy, step=step, why=words)
        self._failed[policy, step] = self._clock(), words

    def _make_room(self, wanted: str) -> None:
        rests_s = {key: self._clock() - served.wanted_s for key, served in self._served.items()}
        longest = max(rests_s, key=rests_s.__getitem__)
        if rests_s[longest] < RESTING_S:
            busy = " and ".join(f"{policy}@{step}" for policy, step in sorted(self._served))
            raise ChatRefusal(
                f"no room for {wanted} (gateway.kept_versions = {self._most}, busy: {busy}); try again later",
                code="too_many",
                status=429,
            )
        log.info("stopping a kept version to make room for another", policy=longest[0], step=longest[1], wanted=wanted)
        self._served[longest].end(self._clock())


def is_step(words: str) -> bool:
    """Whether a text is the number of a step. The limit on digits: Python refuses to read numbers of thousands."""
    return words.isdecimal() and len(words) <= MAX_STEP_DIGITS
