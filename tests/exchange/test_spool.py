"""Bytes left in a file are found by the daemon as they were meant, or not at all."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.exchange import spool as spool_module
from mrl.exchange.spool import MIN_BYTES, Spool, Spools, spool_path
from mrl.records.codec import MAX_MESSAGE_BYTES
from mrl.records.packs import Spooled

ACTIONS = st.lists(st.tuples(st.sampled_from(["write", "free first", "free any"]), st.integers(1, 60)), max_size=60)


@pytest.fixture
def pair(tmp_path):
    """A client's end and the daemon's, of a small file."""
    client, daemon = Spool(spool_path(tmp_path, "worker/qwen/0"), capacity_bytes=100_000), Spools(tmp_path)
    assert daemon.open("worker/qwen/0")
    yield client, daemon
    client.close()
    daemon.close()


@settings(deadline=None)
@given(actions=ACTIONS)
def test_nothing_is_overwritten_before_it_was_answered(tmp_path_factory, actions):
    """Whatever is written and answered in whatever order, all that is unanswered can be read."""
    folder = tmp_path_factory.mktemp("exchange")
    client, daemon = Spool(spool_path(folder, "w"), capacity_bytes=100_000), Spools(folder)
    daemon.open("w")
    live: dict[int, tuple[Spooled, bytes]] = {}
    refused_when_empty = 0
    for seq, (action, size) in enumerate(actions):
        if action == "write":
            data = os.urandom(MIN_BYTES + 500 * size)
            where = client.write(seq, [data[:100], data[100:]])
            refused_when_empty += where is None and not live
            if where is not None:
                live[seq] = where, data
        elif live:
            seqs = sorted(live)
            gone = seqs[0] if action == "free first" else seqs[size % len(seqs)]
            client.free(gone)
            del live[gone]
        for where, data in live.values():
            assert daemon.read("w", where) == client.read_back(where) == data
    assert refused_when_empty == 0
    client.close()
    daemon.close()


def test_what_is_short_goes_over_the_socket(pair):
    """A file would cost as much."""
    client, _ = pair
    assert client.write(1, [bytes(MIN_BYTES - 1)]) is None


def test_what_does_not_fit_goes_over_the_socket(pair):
    """Until something was answered."""
    client, _ = pair
    assert client.write(1, [bytes(60_000)]) is not None
    assert client.write(2, [bytes(60_000)]) is None
    assert client.write(3, [bytes(100_001)]) is None
    client.free(1)
    assert client.write(4, [bytes(60_000)]) is not None


def test_other_bytes_than_those_meant_are_none(pair):
    """Overwritten, cut off, or never there."""
    client, daemon = pair
    where = client.write(1, [b"a" * 20_000])
    assert daemon.read("worker/qwen/0", where) == b"a" * 20_000
    for wrong in (
        Spooled(position=where.position + 1, num_bytes=20_000, checksum=where.checksum),
        Spooled(position=90_000_000, num_bytes=20_000, checksum=where.checksum),
        Spooled(position=2**53, num_bytes=20_000, checksum=where.checksum),
        Spooled(position=0, num_bytes=MAX_MESSAGE_BYTES + 1, checksum=where.checksum),
        Spooled(position=0, num_bytes=20_000, checksum=bytes(8)),
    ):
        assert daemon.read("worker/qwen/0", wrong) is None
    assert daemon.read("worker/llama/0", where) is None


def test_a_file_is_for_its_owner_and_goes_with_it(tmp_path):
    """0600 in a folder of 0700; a new process of the same name begins a new one."""
    path = spool_path(tmp_path, "w")
    first = Spool(path)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    where = first.write(1, [b"a" * 20_000])
    second = Spool(path)
    assert second.read_back(where) is None
    second.close()
    assert not path.exists()
    assert second.write(2, [b"a" * 20_000]) is None


def test_the_daemon_opens_nothing_but_plain_files_of_its_user(tmp_path, monkeypatch):
    """A link would let a client have another file read, a pipe would hold the daemon up."""
    daemon, path = Spools(tmp_path), spool_path(tmp_path, "w")
    assert not daemon.open("w")
    path.parent.mkdir()
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(20_000))
    path.symlink_to(secret)
    assert not daemon.open("w")
    path.unlink()
    os.mkfifo(path)
    assert not daemon.open("w")
    path.unlink()
    path.write_bytes(b"")
    assert daemon.open("w")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345)
        assert not daemon.open("w")
    assert not daemon.has("w")


def test_names_cannot_lead_out_of_the_folder(tmp_path):
    """Whatever a client calls itself."""
    assert spool_path(tmp_path, "../../etc/passwd").parent == tmp_path / "spool"
    assert spool_path(tmp_path, "a") != spool_path(tmp_path, "b")


def test_open_files_are_bounded(tmp_path, monkeypatch):
    """The ones opened first go."""
    monkeypatch.setattr(spool_module, "MAX_OPEN", 2)
    clients = [Spool(spool_path(tmp_path, name)) for name in "abc"]
    daemon = Spools(tmp_path)
    assert all(daemon.open(name) for name in "abc")
    assert [daemon.has(name) for name in "abc"] == [False, True, True]
    daemon.close()
    for client in clients:
        client.close()
