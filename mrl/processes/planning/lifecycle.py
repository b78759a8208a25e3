"""The phases of a run, and which signal ends it when. Pure: events and times go in, phases and signals come out."""

import signal
from dataclasses import dataclass, field
from typing import Literal

SAME_SIGNAL_S = 1.0
Phase = Literal["running", "draining", "stopping"]


@dataclass
class Lifecycle:
    """running -> draining (all learners done) -> stopping (processes are being ended).

    A host whose own learners are done stays in draining until the learners of the whole run are done.

    Any failure, a signal or the time limit leads straight to stopping; the first reason is the one that is told.
    """

    learners: frozenset[str]
    stop_s: float
    max_run_s: float = 0.0
    """0 means no limit."""
    started_s: float = 0.0
    phase: Phase = "running"
    exit_code: int = 0
    reason: str = ""
    done: set[str] = field(default_factory=set)
    """Learners that finished their steps, or whose policy was stopped."""
    stopped: set[str] = field(default_factory=set)
    """Policies that a person stopped before the end of the run."""
    ended: set[str] = field(default_factory=set)
    """Policies among `stopped` whose processes on this host are gone."""
    _since_s: float = 0.0
    _hurried: bool = False

    def finished(self, learner: str, now_s: float) -> None:
        """Note that a learner finished its steps."""
        self.done.add(learner)
        if self.phase == "running" and self.done >= self.learners:
            self._enter("draining", now_s)

    def stop(self, policy: str, now_s: float) -> None:
        """Stop a policy at a person's request. The others go on; after the last learning policy the run drains."""
        self.stopped.add(policy)
        if f"learner/{policy}" in self.learners:
            self.finished(f"learner/{policy}", now_s)

    def end(self, exit_code: int, reason: str, now_s: float) -> None:
        """End the run for this reason. A later reason does not replace the first."""
        if self.phase != "stopping":
            self.exit_code, self.reason = exit_code, reason
            self._enter("stopping", now_s)

    def interrupted(self, number: int, now_s: float) -> None:
        """Note SIGINT, SIGTERM or SIGHUP. The first ends the run; with a later one processes are killed at once.

        A signal within SAME_SIGNAL_S of the first counts as the same: a batch system signals every process of a job.
        """
        if self.phase == "stopping" and now_s - self._since_s > SAME_SIGNAL_S:
            self._hurried = True
        self.end(128 + number, f"ended by {signal.Signals(number).name}", now_s)

    def tick(self, now_s: float) -> None:
        """End a run that has reached its time limit, or whose learners are all done."""
        if self.max_run_s and self.phase == "running" and now_s - self.started_s > self.max_run_s:
            self.end(0, f"run.max_minutes = {self.max_run_s / 60:g} reached", now_s)
        if self.phase == "draining":
            self.end(0, "", now_s)

    def restarts(self, role: str, policy: str) -> bool:
        """Whether a process of this role and policy is still worth a restart."""
        if policy and policy in self.stopped:
            return False
        if self.phase == "running":
            return role not in ("worker", "learner") or f"learner/{policy}" not in self.done
        return self.phase == "draining" and role == "supervisor"

    def due_signal(self, now_s: float, *, extra_s: float = 0.0) -> signal.Signals | None:
        """Return the signal that a living process should have received by now, if it has `stop_s + extra_s` to end."""
        if self.phase != "stopping":
            return None
        late = self._hurried or now_s - self._since_s >= self.stop_s + extra_s
        return signal.SIGKILL if late else signal.SIGTERM

    def _enter(self, phase: Phase, now_s: float) -> None:
        self.phase, self._since_s = phase, now_s
