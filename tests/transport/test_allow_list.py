"""The allow-list as a file, and a server's view of it."""

import json
import os

import msgspec
import pytest

from mrl.errors import RunFolderError
from mrl.transport.allow_list import AllowList, fingerprint, read_entries, write_entries
from mrl.transport.grants import Grant
from mrl.transport.keys import load_client_keys, revoke_client_key

QWEN = Grant("worker", "qwen")


@pytest.fixture
def public(keys):
    """The public key of qwen's workers."""
    return load_client_keys(keys.folder, QWEN).public.decode()


def test_a_key_is_found_until_it_is_revoked(keys, public):
    """The view follows the file when told to look, and not before."""
    allowed = AllowList(keys.folder)
    assert (allowed.find(public), allowed.is_revoked(public)) == (QWEN, False)
    revoke_client_key(keys.folder, "worker/qwen")
    assert allowed.find(public) == QWEN
    assert allowed.reload() is True
    assert (allowed.find(public), allowed.is_revoked(public)) == (None, True)
    assert allowed.reload() is False


def test_strangers_are_not_found(keys):
    """Neither as living nor as revoked."""
    allowed = AllowList(keys.folder)
    assert (allowed.find("x" * 40), allowed.is_revoked("x" * 40)) == (None, False)


def test_a_change_that_leaves_size_and_time_alone_is_seen(keys, public):
    """Two changes within one tick of the clock: the file is another one, whatever its times say."""
    path = keys.folder / "allowed.json"
    allowed, before = AllowList(keys.folder), path.stat()
    entries = read_entries(keys.folder)
    renamed = [msgspec.structs.replace(one, policy="qwem") if one.grant == QWEN else one for one in entries]
    write_entries(keys.folder, renamed)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert allowed.reload() is True
    assert allowed.find(public) == Grant("worker", "qwem")


def test_a_list_that_is_gone_or_damaged_changes_nothing(keys, public):
    """The reload says so; what was read before stays in force until the file can be read again."""
    allowed, path = AllowList(keys.folder), keys.folder / "allowed.json"
    good = path.read_bytes()
    path.unlink()
    with pytest.raises(RunFolderError, match="cannot read"):
        allowed.reload()
    assert allowed.find(public) == QWEN
    write_entries(keys.folder, [])
    assert allowed.reload() is True
    assert allowed.find(public) is None
    path.write_bytes(good)
    assert allowed.reload() is True
    assert allowed.find(public) == QWEN


@pytest.mark.parametrize(
    "entry",
    [
        {"public": "short", "role": "admin", "made_unix_s": 0},
        {"public": "x" * 40, "role": "king", "made_unix_s": 0},
        {"public": "x" * 40, "role": "worker", "made_unix_s": 0},
        {"public": "x" * 40, "role": "worker", "policy": "a/b", "made_unix_s": 0},
        {"public": "x" * 40, "role": "admin", "made_unix_s": 0, "secret": "x" * 40},
        "text",
    ],
)
def test_entries_are_checked(keys, entry):
    """Anything but a well-formed list is refused whole, with the file's name and one line."""
    (keys.folder / "allowed.json").write_text(json.dumps({"schema": 1, "keys": [entry]}))
    with pytest.raises(RunFolderError, match=r"allowed\.json: the allow-list is damaged") as caught:
        read_entries(keys.folder)
    assert "\n" not in str(caught.value)


def test_fingerprints_tell_keys_apart(public):
    """Sixteen digits, equal for equal keys, and never the key itself."""
    assert fingerprint(public) == fingerprint(public)
    assert fingerprint(public) != fingerprint(public[::-1])
    assert len(fingerprint(public)) == 16
