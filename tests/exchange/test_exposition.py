"""The account of the daemon as Prometheus metrics and as a state of health."""

import json
import random

import msgspec
import pytest
from logged_core import LoggedCore, put_message
from prometheus_client.parser import text_string_to_metric_families

from mrl.exchange.exposition import MAX_PAIRS, Exposition
from mrl.records.exchange_messages import (
    Announce,
    Barrier,
    Commit,
    Done,
    Fetch,
    Hello,
    PairFlow,
    Stream,
    StreamState,
    Subscribe,
    Took,
)
from mrl.records.version import Version


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    """A clock of the test's own."""
    return Clock()


def busy_core(outcome, request_for):
    """A core of two policies in which everything has happened once."""
    core = LoggedCore(max_age_versions=5)
    for policy in ("qwen", "llama"):
        core.handle(policy.encode(), Hello(client=policy, policy=policy), 0.0)
    core.handle(b"qwen", put_message(outcome("r1"), outcome("r2", prompt_id="p2", step=3), seq=1), 0.0)
    core.handle(b"qwen", put_message(outcome("r1"), seq=2), 0.0)
    core.handle(b"qwen", put_message(request_for("llama", "q1", step=3), seq=3), 0.0)
    core.handle(b"llama", Stream(client="l", stream="all", kinds=["outcome"]), 0.0)
    fetch = Fetch(client="l", policy="llama", prompt_ids=["p1", "p9"], limit=4, max_age_versions=None, watch=True)
    core.handle(b"llama", fetch, 0.0)
    core.handle(b"qwen", Announce(client="w", policy="qwen", version=Version(0, 7)), 0.0)
    core.handle(b"qwen", Barrier(client="w", policy="qwen", number=2, members=["qwen", "llama"]), 0.0)
    core.malformed["record"] += 3
    return core


@pytest.fixture
def stat(outcome, request_for):
    """An account in which every field has something."""
    stat = busy_core(outcome, request_for).stat(9.0)
    return msgspec.structs.replace(stat, log_bytes=500, log_max_bytes=900, log_syncs=4, log_sync_s=0.5, undelivered=2)


def samples(exposition):
    """(name, labels in the order of their names) -> value of everything that is shown."""
    families = text_string_to_metric_families(exposition.metrics().decode())
    return {
        (sample.name, *(label for _, label in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_every_number_of_the_account_is_shown(stat, clock):
    """Each under its name and labels, and as Prometheus itself would read it."""
    shown = samples(Exposition(stat, clock))
    expected = {
        ("mrl_exchange_healthy",): 1,
        ("mrl_exchange_info", "one"): 1,
        ("mrl_exchange_storage_state", "well"): 1,
        ("mrl_exchange_storage_state", "disk_full"): 0,
        ("mrl_exchange_storage_state", "draining"): 0,
        ("mrl_exchange_uptime_seconds",): 9,
        ("mrl_exchange_budget_bytes",): 1_000_000,
        ("mrl_exchange_used_bytes",): stat.used_bytes,
        ("mrl_exchange_clients",): 2,
        ("mrl_exchange_silent_clients",): 2,
        ("mrl_exchange_unserved_requests",): 1,
        ("mrl_exchange_undelivered_messages_total",): 2,
        ("mrl_exchange_dropped_input_total", "record"): 3,
        ("mrl_exchange_log_bytes",): 500,
        ("mrl_exchange_log_max_bytes",): 900,
        ("mrl_exchange_log_syncs_total",): 4,
        ("mrl_exchange_log_sync_seconds_total",): 0.5,
        ("mrl_exchange_records", "qwen", "outcome"): 1,
        ("mrl_exchange_records", "qwen", "score_request"): 1,
        ("mrl_exchange_prompts", "qwen"): 2,
        ("mrl_exchange_newest_step", "qwen"): 7,
        ("mrl_exchange_barrier", "qwen"): 2,
        ("mrl_exchange_watched_prompts", "llama"): 2,
        ("mrl_exchange_put_records_total", "qwen"): 3,
        ("mrl_exchange_refused_records_total", "qwen", "duplicate"): 1,
        ("mrl_exchange_evicted_records_total", "qwen", "stale"): 1,
        ("mrl_exchange_flow_asked_prompts_total", "llama", "qwen"): 2,
        ("mrl_exchange_flow_hit_prompts_total", "llama", "qwen"): 1,
        ("mrl_exchange_flow_records_total", "llama", "qwen"): 1,
        ("mrl_exchange_flow_pairs_left_out",): 0,
        ("mrl_exchange_stream_has_reader", "llama", "all"): 1,
        ("mrl_exchange_stream_sent_number", "llama", "all"): 2,
        ("mrl_exchange_stream_took_number", "llama", "all"): 0,
    }
    assert {key: shown.get(key) for key in expected} == expected
    assert ("mrl_exchange_newest_step", "llama") not in shown  # nothing was announced
    assert shown["mrl_exchange_flow_bytes_total", "llama", "qwen"] > 100


def test_no_series_is_shown_twice_and_every_name_is_of_the_exchange(stat, clock):
    """Counters end in _total; nothing of the process or of Python is mixed in."""
    text = Exposition(stat, clock).metrics().decode()
    names = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(names) == len(set(names)) > 40
    assert all(name.startswith("mrl_exchange_") for name in names)
    counters = [line.split()[2] for line in text.splitlines() if line.endswith(" counter")]
    assert len(counters) >= 14
    assert all(name.endswith("_total") for name in counters)


def test_names_that_clients_choose_cannot_forge_a_line(stat, clock):
    """A stream may be called anything."""
    name = 'a"} 1\nmrl_exchange_healthy 0\n\\'
    state = StreamState(policy="qwen", stream=name, reader="", sent=0, took=0, committed=0, waiting=5)
    shown = samples(Exposition(msgspec.structs.replace(stat, streams=[state]), clock))
    assert shown["mrl_exchange_stream_waiting_records", "qwen", name] == 5
    assert shown["mrl_exchange_healthy",] == 1


def test_the_pairs_shown_are_bounded(stat, clock):
    """The first ones in the order of names; how many are left out is said."""
    numbers = {"asked": 1, "hits": 1, "records": 1, "bytes": 1, "mean_age_versions": 0.0}
    flows = [PairFlow(source=f"s{n:05}", receiver="r", **numbers) for n in range(MAX_PAIRS + 7)]
    shown = samples(Exposition(msgspec.structs.replace(stat, flows=flows), clock))
    records = [key for key in shown if key[0] == "mrl_exchange_flow_records_total"]
    assert records[0][1:] == ("r", "s00000")
    assert len(records) == MAX_PAIRS
    assert shown["mrl_exchange_flow_pairs_left_out",] == 7


def test_the_text_is_made_anew_once_a_second_at_most(stat, clock):
    """However often it is asked for; what was handed over meanwhile shows after that."""
    exposition = Exposition(stat, clock)
    first = exposition.metrics()
    exposition.hand_over(msgspec.structs.replace(stat, uptime_s=10.0))
    clock.now_s += 0.9
    assert exposition.metrics() is first
    clock.now_s += 0.2
    assert samples(exposition)["mrl_exchange_uptime_seconds",] == 10


def test_health_names_its_reason(stat, clock):
    """Storage that fails or is shut, and a loop that stands still; each ends by itself."""
    exposition = Exposition(stat, clock)

    def health():
        status, body = exposition.health()
        content = json.loads(body)
        return status, content["status"], content.get("reason", "")

    assert health() == (200, "ok", "")
    for storage in ("disk_full", "draining"):
        exposition.hand_over(msgspec.structs.replace(stat, storage=storage))
        assert health() == (503, "unavailable", storage)
        clock.now_s += 1.0
        exposition.beat()
        shown = samples(exposition)
        states = ("well", "disk_full", "draining")
        assert [state for state in states if shown["mrl_exchange_storage_state", state]] == [storage]
    exposition.hand_over(stat)
    clock.now_s += 5.0
    assert health() == (200, "ok", "")
    clock.now_s += 1.0
    assert health() == (503, "unavailable", "loop silent for 6 s")
    assert samples(exposition)["mrl_exchange_healthy",] == 0
    exposition.beat()
    assert health() == (200, "ok", "")


def step(rng, core, outcome, number, now_s):
    """One thing that may happen to a daemon."""
    policy = rng.choice(["qwen", "llama", "gemma"])
    client = f"{policy}/{rng.randrange(2)}".encode()
    prompt_id = f"p{rng.randrange(4)}"
    record = outcome(
        f"r{rng.randrange(40)}", source=policy, prompt_id=prompt_id, step=rng.randrange(30), completion=bytes(300)
    )
    version = Version(rng.randrange(2), rng.randrange(40))
    fetch = Fetch(
        client="c", policy=policy, prompt_ids=[prompt_id, "p9"], limit=2, max_age_versions=None,
        watch=rng.random() < 0.5, seq=rng.randrange(number + 1),
    )  # fmt: skip
    messages = [
        Hello(client=client.decode(), policy=policy),
        put_message(record, seq=number),
        put_message(record, seq=number),
        fetch,
        fetch,
        Announce(client="c", policy=policy, version=version, resumed=number % 7 == 0),
        Stream(client="c", stream="s", kinds=["outcome"], after=rng.randrange(5)),
        Took(client="c", stream="s", upto=rng.randrange(50)),
        Commit(client="c", policy=policy, stream="s", upto=rng.randrange(50)),
        Subscribe(client="c", kinds=["score_request"]),
        Done(client="c", record_ids=[f"r{rng.randrange(40)}"]),
    ]  # fmt: skip
    core.handle(client, rng.choice(messages), now_s, policy=policy)
    if rng.random() < 0.2:
        core.tick(now_s)


@pytest.mark.parametrize("seed", range(2))
def test_counters_never_fall_while_the_daemon_lives(outcome, clock, seed):
    """Whatever clients do, also when they fall silent, come again, and their policies go back in versions."""
    rng = random.Random(seed)
    core = LoggedCore(budget_bytes=6000, max_age_versions=10)
    exposition = Exposition(core.stat(0.0), clock)
    before, now_s, counted = {}, 0.0, set()
    for number in range(1, 1001):
        now_s += rng.choice([0.0, 0.1, 4.0, 70.0 if number % 50 == 0 else 1.0])
        step(rng, core, outcome, number, now_s)
        if number % 10:
            continue
        clock.now_s += 2.0
        exposition.beat()
        exposition.hand_over(core.stat(now_s))
        shown = {key: value for key, value in samples(exposition).items() if key[0].endswith("_total")}
        assert {key: (before[key], shown.get(key)) for key in before if shown.get(key, -1) < before[key]} == {}
        before = shown
        counted |= {key[0] for key, value in shown.items() if value > 0}
    assert {"mrl_exchange_refused_records_total", "mrl_exchange_evicted_records_total"} <= counted
    assert {"mrl_exchange_abandoned_deliveries_total", "mrl_exchange_flow_age_versions_total"} <= counted
