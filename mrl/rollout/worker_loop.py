"""Main loop of a rollout worker: keep the engine full, load new weights, verify, publish and deliver groups.

Groups complete out of order; a long answer delays only its own group. When new weights come, answers in flight go on
under them. Held-out prompts are answered beside the groups and before them, in a bounded share of the places.
In a synchronous run nothing is handed in before the newest weights are served. Groups that were handed in together are
delivered together, in the order of their items; the learner grants either groups or held-out prompts.
"""

import time
from collections.abc import Callable

import structlog

from mrl.engines.engine import FinishedAnswer
from mrl.errors import EngineError, EngineLost, PeerLost, RoleFailed
from mrl.metrics.telemetry import Telemetry
from mrl.records.rollouts import HeldOutAnswer, ScoredGroup, WorkItem
from mrl.rollout.episode_engine import SAMPLING
from mrl.rollout.groups_in_flight import GroupInFlight, GroupsInFlight, Item, UnprovedGroups, UnstartedGroups
from mrl.rollout.held_out_answers import HeldOutRoom, HeldOutShare, InFlight
from mrl.rollout.link import ASLEEP, WorkerLink, WorkerProgress
from mrl.rollout.loop_options import LoopOptions, SleepRequests
from mrl.rollout.sampling import Sampler
from mrl.rollout.verification import VerificationQueue
from mrl.rollout.weight_sync import WeightSync
from mrl.rollout.weight_updates import WeightUpdater
from mrl.rollout.worker_counters import WorkerTotals

IDLE_SLICE_S = 0.5
"""Seconds that a worker without work waits for a grant before it goes on with its loop."""
QUICK_SLICE_S = 0.05
"""IDLE_SLICE_S of a synchronous run, where peers or clients may ask, and while answers are in flight."""
PROOF_SLICE_S = 0.005
MAX_LOST_IN_A_ROW = 3
REST_S = 1.0
"""Seconds that a worker about to sleep waits for its learner to answer."""
FULL_CACHE_SHARE = 0.9

log = structlog.get_logger()


class RolloutLoop:
    """Main loop of one worker with one engine."""

    def __init__(
        self,
        sampler: Sampler,
        link: WorkerLink,
        telemetry: Telemetry,
        options: LoopOptions,
        totals: WorkerTotals | None = None,
        *,
        group_size: int,
        learner_bound_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sampler, self._engine, self._link = sampler, sampler.engine, link
        self._telemetry, self._options, self._clock = telemetry, options, clock
        self._group_size = group_size
        self._learner, self._learner_bound_s = f"learner/{sampler.policy}", learner_bound_s
        self._idle_slice_s = QUICK_SLICE_S if options.scorer or options.plain or options.in_step else IDLE_SLICE_S
        self._flights, self._beginnings, self._unproved = GroupsInFlight(sampler), UnstartedGroups(), UnprovedGroups()
        share = options.held_out_share
        self._held_out = None if share is None else HeldOutShare(share, group_size)
        self._updates = WeightUpdater(sampler.engine, telemetry, link=link)
        self._verifying = VerificationQueue(sampler, telemetry)
        self._again: list[WorkItem] = []
        self._plain = options.plain
        self._lost_in_a_row = 0
        self._is_resting = False
        """Whether answers in flight have lost their lease, and rest until there is another."""
        self._turned_s = self._worked_s = clock()
        self.totals = totals or WorkerTotals(clock())
        self.totals.started_s = clock()  # rates leave out the engine's start
        self._following = WeightSync(
            sampler.engine,
            self._updates,
            link,
            unproved=self._unproved,
            totals=self.totals,
            max_staleness_versions=options.max_staleness_versions,
            clock=clock,
        )
        link.tell(self._progress)

    def run(self, stopping: Callable[[], bool]) -> None:
        """Work until `stopping`. Raises PeerLost, RoleFailed."""
        self._turned_s = self._worked_s = self._clock()
        try:
            while not stopping():
                try:
                    self._turn()
                except EngineLost as error:
                    self._recover(error)
        finally:
            self._telemetry.doing("stopping")
            self._link.end()
            self._updates.close()

    def _turn(self) -> None:
        if self._options.rest is not None and self._options.rest.is_due():
            self._sleep(self._options.rest)
            return
        self._keep_lease()
        self._following.follow(to_the_end=self._options.in_step or self._engine.version is None)
        if self._options.scorer is not None and self._unproved.is_good(self._engine.version):
            self._telemetry.doing("scoring")
            self._options.scorer.serve(self._unproved.is_good)
        if self._plain is not None:
            self._plain.serve(0 if self._is_resting else self._max_answers(), self._in_flight, self._unproved.is_good)
        self._hand_in()
        began_with = self._in_flight
        begun, unbegun = self._beginnings.sort(self._flights.arrive(self._collect()))
        self._link.deliver(unbegun)
        self._unproved.hold(begun)
        self._give_up_stale()
        if not (self._options.in_step and self._flights):
            self._verifying.hand_in(self._in_order(self._unproved.release()))
        self._deliver(self._verifying.done(to_the_last=self._options.in_step))
        self._account(began_with)

    def _sleep(self, rest: SleepRequests) -> None:
        """Deliver complete groups, give up the others, and sleep. Woken up, begin like a worker that was just started.

        Groups in flight are not kept over the sleep: the learner counts them as under way, and would wait for them.
        """
        self._telemetry.doing("going to sleep")
        self._link.end()
        self._updates.abandon()
        self._verifying.hand_in(self._unproved.release())
        self._deliver(self._verifying.done(to_the_last=True))
        self._again.clear()
        self._unproved.refuse()
        self._engine.abort([*self._flights.requests, *self._lose_plain()])
        self._flights.lose()
        self._link.rest(REST_S)
        try:
            self._engine.sleep()
        except (EngineError, EngineLost) as error:
            log.warning("engine could not be put to sleep", reason=str(error))
            rest.refuse()
            return
        self._link.tell(lambda: ASLEEP)
        self._telemetry.doing("asleep")
        if rest.sleep():
            self._wake(rest)

    def _wake(self, rest: SleepRequests) -> None:
        try:
            self._engine.wake()
        except (EngineError, EngineLost) as error:
            raise RoleFailed(f"the engine did not wake up: {error}") from error
        self._link.tell(self._progress)
        self._link.begin_anew()
        self._following.begin_anew()
        self._turned_s = self._worked_s = self._clock()
        rest.awake()

    def _may_sample(self) -> bool:
        if self._options.in_step:
            notice = self._link.notice
            return not self._busy and notice is not None and notice.version == self._engine.version
        return self._engine.version is not None

    # Work.

    @property
    def _busy(self) -> int:
        return len(self._flights) + len(self._unproved) + len(self._verifying)

    def _keep_lease(self) -> None:
        """Tell the lease what is in flight. After a loss that rests until the next lease, or is given up."""
        if self._options.has_lost_lease():
            self._is_resting = self._options.rests_unleased
            told = {"groups": len(self._flights), "given_up": not self._is_resting}
            log.warning("lease expired while this process was not running", **told)
            if not self._is_resting:
                self._engine.abort([*self._flights.requests, *self._lose_plain()])
                self._link.give_up([*self._flights.lose(), *self._again])
                self._again.clear()
        leased = self._max_answers()
        if self._is_resting and leased:
            self._is_resting = False
            beyond = self._flights.give_up_beyond(leased)
            self._engine.abort(beyond)
            self._link.give_up(list(beyond.values()))

    def _max_answers(self) -> int:
        return self._options.max_answers(0 if self._is_resting else self._num_answers)

    @property
    def _num_answers(self) -> int:
        """Answers that have not come, those to requests outside of episodes included."""
        return self._flights.num_answers + (self._plain.in_flight if self._plain else 0)

    def _lose_plain(self) -> list[str]:
        return self._plain.lose() if self._plain else []

    def _hand_in(self) -> None:
        items: list[Item] = []
        if not self._busy:
            items = self._await_work()
        elif self._may_sample():
            items = self._take(0.0)
        if items:
            if self._held_out is not None:
                self._held_out.departed(groups=any(isinstance(item, WorkItem) for item in items))
            if self._plain is not None:
                self._plain.departed()
            self._engine.submit(self._flights.depart(items))

    def _await_work(self) -> list[Item]:
        """Return work for an idle worker, within a slice of time. Raises PeerLost when the learner is silent too long.

        A learner that answers may train or publish for as long as it takes: its own host watches whether it hangs. A
        learner that has done all its steps is not waited for.
        """
        if self._link.is_over:
            self._telemetry.doing("done")
            time.sleep(self._idle_slice_s)
            return []
        if self._clock() - max(self._worked_s, self._link.answered_s) > self._learner_bound_s:
            raise PeerLost(f"no message from {self._learner} within {self._learner_bound_s:.0f} s")
        if self._following.has_refused and (self._options.in_step or self._engine.version is None):
            with self._telemetry.awaiting("usable weights", whom=self._learner):
                time.sleep(IDLE_SLICE_S)  # then ask all the same: the answer tells of newer weights
        what, whom = ("work", self._learner) if self._room() else ("lease", "allocator")
        with self._telemetry.awaiting(what, whom=whom, bound_s=self._learner_bound_s):
            if not self._room():
                time.sleep(QUICK_SLICE_S)
                return []
            # Under the weights still served the learner may grant nothing, and something once the newer are loaded.
            slice_s = QUICK_SLICE_S if self._updates.is_loading else self._idle_slice_s
            if self._plain is not None and self._plain.has_work:
                slice_s = 0.0 if self._plain.in_flight else PROOF_SLICE_S
            items = self._take(slice_s)
        if items and not self._may_sample():  # the grant told of weights that are not served yet
            self._following.follow(to_the_end=True)
            if not self._may_sample():
                self._link.give_up(items)
                return []
        return items

    def _take(self, timeout_s: float) -> list[Item]:
        places = self._places()
        room = places // self._group_size
        again, self._again = self._again[:room], self._again[room:]
        held_out = self._held_out_room() if places and not again else HeldOutRoom()
        if not room and not (any(held_out) and self._link.held_out_waiting):
            return []
        if again:
            return list(again)
        return self._link.take_work(room, timeout_s, self._engine.version, held_out)

    def _held_out_room(self) -> HeldOutRoom:
        """Return the room for held-out prompts: none under unproved weights, since an evaluation is of a version."""
        if self._held_out is None or not self._unproved.is_good(self._engine.version):
            return HeldOutRoom()
        in_flight = self._in_flight
        return self._held_out.room(self._max_answers() - in_flight.plain, in_flight)

    def _room(self) -> int:
        """Return how many groups may be handed in now."""
        return self._places() // self._group_size

    def _places(self) -> int:
        """Return how many answers may be handed in now: within the lease, and none while the engine is full.

        A server whose key-value cache is full preempts answers, and computes them again later. The usage that it tells
        is up to a second old: no more answers wait now than are in flight beyond those that run.
        """
        usage = self._engine.usage()
        waiting = min(usage.waiting, self._num_answers - usage.running)
        is_full = bool(self._flights) and (waiting > self._group_size or usage.cache_share > FULL_CACHE_SHARE)
        self.totals.sampled(usage.generated_tokens, self._in_flight)
        self.totals.in_flight(self._num_answers, is_full=is_full)
        if is_full or self._is_resting:
            return 0
        return max(0, self._max_answers() - self._num_answers)

    def _collect(self) -> list[FinishedAnswer]:
        if self._is_resting:
            with self._telemetry.awaiting("lease", whom="allocator"):
                time.sleep(QUICK_SLICE_S)
        elif self._num_answers:
            self._telemetry.doing(getattr(self._engine, "doing", SAMPLING))
            found = self._engine.collect(QUICK_SLICE_S)
            return self._plain.arrive(found, self._unproved.is_good) if self._plain else found
        elif self._busy:
            is_verifying = len(self._verifying) > 0
            what, whom = ("verdicts", self._verifying.awaited) if is_verifying else ("weight check", "the engine")
            with self._telemetry.awaiting(what, whom=whom, since_s=self._verifying.awaited_since_s):
                time.sleep(PROOF_SLICE_S)
        return []

    def _give_up_stale(self) -> None:
        """Abort groups that can only end too stale to train on: mostly those with the longest answers."""
        notice = self._link.notice
        if notice is None:
            return
        stale = self._flights.give_up_stale(notice.version, self._options.max_staleness_versions)
        if stale:
            self._engine.abort(stale)
            self._link.deliver(list(stale.values()))

    def _in_order(self, flights: list[GroupInFlight]) -> list[GroupInFlight]:
        return sorted(flights, key=lambda flight: flight.number) if self._options.in_step else flights

    def _deliver(self, found: list[ScoredGroup | HeldOutAnswer]) -> None:
        if not found:
            return
        self._lost_in_a_row = 0
        self._telemetry.doing("delivering")
        if groups := [one for one in found if isinstance(one, ScoredGroup)]:
            self._options.publish(groups)
        self._link.deliver(found)
        self.totals.delivered(groups)
        held_out = (span.version.step for one in found if isinstance(one, HeldOutAnswer) for span in one.versions)
        self._report(max((group.newest.step for group in groups), default=max(held_out, default=0)))

    def _recover(self, error: EngineLost) -> None:
        """Restart the engine; sample again the groups that it had, and complete ones whose weights were not proved."""
        self._updates.abandon()
        self._lose_plain()
        lost = self._unproved.refuse() + self._flights.lose()
        self._again += [item for item in lost if isinstance(item, WorkItem)]
        self._link.give_up([item for item in lost if not isinstance(item, WorkItem)])  # the learner counts their losses
        self._max_answers()  # tells the lease that nothing is in flight
        self._again.sort(key=lambda item: item.position)  # in the order of their grants, as without the loss
        reason: EngineLost | None = error
        while reason is not None:
            self._lost_in_a_row += 1
            self.totals.engine_restarts += 1
            if self._lost_in_a_row > MAX_LOST_IN_A_ROW:
                raise RoleFailed(
                    f"the engine was lost {MAX_LOST_IN_A_ROW} times in a row without a group: {reason}"
                ) from reason
            log.warning("engine lost", reason=str(reason), groups_to_sample_again=len(self._again))
            reason = self._restart()
        self._worked_s = self._clock()  # the engine's start is no silence of the learner

    def _restart(self) -> EngineLost | None:
        """Restart the engine; return why it did not start, None when it did."""
        with self._telemetry.awaiting("engine restart"):
            try:
                self._engine.restart()
            except EngineLost as error:
                return error
        return None

    # Accounts.

    def _progress(self) -> WorkerProgress:
        """Return the progress for the learner. The link's thread calls it, also while this one waits for its engine."""
        is_loading = self._updates.is_loading or not self._unproved.is_good(self._engine.version)
        is_loading = is_loading or getattr(self._engine, "doing", SAMPLING) != SAMPLING  # environments take their time
        is_loading = is_loading and not getattr(self._engine, "is_away", False)  # away, `turns_seen` is its progress
        values = self._sampler.pool.verifier_values()
        judged = values.get("verify/answers", 0.0) + values.get("environment/turns", 0.0)
        moves = int(judged) + getattr(self._engine, "turns_seen", 0)
        return WorkerProgress(self.totals.engine_tokens + moves, is_loading)

    @property
    def _in_flight(self) -> InFlight:
        """Answers in flight; none while they rest without a lease."""
        if self._is_resting:
            return InFlight(0, 0)
        num_held_out, num_plain = self._flights.num_held_out, self._plain.in_flight if self._plain else 0
        return InFlight(self._flights.num_answers - num_held_out, num_held_out, num_plain)

    def _account(self, began_with: InFlight) -> None:
        """Count the time of one pass of the loop, which began with these answers in flight."""
        now_s, before_s = self._clock(), self._turned_s
        self._turned_s = now_s
        self.totals.passed(now_s - before_s, began_with, self._in_flight)
        if self._busy:
            self._worked_s = now_s

    def _report(self, step: int) -> None:
        usage = self._engine.usage()
        values = self.totals.values(self._clock()) | {
            "rollout/slots": self._max_answers(),
            "rollout/running": usage.running,
            "rollout/waiting": usage.waiting,
            "rollout/cache_share": usage.cache_share,
        }
        if usage.prompt_tokens:
            values["rollout/reused_prompt_share"] = usage.reused_prompt_tokens / usage.prompt_tokens
        values |= self._sampler.pool.verifier_values() | dict(self._options.losses())
        values |= self._options.scorer.values() if self._options.scorer else {}
        values |= self._plain.values() if self._plain else {}
        self._telemetry.metrics(step, values)
