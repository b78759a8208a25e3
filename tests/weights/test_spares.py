"""Files of pruned versions are written over, and never under a reader or another name."""

import fcntl
import os
import subprocess
import sys

import pytest

from mrl.errors import WeightsError
from mrl.weights.spares import Spares, hold, is_held

OLD, NEW = b"old bytes", b"new"


@pytest.fixture
def version(tmp_path):
    """A published version with one file."""
    folder = tmp_path / "0.1"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(OLD)
    return folder


def write_over(spares, path):
    """The next version; returns the number of the file that holds it."""
    with spares.open(path) as file:
        file.write(NEW)
    assert path.read_bytes() == NEW
    return path.stat().st_ino


def test_a_pruned_file_is_used_again_and_cut_to_its_new_length(tmp_path, version):
    """It is the same file, with nothing of the old bytes."""
    spares = Spares(tmp_path / ".spares")
    number = (version / "model.safetensors").stat().st_ino
    spares.keep(version)

    assert write_over(spares, tmp_path / "next") == number
    assert write_over(spares, tmp_path / "after") != number


def test_a_file_with_another_name_is_left_alone(tmp_path, version):
    """As a copy by a hard link has one."""
    spares = Spares(tmp_path / ".spares")
    os.link(version / "model.safetensors", tmp_path / "kept")
    spares.keep(version)
    write_over(spares, tmp_path / "next")

    assert (tmp_path / "kept").read_bytes() == OLD


def test_a_held_file_is_left_alone_until_it_is_let_go(tmp_path, version):
    """The reader sees the old bytes to its end."""
    spares = Spares(tmp_path / ".spares")
    with (version / "model.safetensors").open("rb") as reader, hold(version):
        spares.keep(version)
        number = os.fstat(reader.fileno()).st_ino
        assert write_over(spares, tmp_path / "next") != number
        assert reader.read() == OLD


def test_who_holds_a_version_is_seen(version):
    """Until it is let go."""
    assert not is_held(version)
    with hold(version), hold(version):
        assert is_held(version)
    assert not is_held(version)


def test_a_dead_reader_holds_nothing(tmp_path, version):
    """The kernel lets go of what it held."""
    spares = Spares(tmp_path / ".spares")
    number = (version / "model.safetensors").stat().st_ino
    held = f"from mrl.weights.spares import hold; from pathlib import Path; hold(Path({str(version)!r})).__enter__()"
    subprocess.run([sys.executable, "-c", f"{held}; import os; os.kill(os.getpid(), 9)"], check=False)
    spares.keep(version)

    assert write_over(spares, tmp_path / "next") == number


def test_what_was_pruned_cannot_be_held(tmp_path, version):
    """Neither when its folder has gone, nor when another version is being written over its file."""
    with version.joinpath("model.safetensors").open("r+b") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        with pytest.raises(WeightsError, match="pruned"), hold(version):
            pass
    Spares(tmp_path / ".spares").keep(version)
    version.rmdir()

    with pytest.raises(WeightsError, match="pruned"), hold(version):
        pass
