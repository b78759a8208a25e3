"""The state of a run, reduced from telemetry: pure, without a clock; `now_s` is the local time of arrival.

Ages are taken from arrivals, so a foreign clock never makes a role look dead. When a policy's step goes back, as after
a resume, what lay above the new step is forgotten, so that nothing is counted twice.
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
"""A role whose last heartbeat is older than this is shown as silent."""
RATE_LIVES_S = 60.0
"""A worker's rate counts for this long."""
ALL_TASKS = ""
"""Key of the accuracy over all tasks."""
MEETING_STEPS = 20
"""Steps over which it is looked at how often two policies meet on a prompt, and the fewest of them, and of prompts."""
LEAST_STEPS, LEAST_PROMPTS = 5, 20
MISSED_SHARE, MET_SHARE = 0.05, 0.2
"""Of the prompts asked about: below the first a pair misses each other, from the second on it meets again."""
HITS_FROM = "sharing/hit_prompts_from/"


@dataclass(slots=True)
class PolicyProgress:
    """What is known of one policy."""

    step: int = 0
    latest: dict[str, float] = field(default_factory=dict)
    """Newest value of every metric that carries this policy's name, worker rates excepted."""
    rewards: dict[int, float] = field(default_factory=dict)
    rescues: dict[int, float] = field(default_factory=dict)
    withheld: dict[int, float] = field(default_factory=dict)
    """Step -> own successes that peers were not given."""
    accuracy: dict[str, dict[int, float]] = field(default_factory=dict)
    """Task -> step -> held-out accuracy; `ALL_TASKS` holds the accuracy over all of them."""
    worker_rates: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Worker -> (tokens per second, when it said so)."""

    def start_and_end(self, task: str = ALL_TASKS) -> tuple[float | None, float | None]:
        """Accuracy at the first and at the newest evaluated step; the end is None while there is one step only."""
        by_step = self.accuracy.get(task, {})
        if not by_step:
            return None, None
        first, last = min(by_step), max(by_step)
        return by_step[first], by_step[last] if last != first else None

    def end_step(self, task: str = ALL_TASKS) -> int | None:
        """The newest evaluated step, None while there is one step only."""
        steps = self.accuracy.get(task, {})
        return max(steps) if len(steps) > 1 else None

    def rollout_tokens_s(self, now_s: float) -> float | None:
        """Sum over the workers that told their rate lately."""
        fresh = [rate for rate, at_s in self.worker_rates.values() if now_s - at_s <= RATE_LIVES_S]
        return sum(fresh) if fresh else None

    def forget_above(self, step: int) -> None:
        """Drop what a resume at `step` voided."""
        for series in (self.rewards, self.rescues, self.withheld, *self.accuracy.values()):
            for voided in [known for known in series if known > step]:
                del series[voided]


@dataclass(slots=True)
class RoleSign:
    """The last heartbeat of one role and when it arrived."""

    beat: HeartbeatRecord
    at_s: float

    def age_s(self, now_s: float) -> float:
        """Time since the last heartbeat."""
        return max(0.0, now_s - self.at_s)

    def for_s(self, now_s: float) -> float:
        """How long the role has been doing or awaiting what it said, silence included."""
        return self.beat.for_s + self.age_s(now_s)


class Progress:
    """Everything that the live view and the headless lines show."""

    def __init__(self, policies: list[str], *, steps: int) -> None:
        self.steps = steps
        self.policies = {name: PolicyProgress() for name in policies}
        self.flows: dict[tuple[str, str], dict[str, float]] = {}
        self.exchange: dict[str, float] = {}
        """Of all its daemons together, as the flows are."""
        self.allocation = Allocation()
        self.episodes = LiveEpisodes()
        self.process: dict[str, float] = {}
        self.roles: dict[tuple[str, str], RoleSign] = {}
        self.events: deque[tuple[float, str]] = deque(maxlen=50)
        self.started_s: float | None = None
        self.now_s = 0.0

    def apply(self, record: TelemetryRecord, now_s: float) -> None:
        """Take in one record that arrived at `now_s`. Of samples only episodes change anything."""
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
        """Add an event, such as a restart, to the short list that is shown."""
        self.see(now_s)
        self.events.append((now_s, text))

    def learner_of(self, policy: str) -> RoleSign | None:
        """The last sign of the policy's learner, of its first rank where there are several."""
        signs = [sign for (role, owner), sign in self.roles.items() if owner == policy and kind_of(role) == "learner"]
        return min(signs, key=lambda sign: sign.beat.role, default=None)

    def is_silent(self, sign: RoleSign, now_s: float) -> bool:
        """Whether a role that should speak has not; a learner that finished its steps may fall silent."""
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
        kind = kind_of(record.role)
        if kind == "learner" and is_step(record):
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
    """A pair whose receiver has found next to nothing of the source lately."""

    step: int
    """The receiver's, when that was first so."""
    receiver: str
    source: str
    hits: float
    """Prompts of the last steps that the source had answered."""
    asked: float


class MissedPeers:
    """Which policies miss each other, of the regimes in which a prompt may meet a peer's answers to it.

    A pair is told once, and again only after it has met in between. Steps that a resume voided are forgotten.
    """

    def __init__(self) -> None:
        self._steps: dict[str, deque[tuple[int, Mapping[str, float]]]] = {}
        self._missed: dict[tuple[str, str], MissedPair] = {}

    @property
    def now(self) -> list[MissedPair]:
        """The pairs that miss each other now, as they were when they began to."""
        return [self._missed[pair] for pair in sorted(self._missed)]

    def take(self, receiver: str, step: int, values: Mapping[str, float]) -> list[MissedPair]:
        """The pairs that miss each other since this step of `receiver`. A step that asked about nothing counts not."""
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
    """The kind of a process by its name: "worker" of "worker/qwen/0" or "worker-qwen-0"."""
    return role.replace("-", "/").partition("/")[0]


def is_step(record: MetricsRecord) -> bool:
    """Whether a record is a learner's account of one step, not a number in between."""
    return "reward/mean" in record.values or "loss/total" in record.values
