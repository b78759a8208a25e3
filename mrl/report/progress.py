"""State of a run, reduced from telemetry without a clock; `now_s` is the local time at which a record arrived.

Ages are measured from arrivals, so the clock of another host never makes a role look dead. When a policy's step goes
back, as after a resume, values of later steps are dropped, so that nothing is counted twice.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mrl.records.telemetry_messages import HeartbeatRecord, MetricsRecord, SampleRecord, TelemetryRecord
from mrl.report.allocation import Allocation
from mrl.report.samples.live_episode import LiveEpisodes

STALE_AFTER_S = 10.0
"""Age in seconds of the last heartbeat from which a role is shown as silent."""
RATE_LIVES_S = 60.0
"""Seconds for which a worker's last rate counts."""
ALL_TASKS = ""
"""Key of the accuracy over all tasks."""
MEETING_STEPS = 20
"""Last steps of a receiver over which the prompts are counted on which it met a source."""
LEAST_STEPS, LEAST_PROMPTS = 5, 20
"""Fewest steps, and fewest asked prompts in them, by which a pair is judged."""
MISSED_SHARE, MET_SHARE = 0.05, 0.2
"""Shares of asked prompts with an answer: below the first a pair misses each other, from the second on it meets."""
HITS_FROM = "sharing/hit_prompts_from/"


@dataclass(slots=True)
class PolicyProgress:
    """State of one policy."""

    step: int = 0
    latest: dict[str, float] = field(default_factory=dict)
    """Newest value of every metric of this policy, without the rates of workers and the accuracies."""
    rewards: dict[int, float] = field(default_factory=dict)
    """Step -> mean reward."""
    rescues: dict[int, float] = field(default_factory=dict)
    withheld: dict[int, float] = field(default_factory=dict)
    """Step -> own successes that were kept from peers."""
    accuracy: dict[str, dict[int, float]] = field(default_factory=dict)
    """Task -> step -> held-out accuracy; the task `ALL_TASKS` stands for all tasks together."""
    worker_rates: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Worker -> (sampled tokens per second, local time at which this record arrived)."""

    def start_and_end(self, task: str = ALL_TASKS) -> tuple[float | None, float | None]:
        """Return accuracy at the first and at the newest evaluated step; the second is None while there is one step."""
        by_step = self.accuracy.get(task, {})
        if not by_step:
            return None, None
        first, last = min(by_step), max(by_step)
        return by_step[first], by_step[last] if last != first else None

    def end_step(self, task: str = ALL_TASKS) -> int | None:
        """Return the newest evaluated step; None while fewer than two steps are evaluated."""
        steps = self.accuracy.get(task, {})
        return max(steps) if len(steps) > 1 else None

    def rollout_tokens_s(self, now_s: float) -> float | None:
        """Return sampled tokens per second of all workers whose last rate is no older than RATE_LIVES_S, or None."""
        fresh = [rate for rate, at_s in self.worker_rates.values() if now_s - at_s <= RATE_LIVES_S]
        return sum(fresh) if fresh else None

    def forget_above(self, step: int) -> None:
        """Drop the values of steps above `step`, which a resume at `step` voided."""
        for series in (self.rewards, self.rescues, self.withheld, *self.accuracy.values()):
            for voided in [known for known in series if known > step]:
                del series[voided]


@dataclass(slots=True)
class RoleSign:
    """Last heartbeat of one role, and the local time of its arrival."""

    beat: HeartbeatRecord
    at_s: float

    def age_s(self, now_s: float) -> float:
        """Return the seconds since the last heartbeat arrived."""
        return max(0.0, now_s - self.at_s)

    def for_s(self, now_s: float) -> float:
        """Return the seconds of the activity or wait that the heartbeat names, the time since then included."""
        return self.beat.for_s + self.age_s(now_s)


class Progress:
    """State of the whole run: everything that the live view and the headless lines show."""

    def __init__(self, policies: list[str], *, steps: int) -> None:
        self.steps = steps
        self.policies = {name: PolicyProgress() for name in policies}
        self.flows: dict[tuple[str, str], dict[str, float]] = {}
        """(source, receiver) -> records, bytes, hit_rate and age_versions."""
        self.exchange: dict[str, float] = {}
        """Metric of the exchange, without the prefix `exchange/` -> newest value."""
        self.allocation = Allocation()
        self.episodes = LiveEpisodes()
        self.process: dict[str, float] = {}
        self.roles: dict[tuple[str, str], RoleSign] = {}
        self.events: deque[tuple[float, str]] = deque(maxlen=50)
        self.started_s: float | None = None
        self.now_s = 0.0

    def apply(self, record: TelemetryRecord, now_s: float) -> None:
        """Take in one record that arrived at `now_s`. A sample changes nothing unless it is an episode."""
        self.see(now_s)
        if isinstance(record, HeartbeatRecord):
            self._heartbeat(record, now_s)
        elif isinstance(record, MetricsRecord):
            self._metrics(record, now_s)
        elif isinstance(record, SampleRecord):
            self.episodes.take(record)

    def see(self, now_s: float) -> None:
        """Note that time has gone on; the first time seen is the start of the run."""
        self.started_s = now_s if self.started_s is None else self.started_s
        self.now_s = max(self.now_s, now_s)

    def note(self, text: str, now_s: float) -> None:
        """Add an event, such as a restart, to the newest events."""
        self.see(now_s)
        self.events.append((now_s, text))

    def learner_of(self, policy: str) -> RoleSign | None:
        """Return the last heartbeat of the policy's learner, by name the first of several ranks; None without any."""
        signs = [sign for (role, owner), sign in self.roles.items() if owner == policy and kind_of(role) == "learner"]
        return min(signs, key=lambda sign: sign.beat.role, default=None)

    def is_silent(self, sign: RoleSign, now_s: float) -> bool:
        """Whether a role's last heartbeat is older than STALE_AFTER_S; never so for a learner that did all steps."""
        policy = self.policies.get(sign.beat.policy)
        finished = kind_of(sign.beat.role) == "learner" and policy is not None and policy.step >= self.steps
        return sign.age_s(now_s) > STALE_AFTER_S and not finished

    def _heartbeat(self, beat: HeartbeatRecord, now_s: float) -> None:
        key = (beat.role, beat.policy)
        before = self.roles.get(key)
        if before and before.beat.pid != beat.pid:
            self.note(f"{beat.role} was started again (pid {before.beat.pid} -> {beat.pid})", now_s)
        self.roles[key] = RoleSign(beat, now_s)

    def _metrics(self, record: MetricsRecord, now_s: float) -> None:
        self.allocation.take(record, now_s)
        if not record.policy:
            self._of_the_run(record)
            return
        policy = self.policies.setdefault(record.policy, PolicyProgress())
        if is_step(record.role, record.values):
            self._step(policy, record)
        for name, value in record.values.items():
            if name == "rate/rollout_tokens_s":
                policy.worker_rates[record.role] = (value, now_s)
            elif name.startswith("eval/accuracy") and math.isfinite(value):
                task = name.removeprefix("eval/accuracy").removeprefix("/")
                policy.accuracy.setdefault(task, {})[record.step] = value
            else:
                policy.latest[name] = value

    def _step(self, policy: PolicyProgress, record: MetricsRecord) -> None:
        if record.step < policy.step:
            policy.forget_above(record.step)
            self.episodes.forget_above(record.policy, record.step)
        policy.step = record.step
        policy.rewards[record.step] = record.values.get("reward/mean", math.nan)
        policy.rescues[record.step] = record.values.get("sharing/rescues", 0.0)
        policy.withheld[record.step] = record.values.get("sharing/withheld_answers", 0.0)

    def _of_the_run(self, record: MetricsRecord) -> None:
        for name, value in record.values.items():
            room, _, rest = name.partition("/")
            if room == "process":
                self.process[rest] = value
            elif room == "exchange" and rest.startswith("flow_"):
                what, source, receiver = rest.removeprefix("flow_").split("/")
                self.flows.setdefault((source, receiver), {})[what] = value
            elif room == "exchange":
                self.exchange[rest] = value


class MissedPair(NamedTuple):
    """A pair of policies whose receiver has lately asked for prompts of which the source had answered next to none."""

    step: int
    """Receiver's step at which the pair began to miss each other."""
    receiver: str
    source: str
    hits: float
    """Prompts asked for in the last steps that the source had answered."""
    asked: float
    """Prompts that the receiver asked for in the last steps."""


class MissedPeers:
    """Finds pairs of policies that miss each other, under regimes that look for peers' answers to the same prompt.

    A pair is reported once, and again only after it has met in between. Steps that a resume voided are forgotten.
    """

    def __init__(self) -> None:
        self._steps: dict[str, deque[tuple[int, Mapping[str, float]]]] = {}
        self._missed: dict[tuple[str, str], MissedPair] = {}

    @property
    def now(self) -> list[MissedPair]:
        """Pairs that miss each other now, each with the numbers at which that began."""
        return [self._missed[pair] for pair in sorted(self._missed)]

    def take(self, receiver: str, step: int, values: Mapping[str, float]) -> list[MissedPair]:
        """Return pairs that miss each other since this step of `receiver`. A step without asked prompts is left out."""
        if not any(name.startswith(HITS_FROM) for name in values):
            return []
        steps = self._steps.setdefault(receiver, deque(maxlen=MEETING_STEPS))
        while steps and steps[-1][0] >= step:
            steps.pop()
        steps.append((step, values))
        asked = sum(one.get("sharing/asked_prompts", 0.0) for _, one in steps)
        if len(steps) < LEAST_STEPS or asked < LEAST_PROMPTS:
            return []
        new = []
        for name in sorted(name for name in values if name.startswith(HITS_FROM)):
            pair = receiver, name.removeprefix(HITS_FROM)
            hits = sum(one.get(name, 0.0) for _, one in steps)
            if hits >= MET_SHARE * asked:
                self._missed.pop(pair, None)
            elif hits < MISSED_SHARE * asked and pair not in self._missed:
                self._missed[pair] = MissedPair(step, *pair, hits, asked)
                new.append(self._missed[pair])
        return new


def kind_of(role: str) -> str:
    """Return the kind of a process from its name: "worker" for "worker/qwen/0"."""
    return role.partition("/")[0]


def is_step(role: str, values: Mapping[str, float]) -> bool:
    """Whether a role's metrics are those of a learner's whole step, not of a moment between two steps."""
    return kind_of(role) == "learner" and ("reward/mean" in values or "loss/total" in values)
