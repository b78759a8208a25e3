"""A replaced file is whole at every moment."""

import resource
import stat
from pathlib import Path

import pytest

from mrl.files import has_room, replace_file


def test_the_new_content_takes_the_place_of_the_old(tmp_path: Path):
    """Content and mode are as given, and no temporary file stays."""
    path = tmp_path / "a"
    path.write_bytes(b"old")

    replace_file(path, b"new", mode=0o640)

    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    """When the rename cannot be done, the temporary file is removed."""
    path = tmp_path / "a"
    path.mkdir()

    with pytest.raises(OSError, match="directory"):
        replace_file(path, b"new")

    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_room_for_a_file_is_what_the_disk_and_the_process_may_have(tmp_path: Path):
    """Nothing stays of the question; a folder that takes no files has no room."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, limits[1]))
        assert (has_room(tmp_path, 65_536), has_room(tmp_path, 65_537)) == (True, False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not has_room(tmp_path / "gone", 1)
    assert list(tmp_path.iterdir()) == []
