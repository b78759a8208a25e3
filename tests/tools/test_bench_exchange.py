"""The benchmark of the exchange: what it counts, and that its processes talk to each other."""

import subprocess
import sys
from subprocess import PIPE
from types import SimpleNamespace

import bench_exchange
import pytest
from bench_peers.__main__ import latencies
from bench_peers.loads import KINDS, Checklist, make_records
from bench_peers.process import Load, cpu_s
from bench_peers.trial import Figures, Size, measure

from mrl.records.codec import decode, encode
from mrl.records.experience import experience_decoder

TINY = Size({"rollout": 2, "outcome": 2}, {"rollout": 20, "outcome": 20}, 0.05, load_s=0.1, load_per_s=100.0)


@pytest.mark.parametrize(("kind", "num_bytes"), [("rollout", 37_000), ("outcome", 1_000)])
def test_records_are_valid_and_as_long_as_they_are_said_to_be(kind, num_bytes):
    """Within three percent, and taken by the exchange."""
    records = make_records(kind, "one", 3)
    bodies = [encode(record) for record in records]

    assert len(set(bodies)) == 3
    assert [decode(body, experience_decoder) for body in bodies] == records
    assert all(0.97 * num_bytes <= len(body) <= 1.03 * num_bytes for body in bodies), [*map(len, bodies)]


def test_everything_that_was_sent_ticks_the_list_off():
    """In any order."""
    checklist = Checklist("one", 3)
    records = make_records("outcome", "one", 3)
    checklist.tick_off([records[2], records[0]])
    assert checklist.num_missing == 1
    with pytest.raises(RuntimeError, match="1 records never came, one/1 among them"):
        checklist.check()
    checklist.tick_off(records[1:2])

    assert checklist.num_missing == 0
    checklist.check()


@pytest.mark.parametrize("phase", ["one", "two"])
def test_what_comes_twice_or_from_elsewhere_is_an_error(phase):
    """A benchmark that counts a record twice would be too fast."""
    checklist = Checklist("one", 2)
    checklist.tick_off(make_records("outcome", "one", 1))
    checklist.tick_off(make_records("outcome", phase, 1))

    assert checklist.num_missing == 0
    with pytest.raises(RuntimeError, match=f"{phase}/0 came twice"):
        checklist.check()


def test_a_latency_counts_from_when_the_record_was_due():
    """Two records a second from 100 s on; the first two are acknowledged at 101 s, the others at 102 s."""
    p50_s, p99_s = latencies([(2, 101.0), (4, 102.0)], 4, 2.0, 100.0)

    assert p50_s == pytest.approx(0.75)
    assert p99_s == pytest.approx(1.0)


def figures(records_per_s, p99_ms=1.0, broker_us=1.0, resident_bytes=2**28):
    """A round in which all kinds go as fast."""
    return dict.fromkeys(KINDS, Figures(records_per_s, broker_us, 2.0, 0.0, 0.5, p99_ms, resident_bytes))


def test_the_best_round_decides_and_the_median_is_told():
    """Rounds of 10, 30 and 20 against one of 10: three times as fast, twice by the median."""
    rounds = {"exchange-synced": [figures(10.0), figures(30.0), figures(20.0)], "redis-always": [figures(10.0)]}

    rollouts, *_ = bench_exchange.required_rows(rounds, [*rounds])

    assert (rollouts.value, rollouts.ratio, rollouts.ratio_of_medians, rollouts.ok) == (30.0, 3.0, 2.0, True)


@pytest.mark.parametrize(
    ("round_of", "missed"),
    [
        ({}, []),
        ({"p99_ms": 20.1}, ["p99 of acknowledgement"]),
        ({"broker_us": 126.0}, ["cores of the broker"]),
        ({"resident_bytes": 407 * 2**20}, ["resident memory"]),
    ],
)
def test_the_load_of_a_thousand_gpus_has_bounds(round_of, missed):
    """0.6 of a core, 20 ms, and 150 MiB beside the budget."""
    rounds = {"exchange-synced": [figures(4800.0, **round_of)]}

    rows = bench_exchange.required_rows(rounds, [*rounds])

    assert len(rows) == 3
    assert [row.name.rpartition(": ")[2] for row in rows if not row.ok] == missed


def test_a_ratio_that_was_not_measured_is_not_kept():
    """Redis was asked for and is not here."""
    rows = bench_exchange.required_rows({"exchange-synced": [figures(1.0)]}, ["exchange-synced", "redis-always"])

    assert (rows[0].ratio, rows[0].ok) == (None, False)


@pytest.mark.parametrize(("only", "is_refused"), [([], True), (["redis-always"], True), (["exchange"], False)])
def test_redis_is_not_measured_with_a_slow_parser(only, is_refused, monkeypatch, capsys):
    """One line, exit code 2, before anything is started; who leaves Redis out needs no hiredis."""
    for name in ("redis", "redis.utils"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(HIREDIS_AVAILABLE=False))
    present = {name: system._replace(missing="") for name, system in bench_exchange.SYSTEMS.items()}
    monkeypatch.setattr(bench_exchange, "SYSTEMS", present)
    monkeypatch.setattr("sys.argv", ["bench_exchange.py", *(["--only", *only] if only else [])])
    if not is_refused:
        assert bench_exchange.arguments().only == only
        return
    with pytest.raises(SystemExit) as end:
        bench_exchange.arguments()

    assert end.value.code == 2
    assert "pip install hiredis" in capsys.readouterr().err.splitlines()[-1]


def test_the_clock_of_a_process_is_read_from_outside():
    """It says what the process itself says, and not what this one has taken."""
    script = "import time; sum(range(3_000_000)); print(time.process_time(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=PIPE, stdout=PIPE, text=True) as process:
        said_s = float(process.stdout.readline())
        read_s = cpu_s(process.pid)
        process.communicate("\n")

    assert said_s <= read_s < said_s + 0.05


def test_what_others_took_is_the_rest_of_what_the_machine_did(monkeypatch):
    """Of two cores over two seconds, three CPU seconds were busy and two of them its own: a quarter is left."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)

    assert Load(12.0, 103.0, (3.0, 4.0)).others_since(Load(10.0, 100.0, (2.0, 3.0))) == pytest.approx(0.25)


@pytest.mark.system
@pytest.mark.parametrize("name", ["exchange-synced", "exchange-near", "redis-everysec"])
def test_a_round_goes_through_all_three_processes(name, tmp_path):
    """Both kinds of records alone, at full and at half of the rate; then both as the load."""
    if missing := bench_exchange.SYSTEMS[name].missing:
        pytest.skip(missing)
    found = measure(bench_exchange.SYSTEMS[name], TINY, tmp_path)

    assert [*found] == [*KINDS]
    for one in found.values():
        assert one.records_per_s > 0
        assert one.chain_us > one.broker_us > 0
        assert one.p99_ms >= one.p50_ms > 0
        assert one.resident_bytes > 2**20
    assert [*tmp_path.iterdir()] == []
