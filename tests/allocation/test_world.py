"""Allocator and holders together in a simulated world: delays, losses, crashes, restarts, moving demand."""

import random
from dataclasses import dataclass, field

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.allocation.lease import LeaseHolder, Used
from mrl.allocation.objective import SLOTS
from mrl.allocation.slot_core import SlotCore, SlotSettings
from mrl.records.codec import decode, encode
from mrl.records.leases import LearnerReport, allocator_request_decoder

TTL_S, TICK_S = 4.0, 0.25


@dataclass
class Worker:
    """A worker that runs answers, each for as long as it takes; its engine is looked at now and then only."""

    holder: LeaseHolder
    rate: float
    in_use: int = 0
    looks_s: float = 0.0
    tokens: int = 0
    slot_seconds: float = 0.0
    served: int = 0
    stopped_until_s: float = 0.0


@dataclass
class World:
    """One allocator, and one worker or more per policy.

    Messages take up to half a second and some are lost, but never two of one sender in a row: what is promised holds
    for holders that are heard once per ttl.
    """

    rng: random.Random
    slots: int
    floor: int
    policies: list[str]
    now_s: float = 0.0
    workers: dict[str, Worker] = field(default_factory=dict)
    mail: list[tuple[float, str, bytes]] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    allocator: SlotCore | None = None

    def __post_init__(self) -> None:
        self.start_allocator(settling=False)

    def start_allocator(self, *, settling: bool) -> None:
        """A new allocator that knows nothing."""
        rule = msgspec.structs.replace(SLOTS, period_s=1.0, dwell_s=1.0)
        numbers = SlotSettings(self.slots, self.floor, TTL_S, rule=rule)
        self.allocator = SlotCore(self.policies, numbers, self.now_s, settling=settling)

    def start_worker(self, name: str) -> None:
        """A new worker process."""
        holder = LeaseHolder(name, name.split("/")[0])
        holder.open(lambda body: self.post(name, "allocator", body), lambda: None)
        self.workers[name] = Worker(holder, rate=self.rng.choice([1.0, 5.0, 20.0]))

    def post(self, sender: str, to: str, body: bytes) -> bool:
        """Send; one message in ten is lost."""
        if sender not in self.lost and self.rng.random() < 0.1:
            self.lost.add(sender)
            return True
        self.lost.discard(sender)
        self.mail.append((self.now_s + self.rng.random() / 2, to, body))
        return True

    def step(self) -> None:
        """A quarter of a second passes."""
        self.now_s += TICK_S
        link_first = self.rng.random() < 0.5
        self.deliver()
        running = [worker for worker in self.workers.values() if worker.stopped_until_s <= self.now_s]
        for worker in running:
            if not link_first:
                self.work(worker)
            worker.holder.on_tick(self.now_s, Used(worker.tokens, worker.slot_seconds))
            if link_first:
                self.work(worker)
        if self.allocator:
            for policy in self.policies:
                report = LearnerReport(
                    policy=policy, trained_tokens=int(99 * self.now_s), busy_s=self.now_s, data_wait_s=0.0
                )
                self.allocator.handle(report, self.now_s)
            decisions = self.allocator.tick(self.now_s)
            live = [decision for decision in decisions if self.allocator._leases.holders_of(decision.policy)]
            assert all(decision.slots >= min(self.floor, self.slots // len(self.policies)) for decision in live)
            assert sum(decision.slots for decision in decisions) <= self.slots
        in_use = sum(worker.in_use for worker in running)
        assert in_use <= self.slots, f"{in_use} of {self.slots} slots in use at {self.now_s} s"

    def deliver(self) -> None:
        """Hand over what has arrived; what reaches a process that is gone is lost."""
        due = sorted((item for item in self.mail if item[0] <= self.now_s), key=lambda item: item[0])
        self.mail = [item for item in self.mail if item[0] > self.now_s]
        for _, to, body in due:
            if to == "allocator" and self.allocator:
                for holder, reply in self.allocator.handle(decode(body, allocator_request_decoder), self.now_s):
                    self.post("allocator", holder, encode(reply))
            elif to in self.workers and self.workers[to].stopped_until_s > self.now_s:
                self.mail.append((self.workers[to].stopped_until_s, to, body))
            elif to in self.workers:
                self.workers[to].holder.on_message(body, self.now_s)

    def kill(self, name: str) -> None:
        """What is on its way to the process never reaches another one of that name."""
        del self.workers[name]
        self.mail = [item for item in self.mail if item[1] != name]

    def stop(self, worker: Worker) -> None:
        """As by SIGSTOP, for up to twice the ttl; it looks at its engine as soon as it goes on."""
        worker.looks_s = worker.stopped_until_s = self.now_s + self.rng.uniform(0.0, 2 * TTL_S)

    def work(self, worker: Worker) -> None:
        """Answers end, all of them where the lease was lost, and as many begin as the lease has room for."""
        if self.now_s < worker.looks_s:
            return
        seconds, ended_share = self.rng.choice([0.25, 0.5, 2.0]), self.rng.choice([0.0, 0.3, 1.0])
        worker.looks_s = self.now_s + seconds
        worker.in_use -= int(ended_share * worker.in_use)
        if worker.holder.is_lost(self.now_s):
            worker.in_use = 0
        worker.in_use = max(worker.in_use, worker.holder.slots(self.now_s, worker.in_use))
        worker.slot_seconds += seconds * worker.in_use
        worker.tokens += int(seconds * worker.in_use * worker.rate)
        worker.served += worker.in_use


worlds = st.builds(
    lambda seed, slots, floor, num: World(random.Random(seed), slots, floor, ["a", "b", "c"][:num]),
    st.integers(0, 2**32),
    st.integers(3, 200),
    st.integers(1, 60),
    st.integers(1, 3),
)


@settings(max_examples=100)
@given(worlds)
def test_slots_in_use_never_exceed_the_pool(world: World) -> None:
    """Through crashes, stops and restarts of workers and of the allocator, at every moment."""
    for policy in world.policies:
        world.start_worker(f"{policy}/0")
    for _ in range(200):
        event = world.rng.random()
        names = sorted(world.workers)
        if event < 0.03 and names:
            world.kill(world.rng.choice(names))
        elif event < 0.08:
            name = f"{world.rng.choice(world.policies)}/{world.rng.randrange(3)}"
            if name not in world.workers:
                world.start_worker(name)
        elif event < 0.10:
            world.allocator = None
        elif event < 0.16 and world.allocator is None:
            world.start_allocator(settling=True)
        elif event < 0.19 and names:
            world.stop(world.workers[world.rng.choice(names)])
        world.step()


@settings(max_examples=20)
@given(worlds)
def test_every_live_policy_is_served(world: World) -> None:
    """After a restart of the allocator too, each policy runs something within two ttl, and all slots are leased."""
    for policy in world.policies:
        world.start_worker(f"{policy}/0")
    for restart in (False, True):
        if restart:
            world.start_allocator(settling=True)
        for _ in range(int(4 * TTL_S / TICK_S)):
            world.step()
        before = {name: worker.served for name, worker in world.workers.items()}
        for _ in range(int(2 * TTL_S / TICK_S)):
            world.step()
        assert all(worker.served > before[name] for name, worker in world.workers.items())


def test_all_slots_are_leased_once_the_world_is_calm() -> None:
    """Work conservation: a policy whose workers died leaves its slots to the other, and gets its share back."""
    world = World(random.Random(1), 100, 10, ["a", "b"])
    for policy in world.policies:
        world.start_worker(f"{policy}/0")
        world.workers[f"{policy}/0"].rate = 0.5  # each could use 198 slots

    def held_after(seconds: float) -> dict[str, int]:
        for _ in range(int(seconds / TICK_S)):
            world.step()
        assert world.allocator is not None
        return {decision.policy: decision.held_slots for decision in world.allocator.tick(world.now_s)}

    assert sum(held_after(30.0).values()) == 100
    lost = world.workers.pop("a/0")
    assert held_after(15.0) == {"a": 0, "b": 100}
    world.workers["a/0"] = Worker(LeaseHolder("a/0", "a"), lost.rate)
    world.workers["a/0"].holder.open(lambda body: world.post("a/0", "allocator", body), lambda: None)
    held = held_after(15.0)
    assert sum(held.values()) == 100
    assert held["a"] >= 10
