"""A simulated policy, which lets groups in as long as gate and window allow, and steps whenever it has a batch."""

import math
import random
from collections import deque
from collections.abc import Callable

from allocation_simulation.engine import Group, Replica, Request
from allocation_simulation.settings import (
    GROUP_SIZE,
    MAX_LENGTH_FACTOR,
    MAX_STALENESS_VERSIONS,
    MIN_LENGTH_TOKENS,
    PolicySpec,
)
from mrl.learner.prompts.admission_window import AdmissionWindow

STEP_NOISE = 0.05


class SimulatedPolicy:
    """Gate, queue, buffer and learner of one policy. The world plans the events that take time.

    start_step: called with the seconds that the next step takes.
    """

    def __init__(self, spec: PolicySpec, rng: random.Random, start_step: Callable[[float], None]) -> None:
        self.spec, self._rng, self._start_step = spec, rng, start_step
        self.replicas: list[Replica] = []
        self.queue: deque[Request] = deque()
        self.window = AdmissionWindow(spec.batch_groups, MAX_STALENESS_VERSIONS)
        self.multiplier = 1.0
        self.version = 0
        self.buffer: list[Group] = []
        self.num_running_groups = 0
        self._accepted = 0
        """Groups let in that are not in flight any more and were not dropped."""
        self.hanging = self.stepping = False
        self._is_shut = False
        self._accounted_s = self._step_tokens_per_s = 0.0
        self.busy_s = self.wait_s = self.wait_shut_s = 0.0
        """Seconds that the learner was busy, waited, and waited with the gate shut; none count while it hangs."""
        self.trained_tokens = self.delivered_tokens = self.dropped_tokens = 0.0
        self.trained_groups = self.dropped_groups = 0
        self.lags: dict[int, int] = {}
        """Number of groups trained on, by staleness in versions."""
        self.heard_s = 0.0
        """Time of the learner's last sign of life: it gives one at every moment unless it hangs."""

    def account(self, now_s: float) -> None:
        """Bring the time accounts up to now; call it before anything changes."""
        elapsed_s = now_s - self._accounted_s
        self._accounted_s = now_s
        if self.hanging:
            return
        self.heard_s = now_s
        if self.stepping:
            self.busy_s += elapsed_s
            self.trained_tokens += elapsed_s * self._step_tokens_per_s
        else:
            self.wait_s += elapsed_s
            if self._is_shut:
                self.wait_shut_s += elapsed_s

    def admit(self, now_s: float) -> None:
        """Fill the replicas, waiting requests first, then new groups while gate and window allow."""
        touched = [replica for replica in self.replicas if replica.serving_from_s <= now_s]
        for replica in touched:
            replica.advance(now_s)
        shut = False
        while touched:
            replica = min(touched, key=_load)
            if len(replica.running) >= replica.full:
                break
            if not self.queue and not self._let_in():
                shut = True
                break
            replica.add(self.queue.popleft())
        if shut != self._is_shut:
            self.account(now_s)
            self._is_shut = shut

    def complete(self, request: Request) -> bool:
        """Note the end of an answer; return whether its group is complete."""
        group = request.group
        group.missing -= 1
        if group.missing:
            return False
        self.num_running_groups -= 1
        self._accepted += 1
        self.delivered_tokens += group.tokens
        self.buffer.append(group)
        return True

    def try_step(self, now_s: float) -> None:
        """Begin a step if there is a batch. Groups that are too stale are dropped, then the oldest are taken."""
        if self.stepping or self.hanging or len(self.buffer) < self.spec.batch_groups:
            return
        self.window.pull(len(self.buffer))
        fresh = [group for group in self.buffer if self.version - group.behaviour <= MAX_STALENESS_VERSIONS]
        stale = len(self.buffer) - len(fresh)
        if stale:
            self.dropped_tokens += sum(group.tokens for group in self.buffer) - sum(group.tokens for group in fresh)
            self.dropped_groups += stale
            self._accepted -= stale
            self.buffer = fresh
            if len(fresh) < self.spec.batch_groups:
                return
        self.account(now_s)
        self.buffer.sort(key=lambda group: group.behaviour)
        size = self.spec.batch_groups
        batch, self.buffer = self.buffer[:size], self.buffer[size:]
        for group in batch:
            lag = self.version - group.behaviour
            self.lags[lag] = self.lags.get(lag, 0) + 1
        tokens = sum(group.tokens for group in batch)
        self.stepping = True
        self.trained_groups += self.spec.batch_groups
        noise = math.exp(STEP_NOISE * self._rng.gauss(0.0, 1.0))
        duration_s = (self.spec.step_s + self.spec.step_s_per_mtoken * tokens / 1e6) * noise
        self._step_tokens_per_s = tokens / duration_s
        self._start_step(duration_s)

    def end_step(self, now_s: float) -> None:
        """Note that the step has ended and made a new version."""
        self.account(now_s)
        self.stepping = False
        self.version += 1

    def give_up_stale(self, now_s: float) -> list[Replica]:
        """Give up groups in flight that are too stale already; return the replicas that sampled them.

        Workers do the same. A group of which no answer has ended stays: nobody knows its staleness yet.
        """
        running = [request.group for replica in self.replicas for _, _, request in replica.running]
        stale = {
            id(group)
            for group in (*running, *(request.group for request in self.queue))
            if group.missing < GROUP_SIZE and self.version - group.behaviour > MAX_STALENESS_VERSIONS
        }
        if not stale:
            return []
        self.num_running_groups -= len(stale)
        self.dropped_groups += len(stale)
        self.queue = deque(request for request in self.queue if id(request.group) not in stale)
        for replica in self.replicas:
            replica.advance(max(now_s, replica.advanced_s))
        return [replica for replica in self.replicas if replica.forget(stale)]

    def _let_in(self) -> bool:
        """Let one group in, dated now, if gate and window are open; return whether they were."""
        in_flight = self.num_running_groups
        bound = (MAX_STALENESS_VERSIONS + self.version + 1) * self.spec.batch_groups
        if bound <= self._accepted + in_flight or in_flight + len(self.buffer) >= self.window.groups:
            return False
        spec, gauss = self.spec, self._rng.gauss
        shift = gauss(0.0, spec.group_sd) - (spec.group_sd**2 + spec.answer_sd**2) / 2
        mean = spec.mean_tokens * self.multiplier
        group = Group(self.version, GROUP_SIZE, 0.0)
        for _ in range(GROUP_SIZE):
            factor = min(math.exp(shift + gauss(0.0, spec.answer_sd)), MAX_LENGTH_FACTOR)
            length = max(MIN_LENGTH_TOKENS, factor * mean)
            group.tokens += length
            self.queue.append(Request(group, length, length))
        self.num_running_groups += 1
        return True


def _load(replica: Replica) -> int:
    return len(replica.running)
