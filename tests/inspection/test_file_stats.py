"""What a run's file says of itself, and a record as lines for a person."""

import pytest

from mrl.errors import RunFolderError
from mrl.exchange.archive import read_records
from mrl.exchange.limits import Limits
from mrl.exchange.store import Store
from mrl.inspection.file_stats import find, stat_of
from mrl.records.codec import encode
from mrl.records.exchange_messages import Announce, Hello
from mrl.records.version import Version
from tests.support.stored_core import StoredCore, put_message
from tests.support.successes import success


def outcome(record_id, prompt_id="p1", step=3):
    """A success."""
    return success(record_id, prompt_id=prompt_id, step=step, completion=b"reverse: yah")


@pytest.fixture
def core():
    """One in which things were stored, refused, and went."""
    core = StoredCore(successes_per_prompt=2, max_age_versions=8)
    core.handle(b"w", Hello(client="w", policy="qwen"), 0.0)
    core.handle(b"w", put_message(*(outcome(f"r{n}", f"p{n // 4}", step=n) for n in range(8))), 0.0)
    core.handle(b"w", put_message(outcome("r7")), 0.0)
    core.handle(b"w", Announce(client="w", policy="qwen", version=Version(0, 9)), 0.0)
    core.handle(b"w", Announce(client="w", policy="qwen", version=Version(1, 8), resumed=True), 0.0)
    return core


@pytest.fixture
def folder(core, tmp_path):
    """The file of that core, without a daemon."""
    store = Store(tmp_path, Limits())
    for transaction in core.committed:
        assert store.commit(transaction) == ""
    store.close()
    return tmp_path


def test_the_file_tells_what_its_daemon_told(core, folder):
    """Everything but what was only in memory: who watched, and who had come to which barrier."""
    [policy_stat], [told] = stat_of(folder).policies, core.stat(0.0).policies
    fields = ("policy", "newest", "prompts", "records", "put", "refused", "evicted", "kinds", "oldest_age_versions")
    assert {name: getattr(policy_stat, name) for name in fields} == {name: getattr(told, name) for name in fields}
    assert stat_of(folder).file_bytes > policy_stat.bytes > 0


def test_a_record_is_found_or_what_became_of_it(folder):
    """By its id."""
    body, where = find(folder, "r7")
    assert (body, where.startswith("number 8 in ")) == (encode(outcome("r7", "p1", step=7)), True)
    assert find(folder, "r0") == (b"", "record number 1 was removed: surpassed")
    assert find(folder, "unknown") is None


def test_records_are_read_from_the_file_by_anybody(folder):
    """As objects, in the order in which they came; of some kinds and sources, if asked."""
    everything = [record.record_id for record in read_records(folder)]
    assert everything == ["r2", "r3", "r6", "r7"]
    assert list(read_records(folder / "exchange.sqlite", kinds=["rollout"])) == []
    assert len(list(read_records(folder, kinds=["outcome"], sources=["qwen", "llama"]))) == 4


def test_without_a_file_there_is_one_clear_line(tmp_path):
    """With the folder's name; the same for a file that is none of an exchange."""
    with pytest.raises(RunFolderError, match="no exchange file found"):
        list(read_records(tmp_path))
    (tmp_path / "exchange.sqlite").write_bytes(b"something else" * 100)
    with pytest.raises(RunFolderError, match="cannot be used"):
        list(read_records(tmp_path))
