"""Several daemons as one exchange: where prompts live, what each call reaches, and what a silent shard costs."""

from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Barrier

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logged_core import LoggedCore

from mrl.exchange import packing, publisher
from mrl.exchange.client import SILENCE_S, ExchangeClient
from mrl.exchange.shards import ShardedExchange, come_to, endpoint_of, folder_of, role_of, shard_of
from mrl.records.codec import encode
from mrl.records.experience import Received
from mrl.records.version import Version

ALL = {"kinds": ["outcome"], "limit": 4, "max_age_versions": None}


class Daemons:
    """Some cores, and clients of all of them, in one thread: `run` carries messages until none is left."""

    def __init__(self, num_shards=2):
        self.now_s = 0.0
        self.silent = set()
        self.cores = [LoggedCore(incarnation=f"shard {shard}") for shard in range(num_shards)]
        self.clients = {}
        self.before_close = lambda: None
        self.under_way = deque()

    def connect(self, name, policy):
        """A client of all shards."""
        return ShardedExchange([self._connect(shard, name, policy) for shard in range(len(self.cores))])

    def _connect(self, shard, name, policy):
        daemons = self

        class Link:
            def post(self, body):
                daemons.under_way.append((shard, name, body))
                return True

            def request_reconnect(self):
                pass

            def close(self, timeout_s):
                daemons.before_close()
                del daemons.clients[shard, name]

        client = ExchangeClient.connect(
            lambda on_message, on_tick: Link(), client=name, policy=policy, clock=lambda: self.now_s
        )
        self.clients[shard, name] = client
        return client

    def run(self):
        """Deliver everything, in both directions; a silent shard hears nothing."""
        while self.under_way:
            shard, name, body = self.under_way.popleft()
            if shard in self.silent:
                continue
            for receiver, message in self.cores[shard].receive_body(name.encode(), body, self.now_s):
                self.clients[shard, receiver.decode()].on_message(encode(message))

    def during(self, *calls):
        """Make calls that wait, each on a thread of its own, and carry messages until all have returned."""
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = [pool.submit(call) for call in calls]
            while wait(futures, timeout=0.002).not_done:
                self.run()
        return [future.result() for future in futures]

    def restart(self, shard):
        """A fresh daemon, which has what the log of the old one had."""
        old, self.cores[shard] = self.cores[shard], LoggedCore(incarnation=f"shard {shard} again")
        self.cores[shard].memory.restore(None, old.logged())
        self.silent.discard(shard)

    def tick(self, *, seconds):
        """Time goes on, half a second at a time."""
        for _ in range(int(2 * seconds)):
            self.now_s += 0.5
            for client in list(self.clients.values()):
                client.on_tick(self.now_s)
            self.run()

    def held(self, shard):
        """Prompts of what a shard holds."""
        return {entry.tags.prompt_id for entry in self.cores[shard].shelf.entries()}


@pytest.fixture
def daemons():
    """Two shards."""
    return Daemons()


def prompts_of(shard, how_many=3, num_shards=2):
    """The first prompts that live on a shard."""
    names = (f"p{number}" for number in range(10_000))
    found = [name for name in names if shard_of(name, range(num_shards)) == shard]
    return found[:how_many]


def ids(received):
    """Of the records, sorted."""
    return sorted(item.record.record_id for item in received)


@pytest.mark.parametrize(
    ("prompt_id", "shards"),
    [
        ("p1", (0, 0, 0, 0, 32)),
        ("trim/17", (0, 0, 0, 0, 4)),
        ("Grüße", (0, 1, 1, 1, 34)),
        ("\ud800", (0, 0, 2, 2, 31)),
    ],
)
def test_a_prompt_lives_in_the_same_place_in_every_process_and_on_every_host(prompt_id, shards):
    """Written down here: of one, two, three, four and forty shards. A broken name is no error."""
    assert tuple(shard_of(prompt_id, range(num)) for num in (1, 2, 3, 4, 40)) == shards


@settings(deadline=None)
@given(prompt_id=st.text(max_size=30), num_shards=st.integers(1, 40))
def test_a_new_shard_takes_prompts_and_moves_none_between_the_others(prompt_id, num_shards):
    """Where a prompt lived, or on the new one."""
    before, after = (shard_of(prompt_id, range(num)) for num in (num_shards, num_shards + 1))
    assert after in (before, num_shards)


@settings(deadline=None)
@given(prompt_id=st.text(max_size=30), num_shards=st.integers(2, 40), data=st.data())
def test_a_lost_shard_gives_away_its_prompts_and_moves_no_others(prompt_id, num_shards, data):
    """Any of them, not the last alone."""
    lost = data.draw(st.integers(0, num_shards - 1))
    left = tuple(shard for shard in range(num_shards) if shard != lost)
    before = shard_of(prompt_id, range(num_shards))
    assert shard_of(prompt_id, left) == before or before == lost


@pytest.mark.parametrize("num_shards", [2, 3, 7, 16])
def test_shards_have_equal_parts_and_a_new_one_takes_its_part_from_all(num_shards):
    """Within five standard deviations of drawing lots."""
    names = [f"reverse/{number}" for number in range(16_000)]
    before = {name: shard_of(name, range(num_shards)) for name in names}
    moved = Counter(before[name] for name in names if shard_of(name, range(num_shards + 1)) == num_shards)

    for shares, num_parts, total in (
        (Counter(before.values()), num_shards, 16_000),
        (moved, num_shards, 16_000 / (num_shards + 1)),
    ):
        mean = total / num_parts
        assert all(abs(shares[shard] - mean) < 5 * mean**0.5 for shard in range(num_shards)), shares


def test_names_of_shards():
    """The first one is called and lies as a single daemon is and does."""
    assert [role_of(0), role_of(2)] == ["exchange", "exchange/2"]
    assert [endpoint_of(0), endpoint_of(2)] == ["exchange", "exchange-2"]
    assert [folder_of(Path("x"), 0), folder_of(Path("x"), 2)] == [Path("x"), Path("x/shard_2")]


def test_records_lie_with_their_prompt_and_are_found_there(daemons, outcome):
    """What the shards hold are two halves without overlap."""
    writer, reader = daemons.connect("worker/qwen/0", "qwen"), daemons.connect("learner/llama", "llama")
    first, second = prompts_of(0), prompts_of(1)
    writer.publish([outcome(f"r-{prompt_id}", prompt_id=prompt_id) for prompt_id in first + second])
    daemons.run()
    assert (daemons.held(0), daemons.held(1)) == (set(first), set(second))
    assert writer.counts["stored"] == 6
    reader.fetch([first[0], second[0], second[1]], **ALL, watch=False)
    daemons.run()
    assert ids(reader.take()) == sorted(f"r-{prompt_id}" for prompt_id in (first[0], second[0], second[1]))


def test_watches_hear_later_records_until_they_end(daemons, outcome):
    """On both shards."""
    writer, reader = daemons.connect("worker/qwen/0", "qwen"), daemons.connect("learner/llama", "llama")
    prompts = prompts_of(0)[:2] + prompts_of(1)[:2]
    reader.fetch(prompts, **ALL, watch=True)
    reader.unwatch([prompts[1], prompts[3]])
    writer.publish([outcome(f"r-{prompt_id}", prompt_id=prompt_id) for prompt_id in prompts])
    daemons.run()
    assert ids(reader.take()) == sorted([f"r-{prompts[0]}", f"r-{prompts[2]}"])


def test_every_shard_hears_of_versions(daemons, outcome):
    """So that neither the age of a record nor whether a resume voids it depends on where it lies."""
    writer, reader = daemons.connect("worker/qwen/0", "qwen"), daemons.connect("learner/llama", "llama")
    prompts = prompts_of(0)[:1] + prompts_of(1)[:1]
    for step in (3, 9):
        writer.publish([outcome(f"{step}-{prompt_id}", prompt_id=prompt_id, step=step) for prompt_id in prompts])
    writer.announce(Version(1, 7), resumed=True)
    daemons.run()
    assert [core.memory.versions.newest["qwen"] for core in daemons.cores] == [Version(1, 7)] * 2
    reader.fetch(prompts, **ALL, watch=False)
    daemons.run()
    assert [item.age_versions for item in reader.take()] == [4, 4]


def test_requests_are_served_and_closed_where_their_prompt_lies(daemons, request_for, score_of):
    """A worker that serves is subscribed to all shards."""
    student, teacher = daemons.connect("worker/qwen/0", "qwen"), daemons.connect("worker/llama/0", "llama")
    asked = [
        request_for(record_id=f"q-{prompt_id}", prompt_id=prompt_id)
        for prompt_id in (prompts_of(0)[0], prompts_of(1)[0])
    ]
    teacher.subscribe(["score_request"])
    student.publish(asked)
    daemons.run()
    assert ids(teacher.take()) == sorted(request.record_id for request in asked)
    teacher.publish([score_of(request, record_id=f"s-{request.prompt_id}") for request in asked])
    daemons.run()
    kinds = [[entry.tags.type for entry in core.shelf.entries()] for core in daemons.cores]
    assert kinds == [["score"], ["score"]]


def test_a_stream_goes_on_after_the_position_of_a_checkpoint(daemons, outcome):
    """One number per shard: what came by then does not come again, what came later does."""
    writer = daemons.connect("worker/qwen/0", "qwen")
    prompts = prompts_of(0, 4) + prompts_of(1, 2)
    records = [outcome(f"r-{prompt_id}", prompt_id=prompt_id) for prompt_id in prompts]
    writer.publish([records[0], records[1], records[2], records[4]])
    reader = daemons.connect("learner/llama", "llama")
    reader.read("all", kinds=["outcome"])
    daemons.run()
    position = come_to(0, reader.take())
    reader.commit("all", position)
    writer.publish([records[3], records[5]])
    daemons.run()
    assert position == [3, 1]
    assert [core.stat(0.0).streams[0].committed for core in daemons.cores] == [3, 1]
    again = daemons.connect("learner/llama", "llama")
    again.read("all", kinds=["outcome"], after=position)
    daemons.run()
    assert ids(again.take()) == sorted([f"r-{prompts[3]}", f"r-{prompts[5]}"])


@pytest.mark.parametrize(("stored", "after"), [(2, [2, 0]), ([2], [2, 0]), ([2, 1, 9], [2, 1])])
def test_a_position_of_another_number_of_shards_holds(daemons, stored, after):
    """A new shard is read from its beginning; a number alone is that of a single daemon."""
    reader = daemons.connect("learner/llama", "llama")
    reader.read("all", kinds=["outcome"], after=stored)
    daemons.run()
    assert [core.stat(0.0).streams[0].took for core in daemons.cores] == after


def test_a_position_never_goes_back(outcome):
    """Whatever the order of the shards."""
    received = [Received(outcome(), 0, number, shard) for number, shard in ((4, 2), (7, 0), (6, 0))]
    assert come_to([1, 5], received) == [7, 5, 4]


def test_a_silent_shard_costs_its_own_part_alone(daemons, outcome):
    """The others store and answer; which one is silent is told; its part comes when it is back."""
    writer, reader = daemons.connect("worker/qwen/0", "qwen"), daemons.connect("learner/llama", "llama")
    here, there = prompts_of(0)[0], prompts_of(1)[0]
    daemons.run()
    daemons.silent.add(1)
    writer.publish([outcome("here", prompt_id=here), outcome("there", prompt_id=there)])
    reader.fetch([here, there], **ALL, watch=True)
    daemons.tick(seconds=SILENCE_S + 1)
    assert ids(reader.take()) == ["here"]
    assert (writer.counts["stored"], writer.lost_shards, reader.lost_shards) == (1, [1], [1])
    assert reader.lost_s() > SILENCE_S
    daemons.restart(1)
    daemons.tick(seconds=4)
    assert ids(reader.take()) == ["there"]
    assert (writer.counts["stored"], writer.lost_shards, reader.lost_s()) == (2, [], 0.0)


def test_waiting_calls_share_one_bound_and_leave_what_the_others_answered(daemons, outcome):
    """False from both; the record of the shard that answers is there."""
    writer, reader = daemons.connect("worker/qwen/0", "qwen"), daemons.connect("learner/llama", "llama")
    here, there = prompts_of(0)[0], prompts_of(1)[0]
    writer.publish([outcome("here", prompt_id=here), outcome("there", prompt_id=there)])
    ask = {**ALL, "timeout_s": 30.0}
    assert daemons.during(lambda: writer.flush(30.0)) == [True]
    assert daemons.during(lambda: reader.fetch_now([there, here], **ask)) == [True]
    assert ids(reader.take()) == ["here", "there"]
    daemons.silent.add(1)
    writer.publish([outcome("late", prompt_id=there)])
    assert daemons.during(lambda: writer.flush(0.05)) == [False]
    assert daemons.during(lambda: reader.fetch_now([there, here], **(ask | {"timeout_s": 0.05}))) == [False]
    assert ids(reader.take()) == ["here"]


def test_who_waits_for_room_on_one_shard_is_heard_by_the_others(daemons, outcome, monkeypatch, until):
    """Its part of what is published leaves before the wait is over."""
    monkeypatch.setattr(publisher, "MAX_UNACKNOWLEDGED_BYTES", 4000)
    monkeypatch.setattr(packing, "FULL_BYTES", 1000)
    writer = daemons.connect("worker/qwen/0", "qwen")
    here, there = prompts_of(0)[0], prompts_of(1)[0]
    daemons.run()
    daemons.silent.add(1)
    writer.publish([outcome("first", prompt_id=there, completion=bytes(2000))])
    both = [outcome("second", prompt_id=there, completion=bytes(2000)), outcome("here", prompt_id=here)]
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(writer.publish, both, room_within_s=20.0)
        until(lambda: daemons.run() or daemons.held(0))
        assert not call.done()
        daemons.restart(1)
        until(lambda: daemons.tick(seconds=0.5) or call.done())
    assert writer.counts["stored"] >= 2


def test_a_barrier_opens_when_it_is_open_on_every_shard(daemons):
    """What a member said to any shard before it came is known there when the others go on."""
    qwen, llama = daemons.connect("learner/qwen", "qwen"), daemons.connect("learner/llama", "llama")
    members = ["qwen", "llama"]
    assert daemons.during(lambda: qwen.barrier(1, members, 0.05)) == [["llama"]]
    calls = [lambda: qwen.barrier(1, members, 30.0), lambda: llama.barrier(1, members, 30.0)]
    assert daemons.during(*calls) == [[], []]
    daemons.silent.add(1)
    calls = [lambda: qwen.barrier(2, members, 0.1), lambda: llama.barrier(2, members, 0.1)]
    assert daemons.during(*calls) == [["llama"], ["qwen"]]


@pytest.mark.parametrize("silent", [None, 0, 1])
def test_who_waits_hears_over_any_shard_that_a_missing_policy_gets_on(daemons, silent):
    """A number that changes once it said so, and stays as it is until then."""
    qwen, llama = daemons.connect("learner/qwen", "qwen"), daemons.connect("learner/llama", "llama")
    said = [3]
    llama.tell(lambda: said[0])
    daemons.run()

    def heard() -> int:
        for _ in range(3):
            daemons.tick(seconds=1.0)
        assert daemons.during(lambda: qwen.barrier(1, ["qwen", "llama"], 0.05)) == [["llama"]]
        return qwen.progress_of("llama")

    first = heard()
    if silent is not None:
        daemons.silent.add(silent)
    assert first == heard() > 0
    said[0] = 4
    assert heard() != first


def test_storage_that_fails_on_one_shard_is_told(daemons, outcome):
    """A full disk of a single daemon is a fact about the exchange."""
    daemons.cores[1] = LoggedCore(incarnation="full", failure=lambda: "disk_full")
    writer = daemons.connect("worker/qwen/0", "qwen")
    writer.publish([outcome("there", prompt_id=prompts_of(1)[0])])
    daemons.tick(seconds=2)
    assert writer.storage == "disk_full"


def test_closing_ends_all_links_at_once(daemons):
    """Each waits for its own rest while the others wait for theirs."""
    both = Barrier(2, timeout=10.0)
    daemons.before_close = both.wait
    daemons.connect("learner/qwen", "qwen").close(1.0)
    assert daemons.clients == {}
