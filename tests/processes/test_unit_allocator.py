"""The loop of the allocator of units: who may say what, what it writes down."""

import json
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from mrl.allocation.unit_core import TypeShare, UnitShare
from mrl.allocation.unit_leases import LeaseCounts, Transition, UnitState
from mrl.config.run_folder import RunFolder, create_run_folder
from mrl.config.schema import RunConfig
from mrl.errors import DeviceError
from mrl.metrics.telemetry import Telemetry
from mrl.processes import unit_allocator
from mrl.processes.unit_allocator import (
    _check_served,
    _lines,
    _tell,
    _tell_idle,
    life_of,
    serve_units,
    unit_core,
)
from mrl.records.leases import LeaseGrant, LeaseRequest
from mrl.records.telemetry_messages import MetricsRecord, TelemetryRecord
from mrl.records.unit_messages import NodeReport, UnitReport
from mrl.transport.keys import RunKeys, create_keys
from mrl.transport.server import ServerSocket
from tests.support.word_runs import word_run


def test_transitions_are_written_one_a_line_with_the_time_of_day() -> None:
    [line] = _lines([Transition(0.0, "cpu:0", 7, "a", UnitState.GRANTED, "wanted")], {"cpu:0": "slow"})
    row = json.loads(line)
    assert row.pop("time_unix_s") > 0
    assert row == {"unit": "cpu:0", "type": "slow", "epoch": 7, "policy": "a", "state": "granted", "why": "wanted"}


def run_of_one_unit(path: Path, **launch: object) -> tuple[RunConfig, RunFolder, RunKeys]:
    """One policy."""
    run = {"folder": str(path), "min_free_mib": 0}
    config = word_run({"qwen": {}}, run=run, allocation={"units": ["cpu:0"]}, launch=launch)
    folder = create_run_folder(config)
    return config, folder, create_keys(folder.keys)


@pytest.mark.parametrize(("launch", "bound_s"), [({}, 600.0), ({"hosts_join": True, "join_s": 900.0}, 900.0)])
def test_a_policy_whose_units_all_fail_ends_the_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: dict[str, object], bound_s: float
) -> None:
    """After ten minutes, or when hosts that join by themselves would not be awaited any longer. The loop looks."""
    config, folder, keys = run_of_one_unit(tmp_path, **launch)
    core = unit_core(config, life_of(folder), 0.0)
    unit = UnitReport(unit="cpu:0", epoch=0, failed_policy="qwen", cleared_epoch=2**50)
    for turn in range(round(bound_s) + 2):
        core.handle(
            NodeReport(host="", life=core.orders(NodeReport(host="", life=0, units=[])).life, units=[unit]), turn
        )
        core.tick(float(turn))
        if turn < bound_s:
            _check_served(core, float(turn))
    with pytest.raises(DeviceError, match=r"^no unit can serve qwen any more: .* cure: see crash/") as caught:
        _check_served(core, bound_s + 2.0)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(unit_allocator, "unit_core", lambda *_: core)
    core._settings = replace(core._settings, unserved_s=-1.0)  # whatever the clock of this machine shows
    telemetry, stop = Telemetry("allocator", "", lambda _: True), threading.Event()
    with closing(ServerSocket(keys)) as server, pytest.raises(DeviceError):
        serve_units(config, folder, server, telemetry, stop)


def test_the_start_of_an_engine_begins_with_its_first_turn(tmp_path: Path) -> None:
    """Before that its worker may say for however long that it waits; only then is its silence bounded, and timed."""
    config, folder, _ = run_of_one_unit(tmp_path)
    core = unit_core(config, life_of(folder), 0.0)
    life, row = core.orders(NodeReport(host="", life=0, units=[])).life, core.table.rows["cpu:0"]
    core.handle(NodeReport(host="", life=life, units=[UnitReport(unit="cpu:0", epoch=0, cleared_epoch=2**50)]), 0.0)

    def pass_to(now_s: float, *, awaits_turn: bool | None) -> list[int]:
        """A second later: the slots that its worker has where it speaks."""
        core.tick(now_s)
        unit = UnitReport(unit="cpu:0", epoch=row.epoch, resident_epoch=row.epoch, resident_policy="qwen")
        core.handle(NodeReport(host="", life=life, units=[unit]), now_s)
        if awaits_turn is None:
            return []
        asked = LeaseRequest(
            holder="worker/qwen/0", policy="qwen", generated_tokens=0, slot_seconds=0.0, epoch=0,
            unit="cpu:0", unit_epoch=row.epoch, awaits_turn=awaits_turn,
        )  # fmt: skip
        return [reply.slots for reply in core.handle(asked, now_s) if isinstance(reply, LeaseGrant)]

    waited = [pass_to(float(now_s), awaits_turn=True) for now_s in range(1, 700)]
    assert waited == [[0]] * 699
    assert row.state is UnitState.GRANTED
    assert core.table.silent(999.0, ttl_s=10.0, start_s=300.0) == []
    assert core.table.silent(1000.0, ttl_s=10.0, start_s=300.0) == [row]
    for now_s in range(700, 720):
        pass_to(float(now_s), awaits_turn=None)
    assert pass_to(720.0, awaits_turn=False) != [0]
    assert row.state is UnitState.ACTIVE
    assert core.rule.switch_s == {"qwen": pytest.approx(21.0)}


def test_the_loop_hands_on_how_long_switching_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the next allocator, in `allocator.json`."""
    config, folder, keys = run_of_one_unit(tmp_path)
    core = unit_core(config, life_of(folder), 0.0)
    core.rule.add_switch("qwen", 7.0)
    core._settings = replace(core._settings, unserved_s=-1.0)  # ends the loop after its first turn
    monkeypatch.setattr(unit_allocator, "unit_core", lambda *_: core)
    telemetry, stop = Telemetry("allocator", "", lambda _: True), threading.Event()
    with closing(ServerSocket(keys)) as server, pytest.raises(DeviceError):
        serve_units(config, folder, server, telemetry, stop)
    assert life_of(folder).switch_s == {"qwen": 7.0}


ENDED = (UnitState.GRANTED, UnitState.CLEARING)


def told(records: list[TelemetryRecord]) -> list[tuple[str, dict[str, float]]]:
    return [(record.policy, record.values) for record in records if isinstance(record, MetricsRecord)]


def test_leases_are_told_with_the_reasons_why_they_ended() -> None:
    """Each policy's own."""
    records: list[TelemetryRecord] = []
    counts = LeaseCounts()
    counts.add(Transition(0.0, "cpu:0", 7, "a", state, "its engine is gone") for state in ENDED)
    shares = [UnitShare(policy, 2, 1, 1.5, 0.9, 4) for policy in "ab"]
    _tell(Telemetry("allocator", "", records.append), shares, counts)
    (first, a), (second, b) = told(records)
    assert (first, second) == ("a", "b")
    assert (a["allocation/begun_leases"], a["allocation/ended_leases/its_engine_is_gone"]) == (1, 1)
    assert (b["allocation/begun_leases"], "allocation/ended_leases/its_engine_is_gone" in b) == (0, False)


def test_units_of_several_types_are_told_apart_whatever_a_driver_calls_them() -> None:
    records: list[TelemetryRecord] = []
    share = UnitShare("a", 2, 1, 1.5, 0.9, 4, {"NVIDIA A10/24 GB": TypeShare(2, 1, 350.0)})
    _tell(Telemetry("allocator", "", records.append), [share], LeaseCounts())
    [(_, values)] = told(records)
    found = {name: value for name, value in values.items() if name.endswith("A10:24 GB")}
    assert found == {
        "allocation/target_units/NVIDIA A10:24 GB": 2,
        "allocation/held_units/NVIDIA A10:24 GB": 1,
        "allocation/unit_tokens_per_s/NVIDIA A10:24 GB": 350.0,
    }


@pytest.mark.parametrize("num_units", [0, 3, 1200])
def test_idle_shares_are_told_of_every_unit_whatever_its_name(num_units: int) -> None:
    """A record holds a thousand values at most."""
    records: list[TelemetryRecord] = []
    shares = {f"node-{number}/gpu:0,1": number / 2000 for number in range(num_units)}
    _tell_idle(Telemetry("allocator", "", records.append), 3, shares)
    found = {name: value for _, values in told(records) for name, value in values.items()}
    assert found == {f"allocation/idle_share/node-{number}:gpu:0,1": number / 2000 for number in range(num_units)}
    assert all(len(values) <= 1000 for _, values in told(records))
