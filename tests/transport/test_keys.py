"""The run's keys on disk."""

import stat

import pytest

from mrl.errors import RunFolderError
from mrl.transport.keys import create_keys, load_keys


def test_loaded_keys_equal_the_created_ones(tmp_path):
    """What was created is what is loaded."""
    assert create_keys(tmp_path / "keys") == load_keys(tmp_path / "keys")


def test_only_the_owner_can_read_keys(tmp_path):
    """The folder is 0700 and every file 0600."""
    create_keys(tmp_path / "keys")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "keys").iterdir()}
    assert (stat.S_IMODE((tmp_path / "keys").stat().st_mode), modes) == (0o700, {0o600})


def test_secrets_do_not_show(tmp_path):
    """Neither secret half appears in the printed form."""
    keys = create_keys(tmp_path / "keys")
    assert keys.server_secret.decode() not in repr(keys)
    assert keys.client_secret.decode() not in repr(keys)


def test_a_missing_or_damaged_key_is_one_clear_line(tmp_path):
    """A person without keys is told which file lacks and what makes it."""
    with pytest.raises(RunFolderError, match=r"server_public.*mrl train"):
        load_keys(tmp_path)
    create_keys(tmp_path)
    (tmp_path / "client_secret").write_bytes(b"short")
    with pytest.raises(RunFolderError, match=r"client_secret.*damaged.*5 bytes"):
        load_keys(tmp_path)
