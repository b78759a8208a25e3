"""Numbers of allocators: they only grow, and belong to one run."""

import shutil
from pathlib import Path

import pytest

from mrl.config.run_folder import RunFolder, dump_config, write_json
from mrl.config.schema import RunConfig
from mrl.errors import RunFolderError
from mrl.records.codec import decode, encode
from mrl.records.units import NodeOrders, UnitOrder, node_orders_decoder
from mrl.roles.allocator_life import MAX_LIFE, next_life
from mrl.roles.unit_allocator import unit_core
from mrl.transport.keys import create_keys, load_keys

KEY = "k" * 40


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
    assert [next_life(tmp_path / "allocator.json", KEY) for _ in range(3)] == [1, 2, 3]


DAMAGED = [
    b"",
    b"{",
    b'{"life": 0}',
    b'{"life": "2"}',
    b'{"life": 2, "run": "other"}',
    b'{"life": 2, "run_key": "\xff"}',
    b'{"life": %d}' % (MAX_LIFE + 1),
]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_count_that_cannot_be_read_is_one_clear_line(tmp_path: Path, content: bytes) -> None:
    """Beginning again at 1 could use epochs that are in use."""
    (tmp_path / "allocator.json").write_bytes(content)
    with pytest.raises(RunFolderError, match=r"allocator.json: the count of allocators cannot be kept") as raised:
        next_life(tmp_path / "allocator.json", KEY)
    assert "\n" not in str(raised.value)
    assert "cure: delete it while the run is ended" in str(raised.value)
    assert (tmp_path / "allocator.json").read_bytes() == content


def test_a_count_that_names_no_run_is_taken_for_this_runs(tmp_path: Path) -> None:
    """And names it from then on."""
    file = tmp_path / "allocator.json"
    file.write_text('{"life": 6}')
    assert next_life(file, KEY) == 7
    with pytest.raises(RunFolderError):
        next_life(file, KEY.upper())
    assert next_life(file, KEY) == 8


def test_the_count_of_another_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    """Its number may be smaller than those that this run has used: a unit could get two owners."""
    config, folder = run_of_units(tmp_path / "one")
    other_config, other = run_of_units(tmp_path / "other")
    for _ in range(3):
        unit_core(config, folder, 0.0)
    unit_core(other_config, other, 0.0)
    file = folder.path / "allocator.json"
    shutil.copy(other.path / "allocator.json", file)
    foreign = file.read_bytes()
    with pytest.raises(RunFolderError) as raised:
        unit_core(config, folder, 0.0)
    line = str(raised.value)
    assert line.startswith(f"{file}: counts the allocators of another run")
    assert f"got {load_keys(other.keys).server_public[:8].decode()!r}" in line
    assert f"wanted {load_keys(folder.keys).server_public[:8].decode()!r}" in line
    assert "cure: delete it while the run is ended" in line
    assert "\n" not in line
    assert file.read_bytes() == foreign


def test_a_run_that_was_moved_or_resumed_keeps_its_count(tmp_path: Path) -> None:
    """Its keys move with it."""
    unit_core(*run_of_units(tmp_path / "one"), 0.0)
    (tmp_path / "one").rename(tmp_path / "moved")
    config, folder = run_of_units(tmp_path / "moved")
    unit_core(config, folder, 0.0)
    assert b'"life":2,' in (folder.path / "allocator.json").read_bytes()


def test_the_last_number_has_epochs_that_can_be_sent() -> None:
    """Of a whole life, all but one."""
    epoch = (MAX_LIFE + 1) * 2**32 + 2**32 - 1
    orders = NodeOrders(life=MAX_LIFE + 1, orders=[UnitOrder(unit="cpu:0", epoch=epoch, kind="end")])
    assert decode(encode(orders), node_orders_decoder) == orders
