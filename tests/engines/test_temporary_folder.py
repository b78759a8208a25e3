"""Temporary folders of servers: one's own stays, those of the dead go."""

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mrl.engines.temporary_folder import PREFIX, TemporaryFolder

OWNER = """
from mrl.engines.temporary_folder import TemporaryFolder
folder = TemporaryFolder()
print(folder.path, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made here, and by processes that are started here."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def test_the_folder_of_an_owner_that_was_killed_is_removed_by_the_next():
    """And with all that lies in it; as long as its owner lives it stays."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        (left / "socket").touch()
        beside = TemporaryFolder()
        assert (left / "socket").exists()
        owner.kill()

    after = TemporaryFolder()

    assert not left.exists()
    assert beside.path.exists()
    beside.remove()
    after.remove()


def test_a_folder_that_was_removed_is_gone_and_may_be_removed_again(temporary):
    """As may whatever lies beside it under such a name."""
    (temporary / f"{PREFIX}stranger").mkdir()
    folder = TemporaryFolder()
    (folder.path / "file").touch()

    folder.remove()
    folder.remove()

    assert [one.name for one in temporary.iterdir()] == [f"{PREFIX}stranger"]


def test_systemd_leaves_it_alone_however_old_its_files_are():
    """It asks for the lock of a folder before it looks for what is old there."""
    folder = TemporaryFolder()
    itself = os.open(folder.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(itself, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder.remove()
    fcntl.flock(itself, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(itself)


def test_where_nothing_can_be_locked_the_start_fails(monkeypatch):
    """And does not try for ever."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr("fcntl.flock", fail)
    with pytest.raises(OSError, match="no locks here"):
        TemporaryFolder()


def test_who_loses_its_folder_to_a_sweep_makes_another(monkeypatch):
    """It was swept between its making and its locking."""
    made, removed, made_as_ever = [], [], tempfile.mkdtemp

    def make_and_lose(prefix: str, dir: None) -> str:
        folder = made_as_ever(prefix=prefix)
        made.append(Path(folder))
        if not removed:
            removed.append(Path(folder))
            removed[0].rmdir()
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose)
    folder = TemporaryFolder()

    assert len(made) == 2
    assert folder.path == made[1]
    folder.remove()
