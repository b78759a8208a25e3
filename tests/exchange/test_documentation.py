"""What docs/exchange.md shows can be done, on the file of a real daemon's core."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from mrl.exchange.limits import Limits
from mrl.exchange.store import FILE, SCHEMA, SCHEMA_VERSION, Store
from mrl.records.exchange_messages import Hello
from tests.support.stored_core import StoredCore, put_message

PAGE = (Path(__file__).parents[2] / "docs" / "exchange.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def run(tmp_path, monkeypatch, outcome, rollout):
    """The folder of a finished run of the name that the page uses, as the working folder has it."""
    folder = tmp_path / "runs" / "quickstart" / "exchange"
    core = StoredCore()
    core.handle(b"w", Hello(client="w", policy="qwen"), 0.0)
    core.handle(b"w", put_message(outcome("r1", prompt_id="trim:17", step=3), rollout("g1")), 0.0)
    store = Store(folder, Limits())
    for transaction in core.committed:
        assert store.commit(transaction) == ""
    store.close()
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize(
    ("program", "shown"),
    [*zip(PROGRAMS, ["('qwen', 3)", "outcome", "qwen trim:17 b'yah'"], strict=True)],
    ids=["sqlite3", "pandas", "objects"],
)
def test_every_program_of_the_page_runs(run, program, shown):
    """And shows what is in the file."""
    if "pandas" in program:
        pytest.importorskip("pandas")
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        exec(compile(program, "docs/exchange.md", "exec"), {})
    assert shown in told.getvalue()


def test_the_page_names_every_table_and_column():
    """And the version of the schema."""
    names = re.findall(r"CREATE TABLE (\w+)", SCHEMA) + re.findall(
        r"^    (\w+) (?:INTEGER|TEXT|REAL|BLOB)", SCHEMA, re.M
    )
    assert len(names) > 20
    assert [name for name in names if f"`{name}`" not in PAGE] == []
    assert f"the version of this schema, {SCHEMA_VERSION}." in PAGE
    assert FILE in PAGE
