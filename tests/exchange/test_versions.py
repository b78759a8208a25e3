"""What a book of versions remembers, and how much of it."""

from mrl.exchange import versions
from mrl.exchange.versions import VersionTracker
from mrl.records.codec import SCHEMA
from mrl.records.tags import Tags
from mrl.records.version import Version


def tags(epoch, step):
    """Of a record of qwen."""
    version = Version(epoch, step)
    names = {"record_id": "g", "source": "qwen", "prompt_id": "p", "task": "t"}
    return Tags(type="rollout", oldest=version, newest=version, schema=SCHEMA, **names)


def test_the_newest_resumes_are_remembered(monkeypatch):
    """An older one said again is no news, so that repeating it costs no transaction."""
    monkeypatch.setattr(versions, "MAX_RESUMES", 3)
    book = VersionTracker()
    news = [book.announce("qwen", Version(epoch, 10 * epoch), resumed=True) for epoch in range(1, 7)]
    assert news == [True] * 6
    assert sorted(book._resumes["qwen"]) == [4, 5, 6]
    assert [book.announce("qwen", Version(epoch, 10 * epoch), resumed=True) for epoch in range(1, 7)] == [False] * 6
    assert sorted(book._resumes["qwen"]) == [4, 5, 6]
    assert (book.is_void(tags(3, 41)), book.is_void(tags(3, 40))) == (True, False)
