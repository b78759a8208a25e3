"""The account of the daemon as Prometheus metrics."""

import random

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mrl.exchange.metrics import MAX_PAIRS, SILENCE_S, STORAGE_STATES, ExchangeCollector
from mrl.records.exchange_messages import (
    Announce,
    Barrier,
    Done,
    Fetch,
    Hello,
    PairFlow,
    Subscribe,
)
from mrl.records.version import Version
from tests.support.stored_core import StoredCore, put_message


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
    core = StoredCore(max_age_versions=5)
    for policy in ("qwen", "llama"):
        core.handle(policy.encode(), Hello(client=policy, policy=policy), 0.0)
    core.handle(b"qwen", put_message(outcome("r1"), outcome("r2", prompt_id="p2", step=3), seq=1), 0.0)
    core.handle(b"qwen", put_message(outcome("r1"), seq=2), 0.0)
    core.handle(b"qwen", put_message(request_for("llama", "q1", step=3), seq=3), 0.0)
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
    return msgspec.structs.replace(stat, file_bytes=500, commits=4, commit_s=0.5, undelivered=2, later=7)


def text_of(collector):
    """What Prometheus is sent."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry).decode()


def samples(collector):
    """(name, labels in the order of their names) -> value of everything that is shown."""
    families = text_string_to_metric_families(text_of(collector))
    return {
        (sample.name, *(label for _, label in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_every_number_of_the_account_is_shown(stat, clock):
    """Each under its name and labels, and as Prometheus itself would read it."""
    shown = samples(ExchangeCollector(stat, clock))
    expected = {
        ("mrl_exchange_healthy",): 1,
        ("mrl_exchange_info", "one"): 1,
        ("mrl_exchange_storage_state", "well"): 1,
        ("mrl_exchange_storage_state", "disk_full"): 0,
        ("mrl_exchange_storage_state", "locked"): 0,
        ("mrl_exchange_uptime_seconds",): 9,
        ("mrl_exchange_budget_bytes",): 1_000_000,
        ("mrl_exchange_used_bytes",): stat.used_bytes,
        ("mrl_exchange_clients",): 2,
        ("mrl_exchange_silent_clients",): 2,
        ("mrl_exchange_unserved_requests",): 1,
        ("mrl_exchange_undelivered_messages_total",): 2,
        ("mrl_exchange_dropped_input_total", "record"): 3,
        ("mrl_exchange_file_bytes",): 500,
        ("mrl_exchange_commits_total",): 4,
        ("mrl_exchange_commit_seconds_total",): 0.5,
        ("mrl_exchange_later_puts_total",): 7,
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
    }
    assert {key: shown.get(key) for key in expected} == expected
    assert ("mrl_exchange_newest_step", "llama") not in shown  # nothing was announced
    assert shown["mrl_exchange_flow_bytes_total", "llama", "qwen"] > 100


def test_no_series_is_shown_twice_and_every_name_is_of_the_exchange(stat, clock):
    """Counters end in _total; nothing of the process or of Python is mixed in."""
    text = text_of(ExchangeCollector(stat, clock))
    names = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(names) == len(set(names)) > 40
    assert all(name.startswith("mrl_exchange_") for name in names)
    counters = [line.split()[2] for line in text.splitlines() if line.endswith(" counter")]
    assert len(counters) >= 14
    assert all(name.endswith("_total") for name in counters)


def test_names_that_clients_choose_cannot_forge_a_line(stat, clock):
    """A reason comes from this program, a policy's name from a configuration; both are escaped."""
    name = 'a"} 1\nmrl_exchange_healthy 0\n\\'
    policy_stat = msgspec.structs.replace(stat.policies[0], policy=name, prompts=5)
    shown = samples(ExchangeCollector(msgspec.structs.replace(stat, policies=[policy_stat]), clock))
    assert shown["mrl_exchange_prompts", name] == 5
    assert shown["mrl_exchange_healthy",] == 1


def test_the_pairs_shown_are_bounded(stat, clock):
    """The first ones in the order of names; how many are left out is said."""
    numbers = {"asked": 1, "hits": 1, "records": 1, "bytes": 1, "mean_age_versions": 0.0}
    flows = [PairFlow(source=f"s{n:05}", receiver="r", **numbers) for n in range(MAX_PAIRS + 7)]
    shown = samples(ExchangeCollector(msgspec.structs.replace(stat, flows=flows), clock))
    records = [key for key in shown if key[0] == "mrl_exchange_flow_records_total"]
    assert records[0][1:] == ("r", "s00000")
    assert len(records) == MAX_PAIRS
    assert shown["mrl_exchange_flow_pairs_left_out",] == 7


def test_health_follows_storage_and_the_loop(stat, clock):
    """Storage that fails, and a loop that stands still; each ends by itself."""
    collector = ExchangeCollector(stat, clock)

    def is_healthy():
        return samples(collector)["mrl_exchange_healthy",] == 1

    assert is_healthy()
    for storage in ("disk_full", "locked"):
        collector.hand_over(msgspec.structs.replace(stat, storage=storage))
        shown = samples(collector)
        assert shown["mrl_exchange_healthy",] == 0
        assert [state for state in STORAGE_STATES if shown["mrl_exchange_storage_state", state]] == [storage]
    collector.hand_over(stat)
    clock.now_s += SILENCE_S
    assert is_healthy()
    clock.now_s += 1.0
    assert (is_healthy(), samples(collector)["mrl_exchange_loop_silence_seconds",]) == (False, SILENCE_S + 1)
    collector.beat()
    assert is_healthy()


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
        Subscribe(client="c", kinds=["score_request"]),
        Done(client="c", deliveries=[rng.randrange(40)]),
    ]  # fmt: skip
    core.handle(client, rng.choice(messages), now_s, policy=policy)
    if rng.random() < 0.2:
        core.tick(now_s)


@pytest.mark.parametrize("seed", range(2))
def test_counters_never_fall_while_the_daemon_lives(outcome, clock, seed):
    """Whatever clients do, also when they fall silent, come again, and their policies go back in versions."""
    rng = random.Random(seed)
    core = StoredCore(budget_bytes=8000, max_age_versions=10)
    collector = ExchangeCollector(core.stat(0.0), clock)
    before, now_s, counted = {}, 0.0, set()
    for number in range(1, 1001):
        now_s += rng.choice([0.0, 0.1, 4.0, 70.0 if number % 50 == 0 else 1.0])
        step(rng, core, outcome, number, now_s)
        if number % 10:
            continue
        clock.now_s += 2.0
        collector.beat()
        collector.hand_over(core.stat(now_s))
        shown = {key: value for key, value in samples(collector).items() if key[0].endswith("_total")}
        assert {key: (before[key], shown.get(key)) for key in before if shown.get(key, -1) < before[key]} == {}
        before = shown
        counted |= {key[0] for key, value in shown.items() if value > 0}
    assert {"mrl_exchange_refused_records_total", "mrl_exchange_evicted_records_total"} <= counted
    assert {"mrl_exchange_abandoned_deliveries_total", "mrl_exchange_flow_age_versions_total"} <= counted
