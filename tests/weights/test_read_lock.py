"""A version that is read is neither written over nor pruned."""

import os
import shutil
import socket
import subprocess
import sys

import pytest
import torch

from mrl.errors import WeightsError, WeightsGone
from mrl.models.memory_file import MemoryFile
from mrl.models.tensor_file import shape_of
from mrl.weights.manifest import MANIFEST
from mrl.weights.read_lock import is_read_locked, read_lock


@pytest.fixture(params=["disk", "memory"])
def version(request, tmp_path):
    """A published version with one file."""
    folder = tmp_path / "0.1"
    folder.mkdir()
    (folder / MANIFEST).touch()
    path = folder / "model.safetensors"
    if request.param == "disk":
        path.write_bytes(b"bytes")
        yield folder
        return
    file = MemoryFile("a version")
    file.lay_out([shape_of("w", torch.zeros(3))])
    path.symlink_to(file.path)
    yield folder
    file.close()


def test_who_holds_a_version_is_seen(version):
    """Until it is let go."""
    assert not is_read_locked(version)
    with read_lock(version), read_lock(version):
        assert is_read_locked(version)
    assert not is_read_locked(version)


def test_a_dead_reader_holds_nothing(version):
    """The kernel lets go of what it held; until then another process is seen to hold it."""
    script = (
        "import os, sys; from pathlib import Path; from mrl.weights.read_lock import read_lock\n"
        f"reading = read_lock(Path({str(version)!r})); reading.__enter__(); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"held\n"
        assert is_read_locked(version)
        os.kill(reader.pid, 9)

    assert not is_read_locked(version)


def test_what_was_pruned_cannot_be_held(version):
    """Nor what is written over, nor what lay in the memory of a process that has ended."""
    path = version / "model.safetensors"
    file = MemoryFile("written over")
    path.unlink()
    path.symlink_to(file.path)
    assert file.claim()
    with pytest.raises(WeightsError, match="pruned"), read_lock(version):
        pass
    file.release()
    with read_lock(version):
        assert not file.claim()
    file.close()
    for _ in range(2):
        with pytest.raises(WeightsError, match="pruned"), read_lock(version):
            pass
        shutil.rmtree(version, ignore_errors=True)


def test_memory_that_is_not_to_be_seen_is_told_from_what_was_pruned(tmp_path):
    """As in a container with processes of its own: the folder is there, and what it links to is not; with the key."""
    (tmp_path / "model.safetensors").symlink_to("/proc/1/fd/1000000")
    with (
        pytest.raises(WeightsError, match=r'cannot be accessed from this process; .*rollout\.weights_in = "disk"'),
        read_lock(tmp_path),
    ):
        pass


def test_a_link_to_what_is_no_file_any_more_ends_nobody(tmp_path):
    """Of a former life, whose process id is another process by now: a socket has no bytes to read or to lock."""
    with socket.socket() as other:
        (tmp_path / "model.safetensors").symlink_to(f"/proc/{os.getpid()}/fd/{other.fileno()}")
        assert not is_read_locked(tmp_path)
        with pytest.raises(WeightsError, match="cannot be read"), read_lock(tmp_path):
            pass


def test_a_version_without_its_manifest_is_on_its_way_out(version):
    """It is removed first: what else is there need not be all of it."""
    (version / MANIFEST).unlink()
    with pytest.raises(WeightsGone, match="pruned"), read_lock(version):
        pass
    assert not is_read_locked(version)


def test_what_goes_while_it_is_read_is_told_from_what_cannot_be_read(version):
    """A learner at its end waits for no reader, who opens the files by their names."""

    def read(reason: str, *, goes: bool = False) -> None:
        with read_lock(version):
            if goes:
                shutil.rmtree(version)
            raise WeightsError(reason)

    with pytest.raises(WeightsError, match="torn") as caught:
        read("torn")
    assert not isinstance(caught.value, WeightsGone)
    with pytest.raises(WeightsGone, match="pruned"):
        read("no such file", goes=True)
