"""What a run wrote down is held against what could have been, and each kind of impossible history is told."""

import json
import sqlite3
from pathlib import Path

import check_history
import pytest

from mrl.allocation.allocation_limits import EPOCHS_PER_LIFE
from mrl.exchange.limits import Limits
from mrl.exchange.store import Store
from mrl.records.exchange_messages import Hello
from mrl.records.experience import OutcomeRecord
from mrl.records.version import Version
from tests.support.stored_core import StoredCore, put_message
from tests.support.successes import success

FIRST = EPOCHS_PER_LIFE + 1
NEXT = 2 * EPOCHS_PER_LIFE + 1
WHOLE = [("free", 0), ("granted", 1), ("active", 1), ("draining", 1), ("clearing", 1), ("free", 1), ("granted", 2)]


def rows(*steps: tuple[str, int], policy: str = "a", why: str = "") -> list[dict[str, object]]:
    """Transitions of one unit; epochs count from the first of an allocator's life."""
    first = FIRST - 1
    return [{"unit": "u", "state": state, "epoch": first + epoch, "policy": policy, "why": why}
            for state, epoch in steps]  # fmt: skip


def adopted(epoch: int, policy: str) -> list[dict[str, object]]:
    """A later allocator takes a lease over."""
    return rows(("granted", epoch), policy=policy, why="of an earlier allocator")


def test_a_lawful_history_has_no_faults() -> None:
    """Also where an allocator died with lines unwritten, and the next one adopted the lease or cleared the unit."""
    second = [{**row, "epoch": NEXT} for row in rows(("free", 1), ("granted", 1), ("active", 1))]

    assert list(check_history.lease_faults([*rows(*WHOLE), *adopted(2, "a"), *rows(("active", 2))])) == []
    assert list(check_history.lease_faults([*rows(*WHOLE[:4]), *second])) == []


@pytest.mark.parametrize(
    ("history", "says"),
    [
        (rows(*WHOLE[:3], ("granted", 2)), "active became granted"),
        (rows(*WHOLE[:3], ("free", 1)), "active became free"),
        (rows(*WHOLE[:6], ("granted", 1)), "granted to a under epoch"),
        ([*rows(*WHOLE), *adopted(2, "b")], "was taken over for b"),
    ],
)
def test_what_cannot_have_been_is_told(history: list[dict[str, object]], says: str) -> None:
    """Two owners, a unit free without a proof, an epoch used again, a lease given to somebody else."""
    found = list(check_history.lease_faults(history))
    assert len(found) == 1
    assert says in found[0]


def outcome(name: str, prompt_id: str) -> OutcomeRecord:
    """A success of version 0.1."""
    return success(name, prompt_id=prompt_id, step=1, completion=b"x")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of whose records some are held and one is removed, and whose learner was resumed."""
    core = StoredCore(successes_per_prompt=1)
    core.handle(b"w", Hello(client="w", policy="qwen"), 0.0)
    core.versions.announce("qwen", Version(0, 9), resumed=False)
    for name, prompt_id in (("r1", "p1"), ("r2", "p2"), ("r3", "p1")):
        core.handle(b"w", put_message(outcome(name, prompt_id)), 0.0, policy="qwen")
    core.commit_all(1.0)
    store = Store(tmp_path / "exchange", Limits())
    for transaction in core.committed:
        assert store.commit(transaction) == ""
    store.close()
    (tmp_path / "units.jsonl").write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows(*WHOLE)) + b'{"un')
    return tmp_path


def test_a_run_as_it_was_written_has_no_faults(run: Path, monkeypatch, capsys) -> None:
    """A torn last line is not one."""
    monkeypatch.setattr("sys.argv", ["check_history.py", str(run)])
    assert check_history.main() == 0
    assert json.loads(capsys.readouterr().out) == {str(run): 0}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("DELETE FROM records WHERE record_id = 'r2'", "qwen: 1 records are held, by the counts it is 2"),
        ("INSERT INTO removed VALUES (9, 9, 'r2', 'qwen', 'outcome', 'full')", "r2 was stored 2 times"),
        ("INSERT INTO versions VALUES ('qwen', 1, 5, 1), ('qwen', 1, 4, 0)", "opened at step 5 and is at 4"),
    ],
)
def test_a_changed_file_is_told(run: Path, change: str, says: str) -> None:
    with sqlite3.connect(run / "exchange/exchange.sqlite") as connection:
        connection.execute(change)
    [fault] = check_history.faults_of(run)
    assert says in fault
