"""Numbers of allocators: they only grow, and belong to one run."""

import shutil
from pathlib import Path

import pytest

from mrl.allocation.meter import ONLY_TYPE
from mrl.config.run_folder import RunFolder, dump_config, write_json
from mrl.config.schema import RunConfig
from mrl.config.unit_names import parse_units
from mrl.errors import RunFolderError
from mrl.processes.allocator_state import MAX_LIFE, new_allocator_state
from mrl.processes.unit_allocator import life_of, unit_rule
from mrl.records.codec import decode, encode
from mrl.records.unit_messages import NodeOrders, UnitOrder, node_orders_decoder
from mrl.transport.keys import create_keys, load_keys

KEY = "k" * 40
ONE, TWO = {ONLY_TYPE: 1}, {ONLY_TYPE: 2}


def run_of_units(path: Path) -> tuple[RunConfig, RunFolder]:
    """A run folder with keys, as the supervisor makes it."""
    tables = {
        "run": {"name": path.name, "folder": str(path.parent), "steps": 2},
        "tasks": {"spell": {"source": "words", "dataset": "spell_backward"}},
        "policies": {name: {"model": name, "device": "cpu"} for name in ("qwen", "llama")},
        "allocation": {"units": ["cpu:0", "cpu:1"], "slots": 16},
    }
    config, folder = RunConfig.model_validate(tables), RunFolder(path)
    create_keys(folder.keys)
    write_json(folder.config_json, dump_config(config))
    return config, folder


def test_every_allocator_of_a_run_has_a_number_of_its_own(tmp_path: Path) -> None:
    """Larger than those before it."""
    assert [new_allocator_state(tmp_path / "allocator.json", KEY).number for _ in range(3)] == [1, 2, 3]


DAMAGED = [
    b"",
    b"{",
    b'{"life": 2}',
    b'{"life": 0, "run_key": "k"}',
    b'{"life": "2", "run_key": "k"}',
    b'{"life": 2, "run_key": "k", "run": "other"}',
    b'{"life": 2, "run_key": "\xff"}',
    b'{"life": 2, "run_key": "k", "switch_s": {"qwen": -1}}',
    b'{"life": %d, "run_key": "k"}' % (MAX_LIFE + 1),
]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_count_that_cannot_be_read_is_one_clear_line(tmp_path: Path, content: bytes) -> None:
    """Beginning again at 1 could use epochs that are in use."""
    (tmp_path / "allocator.json").write_bytes(content)
    with pytest.raises(
        RunFolderError, match=r"allocator.json: cannot read or write the number of allocators so far"
    ) as raised:
        new_allocator_state(tmp_path / "allocator.json", KEY)
    assert "\n" not in str(raised.value)
    assert "cure: delete this file while the run is not running" in str(raised.value)
    assert (tmp_path / "allocator.json").read_bytes() == content


def test_the_count_of_another_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    """Its number may be smaller than those that this run has used: a unit could get two owners."""
    _, folder = run_of_units(tmp_path / "one")
    _, other = run_of_units(tmp_path / "other")
    for _ in range(3):
        life_of(folder)
    life_of(other)
    file = folder.path / "allocator.json"
    shutil.copy(other.path / "allocator.json", file)
    foreign = file.read_bytes()
    with pytest.raises(RunFolderError) as raised:
        life_of(folder)
    line = str(raised.value)
    assert line.startswith(f"{file}: the file belongs to another run")
    assert f"got {load_keys(other.keys).server_public[:8].decode()!r}" in line
    assert f"wanted {load_keys(folder.keys).server_public[:8].decode()!r}" in line
    assert "cure: delete this file while the run is not running" in line
    assert "\n" not in line
    assert file.read_bytes() == foreign


def test_a_run_that_was_moved_or_resumed_keeps_its_count(tmp_path: Path) -> None:
    """Its keys move with it."""
    life_of(run_of_units(tmp_path / "one")[1])
    (tmp_path / "one").rename(tmp_path / "moved")
    _, folder = run_of_units(tmp_path / "moved")
    life_of(folder)
    assert b'"life":2,' in (folder.path / "allocator.json").read_bytes()


def test_the_last_number_has_epochs_that_can_be_sent() -> None:
    """Of a whole life, all but one."""
    epoch = (MAX_LIFE + 1) * 2**32 + 2**32 - 1
    orders = NodeOrders(life=MAX_LIFE + 1, orders=[UnitOrder(unit="cpu:0", epoch=epoch, kind="end")])
    assert decode(encode(orders), node_orders_decoder) == orders


def test_the_next_allocator_knows_how_long_switching_takes(tmp_path: Path) -> None:
    """It would else move engines that need minutes to start every few seconds, until it has measured them anew."""
    config, folder = run_of_units(tmp_path / "one")
    units = parse_units(config.allocation.units)
    life = life_of(folder)
    rule = unit_rule(config, units, life.switch_s, 0.0)
    rule.add_switch("qwen", 40.0)
    life.keep(rule.switch_s)
    again = life_of(folder)
    assert again.number == 2
    assert unit_rule(config, units, again.switch_s, 0.0).switch_s == {"qwen": 40.0}


def test_what_cannot_be_kept_costs_no_allocator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: the count stays, nothing half-written; it is tried again with what is measured next."""
    life = new_allocator_state(tmp_path / "allocator.json", KEY)
    with monkeypatch.context() as full:
        full.setattr("os.replace", raise_full)
        life.keep({"qwen": 3.0})
    assert new_allocator_state(tmp_path / "allocator.json", KEY).switch_s == {}
    life.keep({"qwen": 4.0})
    assert [file.name for file in tmp_path.iterdir()] == ["allocator.json"]
    assert new_allocator_state(tmp_path / "allocator.json", KEY).switch_s == {"qwen": 4.0}


def raise_full(_source: str, _target: Path) -> None:
    """As a disk without room does."""
    raise OSError(28, "No space left on device")
