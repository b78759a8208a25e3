"""What a book of versions remembers, and how much of it."""

from mrl.exchange import versions
from mrl.exchange.versions import VersionBook
from mrl.records.tags import PackTags
from mrl.records.version import Version


def tags(epoch, step):
    """Of records of qwen."""
    version = Version(epoch, step)
    return PackTags(type="rollout", source="qwen", oldest=version, newest=version, task="t")


def test_the_newest_resumes_are_remembered(monkeypatch):
    """An older one said again is no news, so that repeating it does not fill the log."""
    monkeypatch.setattr(versions, "MAX_RESUMES", 3)
    book = VersionBook()
    news = [book.announce("qwen", Version(epoch, 10 * epoch), resumed=True) for epoch in range(1, 7)]
    assert news == [True] * 6
    assert [one.version.run_epoch for one in book.announcements() if one.resumed] == [4, 5, 6]
    assert [book.announce("qwen", Version(epoch, 10 * epoch), resumed=True) for epoch in range(1, 7)] == [False] * 6
    assert [one.version.run_epoch for one in book.announcements() if one.resumed] == [4, 5, 6]
    assert (book.is_void(tags(3, 41)), book.is_void(tags(3, 40))) == (True, False)
