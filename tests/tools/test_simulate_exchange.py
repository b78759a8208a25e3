"""The exchange in simulated time: when things happen, what they cost, and what comes of it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import simulate_exchange
from exchange_simulation.crowd import success
from exchange_simulation.events import Events
from exchange_simulation.picture import draw
from exchange_simulation.settings import full, quick, rates
from exchange_simulation.station import MIB, Costs, Station
from exchange_simulation.trial import Setting, World, simulate
from logged_core import packed_message

from mrl.records.codec import decode, encode
from mrl.records.exchange_messages import Hello, Ping, PutAck, Welcome, daemon_message_decoder
from mrl.records.version import Version

SLOW = Costs(message_us=1000.0, put_us=0.0, sync_ms=5.0, local_ms=2.0, tick_session_us=0.0)
TINY = Setting(4, 400, simulated_s=2.0)


def test_events_happen_in_their_order_and_once():
    """By time, then by when they were made; nothing beyond the end."""
    events, seen = Events(), []
    events.after(2.0, lambda: seen.append(("late", events.now_s)))
    events.after(1.0, lambda: seen.append(("first", events.now_s)))
    events.after(1.0, lambda: events.after(0.5, lambda: seen.append(("made then", events.now_s))))
    events.every(0.75, lambda: seen.append(("again", events.now_s)), first_s=0.25)
    events.run_until(1.75)
    events.run_until(1.8)
    assert seen == [("again", 0.25), ("first", 1.0), ("again", 1.0), ("made then", 1.5), ("again", 1.75)]
    assert events.now_s == 1.8


@pytest.fixture
def station():
    """A daemon whose processor needs a millisecond per message, and a line to it; what it says, with the times."""
    events, heard = Events(), []
    station = Station(events, SLOW, name="one", budget_bytes=MIB)

    def hear(body, _):
        heard.append((round(1e3 * events.now_s, 6), decode(body, daemon_message_decoder)))

    return events, station, station.connect("worker/qwen/0", hear, is_remote=False), heard


def test_messages_queue_for_the_processor_and_take_their_way(station):
    """2 ms there, 1 ms for each message and each answer, one after the other, 2 ms back."""
    events, one, post, heard = station
    post(encode(Hello(client="worker/qwen/0", policy="qwen")))
    post(encode(Ping(client="worker/qwen/0")))
    events.run_until(0.02)
    assert [(at_ms, type(message)) for at_ms, message in heard] == [(6.0, Welcome), (8.0, Welcome)]
    assert one.busy_s == pytest.approx(0.004)
    assert one.behind_s == 0.0


def test_a_put_is_acknowledged_when_the_disk_has_it_and_the_next_ones_go_together(station):
    """The second and third come while the disk is busy: one commit for both."""
    events, _, post, heard = station
    post(encode(Hello(client="worker/qwen/0", policy="qwen")))
    for seq in (1, 2, 3):
        post(encode(packed_message(record(f"r{seq}"), seq=seq)))
    events.run_until(0.045)
    acknowledged = {message.seq: at_ms for at_ms, message in heard if isinstance(message, PutAck)}
    assert list(acknowledged) == [1, 2, 3]
    assert acknowledged[1] == pytest.approx(2 + 3 + 5 + 1 + 2, abs=0.1)  # there, Hello and Put, disk, answer, back
    assert acknowledged[2] == pytest.approx(acknowledged[1] + 5, abs=0.1)
    assert acknowledged[3] == pytest.approx(acknowledged[2] + 1, abs=0.1)


def record(record_id):
    """A success of qwen."""
    return success("qwen", "p1", Version(0, 0), record_id=record_id, now_s=0.0)


@pytest.mark.thorough
def test_a_simulation_happens_the_same_way_every_time():
    """All but what was measured on this machine; another seed makes another one."""
    outcomes = [simulate(TINY, Costs(), budget_mib=8, seed=seed) for seed in (1, 1, 2)]
    first, second, other = (replace(one, core_us={}, took_s=0.0, stat_ms=0.0) for one in outcomes)
    assert first == second
    assert first != other


@pytest.mark.thorough
def test_a_daemon_that_keeps_up_stores_everything_and_is_as_busy_as_its_work():
    """What comes is stored; the budget holds; the processor's share follows from the cost of a record."""
    cheap, dear = (simulate(TINY, Costs(put_us=put_us), budget_mib=8) for put_us in (0.0, 1000.0))
    assert cheap.stored_per_s == pytest.approx(400, rel=0.1)
    assert cheap.delivered_per_s > 10
    assert (cheap.lost, cheap.evicted) == (0, 0)
    assert 0 < cheap.held_mib[0] <= cheap.held_mib[1] <= 8
    assert cheap.latency_ms[0] < cheap.latency_ms[1] < 10
    assert dear.busy - cheap.busy == pytest.approx(0.001 * 400, rel=0.1)


@pytest.mark.thorough
def test_a_daemon_with_too_much_to_do_falls_behind_and_evicts_what_does_not_fit():
    """Seconds late instead of milliseconds, and never over the budget."""
    late = simulate(TINY, Costs(put_us=5000.0), budget_mib=8)
    full = simulate(TINY, Costs(), budget_mib=1)
    assert late.busy > 0.99
    assert late.behind_s > 0.3
    assert late.stored_per_s < 250
    assert full.evicted > 0
    assert full.held_mib[1] <= 1


@pytest.mark.thorough
def test_shards_share_the_work():
    """Each of four has about a quarter, and together they store the same."""
    one, four = (
        simulate(Setting(4, 2000, shards, simulated_s=1.0), Costs(message_us=0, tick_session_us=0), budget_mib=8)
        for shards in (1, 4)
    )
    assert four.stored_per_s == pytest.approx(one.stored_per_s, rel=0.02)
    assert 0.2 * one.busy < four.busy < 0.4 * one.busy
    assert 0.2 * one.held_mib[1] < four.held_mib[1] < 0.4 * one.held_mib[1]


@pytest.mark.thorough
@pytest.mark.parametrize("shards", [1, 2])
def test_forwarders_carry_each_record_to_every_other_site_once(shards):
    """Both sites end up with the records of both, and nothing goes in a circle."""
    setting = Setting(4, 400, shards, sites=2, topology="forwarded", simulated_s=2.0)
    world = World(setting, Costs(), budget_mib=8, seed=1)
    world.events.run_until(1.5)
    held = [
        {entry.tags.record_id for station in site for entry in station.core.shelf.entries()} for site in world.sites
    ]
    counts = world.counts()
    assert len(held[0] & held[1]) > 400
    assert len(held[0] ^ held[1]) < 0.2 * len(held[0])  # still on their way
    assert counts["forwarded stored"] <= counts["stored"]
    assert counts["forwarded refused/duplicate"] == 0
    newest = world.sites[1][0].core.memory.versions.newest
    assert newest["p0000"].step > 0  # lives on the first site


@pytest.mark.thorough
def test_what_a_site_far_away_publishes_arrives_later():
    """By the delay between sites: with a daemon of its own a site hears its own policies at once."""
    central, forwarded = (
        simulate(Setting(12, 1200, sites=2, topology=topology, simulated_s=2.0), Costs(remote_ms=100), budget_mib=8)
        for topology in ("central", "forwarded")
    )
    assert central.latency_ms[1] > 200
    assert forwarded.latency_ms[1] < 200
    assert central.remote_mib_s > 0
    assert forwarded.remote_mib_s > 0


@pytest.mark.thorough
def test_the_tool_prints_a_table_and_ends_with_json(tmp_path):
    """Every row of it bounded or not, and exit code 0 when the bounds are kept."""
    tool = Path(simulate_exchange.__file__)
    done = subprocess.run(
        [sys.executable, str(tool), "--quick", "--out", str(tmp_path / "a.png")],
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    names = [row["name"] for row in told["rows"]]
    assert told["bench"] == "exchange_simulation"
    assert sum("held by one daemon" in name for name in names) == len(quick())
    assert all(set(row) == {"name", "value", "unit", "against", "ratio", "required", "ok"} for row in told["rows"])
    assert "delivered/s" in done.stdout


def test_a_missed_bound_is_said(monkeypatch, capsys):
    """Exit code 1, and which one."""
    monkeypatch.setattr(sys, "argv", ["simulate_exchange.py", "--only", "shards"])
    monkeypatch.setattr(simulate_exchange.settings, "shards", lambda: [TINY])
    monkeypatch.setattr(simulate_exchange, "SWEEPS", {"shards": lambda: [TINY]})
    monkeypatch.setattr(simulate_exchange, "MAX_BUSY", 1e-6)
    assert simulate_exchange.main() == 1
    assert "MISSED: 4 policies, 400/s, 1 shard: busiest daemon is" in capsys.readouterr().out


@pytest.mark.thorough
def test_the_figure_has_a_row_per_sweep(tmp_path):
    """Nothing is drawn of settings that are in none."""
    outcome = simulate(TINY, Costs(), budget_mib=8)
    outcomes = [replace(outcome, setting=setting) for setting in rates()]
    assert not draw([outcome], tmp_path / "none.png")
    assert draw(outcomes, tmp_path / "some.png")
    assert draw([*outcomes, replace(outcome, setting=full()[-5])], tmp_path / "more.png")
    sizes = [(tmp_path / name).stat().st_size for name in ("some.png", "more.png")]
    assert sizes[0] < sizes[1]
