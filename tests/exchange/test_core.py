"""What the exchange decides, without sockets, clocks or files."""

from collections import Counter

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.exchange.core import ExchangeCore
from mrl.exchange.limits import HELD_OVERHEAD_BYTES, MIB, Limits, held_bytes_of
from mrl.exchange.record_intake import BUSY, RETRY_S
from mrl.exchange.sessions import CLAIM_S, FORGET_AFTER_S, MAX_TRIES
from mrl.records.codec import decode, encode
from mrl.records.exchange_messages import (
    Announce,
    Barrier,
    Deliver,
    Done,
    Fetch,
    Hello,
    Later,
    Ping,
    PutAck,
    Stat,
    StatRequest,
    Unwatch,
    Welcome,
    daemon_message_decoder,
)
from mrl.records.version import Version
from mrl.transport.grants import Grant
from tests.support.stored_core import StoredCore, put_message, records_of

LEARNER, WORKER = b"learner/llama", b"worker/qwen/0"


def make_core(**options):
    """A core with a log that always succeeds."""
    core = StoredCore(**options)
    core.handle(LEARNER, Hello(client=LEARNER.decode(), policy="llama"), 0.0)
    core.handle(WORKER, Hello(client=WORKER.decode(), policy="qwen"), 0.0)
    return core


def put(core, *records, client=WORKER, seq=0, now_s=0.0):
    """Put records; returns (ack, messages to others)."""
    (_, ack), *others = core.handle(client, put_message(*records, seq=seq), now_s)
    assert isinstance(ack, PutAck)
    return ack, others


def fetch(
    core, *prompt_ids, client=LEARNER, kinds=("outcome",), limit=4, max_age_versions=None, watch=False, seq=1, now_s=0.0
):
    """Fetch; returns the ids and ages of the records that came at once."""
    message = Fetch(
        client="l", policy="-", prompt_ids=list(prompt_ids), kinds=list(kinds), limit=limit,
        max_age_versions=max_age_versions, watch=watch, seq=seq,
    )  # fmt: skip
    return delivered(core.handle(client, message, now_s))


def delivered(out):
    """(record id, age) of everything delivered."""
    return [
        (record.record_id, age)
        for _, message in out
        for record, age in zip(records_of(message), message.ages_versions, strict=True)
    ]


def announce(core, step, epoch=0, policy="qwen", resumed=False):
    """The policy now trains at this version."""
    client = next(client for client, session in core.sessions.items() if session.policy == policy)
    core.handle(client, Announce(client="w", policy=policy, version=Version(epoch, step), resumed=resumed), 0.0)


def stat(core, now_s=0.0) -> Stat:
    """The daemon's account."""
    [(_, message)] = core.handle(b"x", StatRequest(client="x"), now_s)
    return message


def done(out):
    """Says that all these deliveries have come."""
    return Done(client="l", deliveries=[message.delivery for _, message in out if isinstance(message, Deliver)])


def told(out):
    """(client, type of message, its number) of answers to Puts."""
    return [(client, type(message), message.seq) for client, message in out]


def policy_stat(core, policy):
    """The account of one policy."""
    return next(one for one in stat(core).policies if one.policy == policy)


def test_a_success_is_fetched_by_another_policy_only(outcome):
    """The learner of llama gets what qwen achieved; qwen's own learner does not."""
    core = make_core()
    ack, _ = put(core, outcome(), seq=1)
    assert (ack.incarnation, ack.seqs, ack.stored, ack.refused) == ("one", [1], 1, {})
    assert fetch(core, "p1", "p2") == [("r1", 0)]
    core.handle(b"learner/qwen", Hello(client="learner/qwen", policy="qwen"), 0.0)
    assert fetch(core, "p1", client=b"learner/qwen") == []


def test_only_the_newest_are_kept_and_newest_come_first(outcome):
    """Of five successes on a prompt the two of the newest versions remain, whatever their order of arrival."""
    core = make_core(successes_per_prompt=2)
    put(core, *(outcome(f"r{step}", step=step) for step in (3, 5, 1, 4, 2)))
    announce(core, 5)
    assert fetch(core, "p1") == [("r5", 0), ("r4", 1)]
    assert policy_stat(core, "qwen").evicted == {"surpassed": 3}


def test_limit_and_age_are_respected_over_all_sources(outcome):
    """At most `limit` records come, the youngest, none older than asked for."""
    core = make_core()
    core.handle(b"worker/gemma", Hello(client="g", policy="gemma"), 0.0)
    put(core, outcome("q7", step=7), outcome("q1", step=1))
    put(core, outcome("g9", "gemma", step=9), outcome("g8", "gemma", step=8), client=b"worker/gemma")
    announce(core, 10)
    announce(core, 9, policy="gemma")
    assert fetch(core, "p1", limit=3) == [("g9", 0), ("g8", 1), ("q7", 3)]
    assert fetch(core, "p1", max_age_versions=2) == [("g9", 0), ("g8", 1)]


def test_a_watch_delivers_at_once_to_all_watching_others(outcome):
    """Both other policies get the success with the very message that brought it; its own policy does not."""
    core = make_core()
    for policy in ("gemma", "qwen"):
        core.handle(policy.encode(), Hello(client=policy, policy=policy), 0.0)
    for client in (LEARNER, b"gemma", b"qwen"):
        assert fetch(core, "p1", client=client, watch=True) == []
    _, others = put(core, outcome())
    assert [(client, delivered([(client, message)])) for client, message in others] == [
        (LEARNER, [("r1", 0)]),
        (b"gemma", [("r1", 0)]),
    ]


def test_a_watch_ends_with_its_limit_or_with_unwatch(outcome):
    """After `limit` records, or when no longer wanted, nothing more comes."""
    core = make_core()
    fetch(core, "p1", "p2", limit=2, watch=True)
    core.handle(LEARNER, Unwatch(client="l", prompt_ids=["p2", "unknown"]), 0.0)
    deliveries = [bool(put(core, outcome(f"r{number}"), seq=number)[1]) for number in range(4)]
    assert deliveries == [True, True, False, False]
    assert put(core, outcome("x", prompt_id="p2"))[1] == []


def test_a_watch_counts_what_was_there_already(outcome):
    """With one of two records given at once, one more comes."""
    core = make_core()
    put(core, outcome())
    assert fetch(core, "p1", limit=2, watch=True) == [("r1", 0)]
    assert delivered(put(core, outcome("r2"))[1]) == [("r2", 0)]
    assert put(core, outcome("r3"))[1] == []


def test_a_watch_takes_nothing_too_old(outcome):
    """The age limit holds for later deliveries too."""
    core = make_core()
    announce(core, 10)
    fetch(core, "p1", max_age_versions=3, watch=True)
    assert put(core, outcome("old", step=6))[1] == []
    assert delivered(put(core, outcome("young", step=7))[1]) == [("young", 3)]


def test_watches_are_bounded_per_client_and_in_total(outcome):
    """A client's oldest watch makes room for its newest; beyond the total nothing is added; both are counted."""
    core = make_core(watches_per_client=2, watches_bytes=3 * 1000)
    fetch(core, "p1", "p2", "p3", watch=True)
    core.handle(b"gemma", Hello(client="g", policy="gemma"), 0.0)
    fetch(core, "p1", "p2", client=b"gemma", watch=True)
    assert stat(core).dropped_watches == 2
    assert [len(put(core, outcome(f"r-{prompt}", prompt_id=prompt))[1]) for prompt in ("p1", "p2", "p3")] == [1, 1, 1]
    assert policy_stat(core, "llama").watched_prompts == 2


def test_only_the_asked_types_come(outcome, rollout, value):
    """At once and later, in one order of age over all types; a question without types is one for successes."""
    core = make_core()
    put(core, outcome(step=1), rollout(step=2), value(step=3))
    announce(core, 3)
    assert fetch(core, "p1", kinds=["rollout", "value"]) == [("v1", 0), ("g1", 1)]
    assert fetch(core, "p1", kinds=["outcome", "rollout", "value"], limit=2, seq=2) == [("v1", 0), ("g1", 1)]
    plain = {"type": "fetch", "client": "l", "policy": "-", "prompt_ids": ["p1"], "limit": 1,
             "max_age_versions": None, "watch": False}  # fmt: skip
    assert delivered(core.receive_body(LEARNER, msgpack.packb(plain), 0.0)) == [("r1", 2)]


def test_a_watch_takes_only_its_types(outcome, rollout, value):
    """Others neither come nor count against its limit; of two that come together the one that stays does."""
    core = make_core()
    fetch(core, "p1", kinds=["value"], limit=1, watch=True)
    assert put(core, outcome(), rollout())[1] == []
    assert delivered(put(core, value(), value("v2", step=1))[1]) == [("v2", 0)]


def test_a_later_question_about_a_prompt_replaces_the_watch(rollout, value):
    """A client has one watch per prompt."""
    core = make_core()
    fetch(core, "p1", kinds=["value"], watch=True)
    fetch(core, "p1", kinds=["rollout"], watch=True, seq=2)
    assert delivered(put(core, value(), rollout())[1]) == [("g1", 0)]


def test_groups_leave_successes_alone_and_only_the_newest_stays(outcome, rollout):
    """Four successes, one group per prompt and policy; the account counts each type."""
    core = make_core()
    put(core, *(outcome(f"r{n}", step=n) for n in range(6)), *(rollout(f"g{n}", step=n) for n in range(3)))
    held = policy_stat(core, "qwen")
    assert (held.kinds, held.records, held.evicted) == ({"outcome": 4, "rollout": 1}, 5, {"surpassed": 4})
    assert fetch(core, "p1", kinds=["rollout"]) == [("g2", 0)]


def test_a_repeated_record_is_recognised(outcome):
    """Sent again, it is neither stored nor delivered again, and the ack says why."""
    core = make_core()
    fetch(core, "p1", watch=True)
    assert len(put(core, outcome(), outcome())[1]) == 1
    ack, others = put(core, outcome(), seq=2)
    assert (ack.stored, ack.refused, others) == (0, {"duplicate": 1}, [])


def test_an_evicted_record_that_comes_again_is_a_duplicate(outcome):
    """The memory of ids is longer than that of records."""
    core = make_core(successes_per_prompt=1)
    put(core, outcome("r1", step=1), outcome("r2", step=2))
    assert put(core, outcome("r1", step=1))[0].refused == {"duplicate": 1}


def test_stale_records_are_evicted_and_refused(outcome):
    """What a new version makes too old goes, and what comes too late is not taken."""
    core = make_core(max_age_versions=5)
    put(core, outcome("r1", step=4), outcome("r2", step=5))
    announce(core, 10)
    assert fetch(core, "p1") == [("r2", 5)]
    assert put(core, outcome("r3", step=4))[0].refused == {"stale": 1}
    held = policy_stat(core, "qwen")
    assert (held.evicted, held.refused) == ({"stale": 1}, {"stale": 1})


def test_a_resume_voids_the_later_steps_of_the_old_epoch(outcome):
    """Records of steps that the resume took back go and are refused, also after a second resume further on."""
    core = make_core()
    put(core, outcome("kept", step=10), outcome("void", step=11))
    announce(core, 12)
    announce(core, 10, epoch=1, resumed=True)
    assert fetch(core, "p1") == [("kept", 0)]
    announce(core, 50, epoch=2, resumed=True)
    assert put(core, outcome("late", step=11))[0].refused == {"void": 1}
    assert policy_stat(core, "qwen").evicted == {"void": 1}


def test_versions_never_go_back_inside_an_epoch(outcome):
    """A late announcement changes nothing."""
    core = make_core()
    put(core, outcome(step=5))
    announce(core, 9)
    announce(core, 6)
    assert fetch(core, "p1") == [("r1", 4)]


def test_the_budget_holds_and_the_oldest_arrival_goes_first(outcome):
    """Stale ones are gone by then; of the rest the first that came goes."""
    core = make_core(budget_bytes=10 * (HELD_OVERHEAD_BYTES + 300))
    for number in range(50):
        put(core, outcome(f"r{number}", prompt_id=f"p{number}"))
        assert stat(core).used_bytes <= stat(core).budget_bytes
    held = policy_stat(core, "qwen")
    assert held.records + held.evicted["full"] == held.put == 50
    assert [bool(fetch(core, f"p{number}")) for number in (0, 50 - held.records - 1, 50 - held.records, 49)] == [
        False, False, True, True,
    ]  # fmt: skip


def test_stale_records_go_before_fresh_ones_that_came_earlier(outcome):
    """The announcement makes room, so that the old arrival stays."""
    core = make_core(budget_bytes=2 * (HELD_OVERHEAD_BYTES + 300), max_age_versions=5)
    put(core, outcome("fresh", step=9), outcome("stale", step=0, prompt_id="p2"))
    announce(core, 10)
    put(core, outcome("new", step=10, prompt_id="p3"))
    assert [fetch(core, prompt) for prompt in ("p1", "p2", "p3")] == [[("fresh", 1)], [], [("new", 0)]]


def test_a_record_larger_than_the_budget_is_refused(outcome):
    """It must not empty the whole memory."""
    core = make_core(budget_bytes=HELD_OVERHEAD_BYTES + 1000)
    put(core, outcome("small"))
    assert put(core, outcome("large", completion=bytes(2000)))[0].refused == {"too_large": 1}
    assert fetch(core, "p1") == [("small", 0)]


def test_nothing_is_said_of_a_record_before_it_is_committed(outcome):
    """No acknowledgement, nobody is given it, and a repetition is answered with its original."""
    core = make_core(is_slow=True)
    fetch(core, "p1", watch=True)
    assert core.handle(WORKER, put_message(outcome(), seq=1), 0.0) == []
    assert core.handle(WORKER, put_message(outcome(), seq=1), 0.0) == []
    assert core.handle(WORKER, put_message(outcome(), outcome("r2"), seq=2), 0.0) == []
    assert (fetch(core, "p1", watch=True, seq=2), len(core.under_way.inserts), stat(core).unstored) == ([], 1, 2)
    (to, ack), (watcher, delivery) = core.finish()
    assert (to, ack.seqs, ack.stored, watcher, delivered([(watcher, delivery)])) == (
        WORKER,
        [1],
        1,
        LEARNER,
        [("r1", 0)],
    )
    core.commit_all(0.0)
    (_, ack), *_ = core.finish()
    assert (ack.stored, ack.refused, stat(core).unstored) == (1, {"duplicate": 1}, 0)


def test_a_client_speaks_for_the_policy_of_its_key_only(outcome):
    """It cannot greet, put, announce or meet as another one, nor look at everything."""
    core = make_core()
    [(_, answer)] = core.handle(b"worker/qwen/1", Hello(client="w", policy="llama"), 0.0, policy="qwen")
    assert (answer.known, core.malformed["impersonation"]) == (False, 1)
    assert put(core, outcome(source="llama"))[0].refused == {"foreign": 1}
    version = Version(0, 9)
    core.handle(WORKER, Announce(client="w", policy="llama", version=version), 0.0, policy="qwen")
    core.handle(WORKER, Barrier(client="w", policy="llama", number=3, members=["llama"]), 0.0, policy="qwen")
    held = policy_stat(core, "llama")
    assert (held.newest, held.barrier) == (None, None)
    grants = [Grant("worker", "qwen"), Grant("learner", "qwen"), Grant("admin")]
    looks = [ExchangeCore.handle(core, b"x", StatRequest(client="x"), grant, 0.0) for grant in grants]
    assert [len(out) for out in looks] == [0, 0, 1]


def test_a_full_disk_acknowledges_and_delivers_nothing(outcome):
    """Who puts is told to come again, and the same Put is taken when there is room again."""
    answers = iter(["disk_full", ""])
    core = make_core(failure=lambda: next(answers))
    fetch(core, "p1", watch=True)
    assert told(core.handle(WORKER, put_message(outcome(), seq=1), 0.0)) == [(WORKER, Later, 1)]
    [(_, pong)] = core.handle(WORKER, Ping(client="w"), 0.0)
    assert (pong.storage, pong.window_bytes, stat(core).storage, len(core.index)) == ("disk_full", 0, "disk_full", 0)
    assert told(core.handle(WORKER, put_message(outcome(), seq=1), RETRY_S / 2)) == [(WORKER, Later, 1)]
    ack, others = put(core, outcome(), seq=1, now_s=RETRY_S)
    assert (ack.stored, len(others), stat(core).storage, stat(core).later) == (1, 1, "", 2)


def test_what_goes_while_the_disk_is_full_is_deleted_once_it_can_be(outcome):
    """Nobody has to put anything for that; the file says in the end what memory says."""
    failures = [""]
    core = make_core(failure=lambda: failures[0], max_age_versions=5)
    put(core, outcome("r1"))
    failures[0] = "disk_full"
    announce(core, 9)
    assert (len(core.index), [entry.record_id for entry in core.contents().entries]) == (0, ["r1"])
    failures[0] = ""
    core.tick(2 * RETRY_S)
    core.commit_all(2 * RETRY_S)
    assert (list(core.contents().entries), core.contents().removed_ids) == ([], ["r1"])
    assert [message.version for message in core.contents().announcements] == [Version(0, 9)]


def test_a_disk_that_has_room_again_is_found_when_nobody_puts_anything(outcome):
    """Every client hears of it with the next Welcome, and need not send its Put in vain."""
    failures = ["disk_full"]
    core = make_core(failure=lambda: failures[0])
    assert told(core.handle(WORKER, put_message(outcome(), seq=1), 0.0)) == [(WORKER, Later, 1)]
    assert core.begin(RETRY_S, is_awaited=True) is None
    core.commit_all(RETRY_S)
    assert stat(core).storage == "disk_full"
    failures[0] = ""
    core.commit_all(2 * RETRY_S)
    [(_, pong)] = core.handle(WORKER, Ping(client="w"), 2 * RETRY_S)
    assert (pong.storage, pong.window_bytes > 0, core.begin(9.0, is_awaited=False)) == ("", True, None)


def test_puts_of_a_transaction_that_fails_fail_together(outcome):
    """A duplicate of a record that is not in the file yet is not taken for stored when it never gets there."""
    core = make_core(is_slow=True)
    core.handle(WORKER, put_message(outcome(), seq=1), 0.0)
    assert core.handle(b"learner/llama", put_message(seq=7), 0.0) == []
    core.handle(WORKER, Hello(client="w", policy="qwen"), 0.0)
    assert core.handle(WORKER, put_message(outcome(), seq=2), 0.0) == []
    out = core.finish("disk_full")
    assert told(out) == [(WORKER, Later, 1), (LEARNER, Later, 7), (WORKER, Later, 2)]
    assert core.handle(WORKER, put_message(outcome(), seq=2), RETRY_S) == []
    [(_, ack)] = core.finish()
    assert (ack.seqs, ack.stored, ack.refused) == ([2], 1, {})


def test_what_ages_on_its_way_to_the_file_is_evicted(outcome):
    """It was taken, so that it is acknowledged; it is counted, and nobody is given it."""
    core = make_core(is_slow=True, max_age_versions=3)
    core.handle(WORKER, put_message(outcome()), 0.0)
    announce(core, 4)
    [(_, ack)] = core.finish()
    assert (ack.stored, len(core.index)) == (1, 0)
    core.commit_all(0.0)
    core.finish()
    assert policy_stat(core, "qwen").evicted == {"stale": 1}


def test_clients_share_what_may_be_unacknowledged(outcome):
    """The more there are the less each may have."""
    core = make_core()
    windows = [put(core, outcome("r1"))[0].window_bytes]
    for number in range(90):
        [(_, welcome)] = core.handle(b"%d" % number, Hello(client="c", policy="gemma"), 0.0)
        windows.append(welcome.window_bytes)
    assert windows == sorted(windows, reverse=True)
    assert (windows[0], windows[10], windows[-1]) == (4 * MIB, 16 * MIB // 12, 512 * 1024)


def test_puts_under_way_are_bounded_in_bytes(outcome):
    """A file that does not answer does not make the daemon grow; who puts more is told to come again."""

    def large(number):
        return outcome(f"r{number}", completion=bytes(200_000))

    core = make_core(is_slow=True, budget_bytes=10**9, successes_per_prompt=1000)
    answers = [
        answer for number in range(200)
        for answer in core.handle(WORKER, put_message(large(number), seq=number + 1), 0.0)
    ]  # fmt: skip
    taken = 200 - len(answers)
    assert abs(taken - Limits().unstored_bytes // 200_000) <= 2
    assert {(type(message), message.storage) for _, message in answers} == {(Later, BUSY)}
    assert stat(core).storage == ""
    core.finish()
    core.commit_all(0.0)
    core.finish()
    core.commit_all(0.0)
    core.handle(WORKER, put_message(large(199), seq=200), 0.0)
    core.finish()
    assert len(core.index) == taken + 1


def test_a_file_rebuilds_the_memory(outcome):
    """What a second core restores answers every question in the same way."""
    core = make_core(successes_per_prompt=2, max_age_versions=5)
    put(core, *(outcome(f"r{number}", prompt_id=f"p{number % 3}", step=number) for number in range(9)))
    announce(core, 9)
    announce(core, 7, epoch=1, resumed=True)
    again = StoredCore(successes_per_prompt=2, max_age_versions=5)
    again.restore(core.contents())
    for client, policy in ((LEARNER, "llama"), (WORKER, "qwen")):
        again.handle(client, Hello(client="c", policy=policy), 0.0)
    prompts = ("p0", "p1", "p2")
    assert [fetch(again, prompt) for prompt in prompts] == [fetch(core, prompt) for prompt in prompts]
    assert policy_stat(again, "qwen") == policy_stat(core, "qwen")
    assert put(again, outcome("late", step=8))[0].refused == {"void": 1}
    assert put(again, outcome("r0", prompt_id="p0", step=7, epoch=1))[0].refused == {"duplicate": 1}
    assert put(again, outcome("new", step=7, epoch=1))[0].stored == 1
    assert [entry.number for entry in again.index.entries()] == sorted(entry.number for entry in again.index.entries())


def test_what_a_daemon_had_no_time_to_delete_goes_when_the_next_one_starts(outcome):
    """The same rules find it, and count it once."""
    core = make_core(successes_per_prompt=1, max_age_versions=5)
    put(core, outcome("r1", step=1), outcome("r2", step=2))
    del core.committed[1:]
    contents = core.contents()
    assert ([entry.record_id for entry in contents.entries], contents.removed_ids) == (["r1", "r2"], [])
    again = StoredCore(successes_per_prompt=1, max_age_versions=5)
    again.restore(contents)
    again.commit_all(0.0)
    assert (policy_stat(again, "qwen").evicted, len(again.index)) == ({"surpassed": 1}, 1)


def test_flows_count_a_prompt_once_per_asking(outcome):
    """Three records on one prompt are one hit; asking again is a new chance; a repeated Fetch is not."""
    core = make_core()
    put(core, *(outcome(f"r{number}", step=number) for number in range(3)))
    fetch(core, "p1", "p2", watch=True, seq=1)
    fetch(core, "p1", "p2", watch=True, seq=1)
    put(core, outcome("late", prompt_id="p2"))
    put(core, outcome("later", prompt_id="p2"))
    put(core, outcome("more", step=9))
    fetch(core, "p1", seq=2)
    [flow] = [flow for flow in stat(core).flows if flow.source == "qwen"]
    assert (flow.receiver, flow.asked, flow.hits, flow.records) == ("llama", 3, 3, 3 + 3 + 2 + 1 + 4)


def test_a_peer_that_never_succeeded_has_a_row(outcome):
    """Asked and never hit is visible, not missing."""
    core = make_core()
    fetch(core, "p1")
    [flow] = stat(core).flows
    assert (flow.source, flow.receiver, flow.asked, flow.hits, flow.records) == ("qwen", "llama", 1, 0, 0)


def test_mean_age_and_bytes_of_a_flow(outcome):
    """Ages are those at delivery."""
    core = make_core()
    put(core, outcome("r1", step=1), outcome("r4", step=4))
    announce(core, 5)
    fetch(core, "p1")
    [flow] = stat(core).flows
    assert flow.mean_age_versions == 2.5
    assert flow.bytes == len(encode(outcome("r1", step=1))) + len(encode(outcome("r4", step=4)))


def test_a_fetch_with_a_number_is_always_answered(outcome):
    """The client learns that there is nothing, or that its Fetch was lost."""
    core = make_core()
    message = Fetch(client="l", policy="llama", prompt_ids=["p1"], limit=1, max_age_versions=None, watch=False, seq=9)
    [(_, answer)] = core.handle(LEARNER, message, 0.0)
    assert (answer.records, answer.seq) == ([], 9)


def test_large_deliveries_are_split_into_numbered_parts(outcome):
    """No message exceeds the transport's limit, and the client knows when it has them all."""
    core = make_core(budget_bytes=100_000_000)
    for number in range(10):
        put(core, outcome(f"r{number}", prompt_id=f"p{number}", completion=bytes(160_000)), seq=number)
    ids = [f"p{number}" for number in range(10)]
    message = Fetch(client="l", policy="llama", prompt_ids=ids, limit=1, max_age_versions=None, watch=False, seq=3)
    out = core.handle(LEARNER, message, 0.0)
    assert [(answer.seq, answer.part, answer.parts) for _, answer in out] == [(3, part, 4) for part in (1, 2, 3, 4)]
    assert len(delivered(out)) == 10
    assert max(len(encode(answer)) for _, answer in out) < 530_000


def test_a_slow_reader_is_sent_no_more_than_it_acknowledges(outcome):
    """About four MiB lie unacknowledged at most; the rest follows, every record once, in the order of the answer."""
    core = make_core(budget_bytes=100_000_000)
    ids = [f"p{number}" for number in range(64)]
    for number, prompt_id in enumerate(ids):
        put(core, outcome(f"r{number}", prompt_id=prompt_id, completion=bytes(200_000)))
    message = Fetch(client="l", policy="llama", prompt_ids=ids, limit=1, max_age_versions=None, watch=False, seq=3)
    out, came = core.handle(LEARNER, message, 0.0), []
    while out:
        assert sum(len(encode(answer)) for _, answer in out) <= Limits().unacknowledged_bytes + 10_000
        came += [record_id for record_id, _ in delivered(out)]
        out = core.handle(LEARNER, done(out), 0.0)
    assert came == [f"r{number}" for number in range(64)]
    assert core.tick(CLAIM_S) == []


def test_a_record_larger_than_all_that_may_be_unacknowledged_comes_alone(rollout):
    """Otherwise it would never come."""
    core = make_core(budget_bytes=100_000_000)
    put(core, rollout("g1", group=64, tokens=7000), rollout("g2", prompt_id="p2"))
    message = Fetch(
        client="l", policy="-", prompt_ids=["p1", "p2"], kinds=["rollout"], limit=1, max_age_versions=None, watch=False
    )
    out = core.handle(LEARNER, message, 0.0)
    assert delivered(out) == [("g1", 0)]
    assert delivered(core.handle(LEARNER, done(out), 0.0)) == [("g2", 0)]


def test_a_stuck_reader_costs_bounded_memory_and_nobody_else_waits(outcome):
    """What it watches beyond the bounds is counted and left out; others get theirs at once."""
    core = make_core(budget_bytes=10**9, watches_per_client=10**5)
    core.handle(b"stuck", Hello(client="stuck", policy="gemma"), 0.0)
    ids = [f"p{number}" for number in range(6000)]
    for client in (b"stuck", LEARNER):
        for start in range(0, 6000, 1000):
            fetch(core, *ids[start : start + 1000], client=client, watch=True, seq=start + 1)
    sent: Counter[bytes] = Counter()
    for number, prompt_id in enumerate(ids):
        _, others = put(core, outcome(f"r{number}", prompt_id=prompt_id, completion=bytes(5000)))
        for client, message in others:
            sent[client] += len(encode(message))
            if client == LEARNER:
                core.handle(LEARNER, done([(client, message)]), 0.0)
    assert sent[b"stuck"] < Limits().unacknowledged_bytes * 1.1 < 30_000_000 < sent[LEARNER]
    assert stat(core).abandoned > 0


def test_a_repeated_question_is_answered_anew_and_not_twice(outcome):
    """What still waits of the first answer goes."""
    core = make_core(budget_bytes=100_000_000)
    ids = [f"p{number}" for number in range(40)]
    for number, prompt_id in enumerate(ids):
        put(core, outcome(f"r{number}", prompt_id=prompt_id, completion=bytes(200_000)))
    message = Fetch(client="l", policy="-", prompt_ids=ids, limit=1, max_age_versions=None, watch=False, seq=5)
    out = core.handle(LEARNER, message, 0.0)
    came = len(delivered(out))
    assert (came, core.handle(LEARNER, message, 0.0)) == (20, [])
    while out := core.handle(LEARNER, done(out), 0.0):
        came += len(delivered(out))
    assert came == 20 + 40


def test_what_is_not_acknowledged_is_delivered_again_a_few_times(outcome):
    """A lost delivery comes again under its number; Done ends it; after several tries it is given up and counted."""
    core = make_core(deliver_bytes=100, unacknowledged_bytes=10_000)
    put(core, outcome("r1"), outcome("r2", prompt_id="p2"))
    message = Fetch(client="l", policy="-", prompt_ids=["p1", "p2"], limit=1, max_age_versions=None, watch=False, seq=5)
    first, second = core.handle(LEARNER, message, 0.0)
    core.handle(LEARNER, Done(client="l", deliveries=[first[1].delivery, 999]), 0.0)
    assert core.tick(CLAIM_S - 0.1) == []
    again = [core.tick(CLAIM_S * number) for number in range(1, MAX_TRIES + 2)]
    assert again == [[second]] * (MAX_TRIES - 1) + [[], []]
    assert (stat(core).unacknowledged, stat(core).abandoned) == (0, 1)


def test_who_acknowledges_nothing_is_sent_one_delivery_at_a_time(outcome):
    """It probably reads too slowly; as soon as it acknowledges something, what is due comes again."""
    core = make_core(deliver_bytes=100, unacknowledged_bytes=10_000)
    put(core, *(outcome(f"r{n}", prompt_id=f"p{n}") for n in range(5)))
    ids = [f"p{n}" for n in range(5)]
    message = Fetch(client="l", policy="-", prompt_ids=ids, limit=1, max_age_versions=None, watch=False, seq=5)
    assert len(core.handle(LEARNER, message, 0.0)) == 5
    assert len(core.tick(CLAIM_S)) == 5
    [again] = core.tick(2 * CLAIM_S)
    core.handle(LEARNER, done([again]), 2 * CLAIM_S)
    assert len(core.tick(3 * CLAIM_S)) == 4


def test_a_silent_client_is_forgotten_and_told_so(outcome):
    """Its watches go; when it comes back it is asked to say Hello."""
    core = make_core()
    fetch(core, "p1", watch=True)
    core.handle(WORKER, Ping(client="w"), FORGET_AFTER_S)
    core.tick(FORGET_AFTER_S + 1)
    assert stat(core).clients == [WORKER.decode()]
    assert put(core, outcome(), now_s=FORGET_AFTER_S + 1)[1] == []
    for message in (
        Ping(client="l"),
        Fetch(client="l", policy="llama", prompt_ids=["p1"], limit=1, max_age_versions=None, watch=True),
    ):
        [(_, answer)] = core.handle(LEARNER, message, FORGET_AFTER_S + 2)
        assert isinstance(answer, Welcome)
        assert not answer.known


def test_hello_forgets_the_earlier_connection(outcome):
    """A restarted learner is not bothered with what its predecessor asked."""
    core = make_core()
    fetch(core, "p1", watch=True)
    [(_, answer)] = core.handle(LEARNER, Hello(client="l", policy="llama"), 1.0)
    assert answer.known
    assert put(core, outcome())[1] == []


def test_names_cannot_grow_the_tables_without_bound():
    """Beyond 1024 policies clients stay unknown, and what strangers put is not taken."""
    core = make_core()
    answers = [
        core.handle(b"%d" % n, Hello(client=f"c{n}", policy=f"s{n}"), 0.0)[0][1] for n in range(Limits().policies + 44)
    ]
    assert sum(answer.known for answer in answers) == Limits().policies - 2


def test_a_stranger_is_asked_to_introduce_himself_before_he_puts(outcome):
    """Whose records they are is known from Hello."""
    core = make_core()
    [(_, answer)] = core.handle(b"stranger", put_message(outcome()), 0.0)
    assert (answer.known, len(core.index)) == (False, 0)


@settings(deadline=None)
@given(body=st.binary(max_size=200))
def test_random_bytes_are_counted_and_dropped(body):
    """Nothing that a client sends raises; what is no message is counted."""
    core = make_core()
    for _, answer in core.receive_body(WORKER, body, 0.0):
        decode(encode(answer), daemon_message_decoder)
    assert core.malformed["record"] <= 1


class ReferenceIndex:
    """The success memory in ten slow lines: a list of all records that were ever taken."""

    def __init__(self, per_prompt, max_age):
        self.taken, self.per_prompt, self.max_age, self.newest = [], per_prompt, max_age, {}

    def age(self, record):
        return max(0, self.newest.get(record.source, 0) - record.oldest.step)

    def fetch(self, prompt_id, receiver, limit):
        kept = {}
        for record in sorted(self.taken, key=lambda r: r.oldest.step):  # stable: equal steps stay in order of arrival
            if record.prompt_id == prompt_id and record.source != receiver:
                kept[record.source] = [*kept.get(record.source, []), record][-self.per_prompt :]
        fresh = [r for records in kept.values() for r in records if self.age(r) <= self.max_age]
        order = {record.record_id: number for number, record in enumerate(self.taken)}
        return [r.record_id for r in sorted(fresh, key=lambda r: (self.age(r), -order[r.record_id]))][:limit]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(["a", "b", "c"]), st.sampled_from(["p", "q"]), st.integers(0, 12)),
        st.tuples(st.just("announce"), st.sampled_from(["a", "b", "c"]), st.just(""), st.integers(0, 20)),
        st.tuples(st.just("fetch"), st.sampled_from(["a", "b", "c"]), st.sampled_from(["p", "q"]), st.integers(1, 4)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(actions=ACTIONS)
@pytest.mark.parametrize("per_prompt", [1, 2])
def test_the_core_agrees_with_the_reference_index(outcome, per_prompt, actions):
    """For any order of puts, announcements and fetches both give the same records in the same order."""
    core, reference = (
        make_core(successes_per_prompt=per_prompt, max_age_versions=6),
        ReferenceIndex(per_prompt, 6),
    )
    for policy in ("a", "b", "c"):
        core.handle(policy.encode(), Hello(client=policy, policy=policy), 0.0)
    for number, (action, policy, prompt_id, value) in enumerate(actions):
        if action == "put":
            record = outcome(f"r{number}", policy, prompt_id, value)
            ack, _ = put(core, record, client=policy.encode())
            assert ack.stored == (reference.age(record) <= 6)
            reference.taken += [record] if ack.stored else []
        elif action == "announce":
            announce(core, value, policy=policy)
            reference.newest[policy] = max(value, reference.newest.get(policy, 0))
        else:
            got = fetch(core, prompt_id, client=policy.encode(), limit=value, seq=number + 1)
            assert [record_id for record_id, _ in got] == reference.fetch(prompt_id, policy, value)
        account = stat(core)
        held = list(core.index.entries())
        assert account.used_bytes == sum(held_bytes_of(len(entry.body)) for entry in held)


def test_deliver_is_the_only_thing_that_carries_records(outcome):
    """Acks and accounts stay small whatever is held."""
    core = make_core()
    put(core, outcome(completion=bytes(100_000)))
    [(_, answer)] = core.handle(LEARNER, StatRequest(client="l"), 0.0)
    assert not isinstance(answer, Deliver)
    assert len(encode(answer)) < 2000
