"""What goes on the log together: a commit is worth no wait for the disk of its own."""

import pytest

from mrl.exchange.entry import Entry
from mrl.exchange.journal import read, stored_of
from mrl.exchange.postings import Postings
from mrl.records.exchange_messages import Commit
from mrl.records.tags import PackTags
from mrl.records.version import Version


def commit(upto, stream="s"):
    """Of one policy."""
    return Commit(client="l", policy="llama", stream=stream, upto=upto)


@pytest.fixture
def log():
    """(ticket, head) of what was appended."""
    return []


@pytest.fixture
def postings(log):
    """Append to it."""
    return Postings(lambda ticket, entry, *, is_move: log.append((ticket, read(b"".join(entry))[0])))


def test_a_commit_waits_for_records_to_go_with(postings, log):
    """It follows them, with a ticket of its own; theirs is the one that is told."""
    postings.post_later(commit(3))
    assert log == []
    tags = PackTags(type="outcome", source="qwen", oldest=Version(0, 0), newest=Version(0, 0), task="t")
    entries = [Entry(tags, b"\xdd\0\0\0\0", 1)]
    assert postings.post_records(stored_of(entries), entries) == 1
    assert log == [(1, stored_of(entries)), (2, commit(3))]
    assert [place for _, place in postings.settle(2, 50)] == []
    assert [entry for entry, _ in postings.settle(1, 0)] == entries


def test_only_the_last_commit_of_a_stream_is_written_and_once(postings, log):
    """Numbers of one stream rise."""
    for one in (commit(3), commit(1, "other"), commit(7)):
        postings.post_later(one)
    for _ in range(2):
        postings.flush()
    assert log == [(1, commit(7)), (2, commit(1, "other"))]
