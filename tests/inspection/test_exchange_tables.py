"""The tables of the inspection: rates between two looks, and every number somewhere."""

import io

import msgspec
import pytest
from rich.console import Console

from mrl.inspection.exchange_tables import rates_per_s, tables
from mrl.records.exchange_messages import ClientState, PairFlow, PolicyStat
from mrl.records.version import Version
from tests.support.stored_core import StoredCore


def account(*, incarnation="one", uptime_s=10.0, records=20, put=30, refused=5, **changes):
    """A daemon's, of two policies."""
    policy_stat = PolicyStat(
        policy="qwen", newest=Version(0, 9), prompts=3, records=4, bytes=2**20, put=put, refused={"stale": refused},
        evicted={"full": 2}, watched_prompts=6, kinds={"outcome": 4}, barrier=8, oldest_age_versions=5,
    )  # fmt: skip
    flow = PairFlow(
        source="qwen", receiver="llama", asked=10, hits=4, records=records, bytes=2**21, mean_age_versions=1.5
    )
    fields = {"policies": [policy_stat], "flows": [flow], "incarnation": incarnation, "uptime_s": uptime_s}
    return msgspec.structs.replace(StoredCore().stat(0.0), **fields | changes)


def text(stat, before=None, **options):
    """As it is printed on a wide page."""
    console = Console(width=160, file=io.StringIO())
    console.print(tables(stat, rates_per_s(stat, before), **options))
    return console.file.getvalue()


def test_rates_are_those_since_the_previous_look():
    """Or since the start, of the first look and of another daemon."""
    now = account()
    assert rates_per_s(now, None).delivered == {("qwen", "llama"): 2.0}
    rates = rates_per_s(now, account(uptime_s=6.0, records=8, put=29, refused=1))
    assert rates.delivered == {("qwen", "llama"): 3.0}
    assert (rates.put, rates.refused) == ({"qwen": 0.25}, {("qwen", "stale"): 1.0})
    assert rates_per_s(now, account(incarnation="two", uptime_s=6.0)).put == {"qwen": 3.0}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "storage: well"),
        (
            {"storage": "disk_full", "unstored": 7, "later": 4},
            "storage: disk_full, 7 Puts not stored yet, 4 Puts deferred",
        ),
        ({"file_bytes": 2**20, "commits": 4, "commit_s": 0.02}, "file 1.00 MiB, 5.0 ms per commit"),
        (
            {"unacknowledged": 3, "abandoned": 2, "undelivered": 1},
            "3 records unacknowledged, 2 given up; 1 messages had no receiver",
        ),
        ({"malformed": {"record": 2, "frames": 1}}, "dropped input: frames 1, record 2"),
    ],
)
def test_the_head_says_how_the_daemon_is(changes, line):
    """Storage, log, deliveries, what was dropped."""
    assert line in text(account(**changes))


def test_policies_and_pairs_have_their_rows():
    """With ages, refusals by reason, and rates."""
    shown = text(account())
    rows = {row.split()[0]: row.split() for row in shown.splitlines() if row.split()}
    assert "qwen 0.9 5 3 4 1.00 30 3.0 5 6 8 outcome 4 full 2" in " ".join(shown.split())
    assert "qwen stale 5 0.50" in " ".join(shown.split())
    assert rows["qwen"][:9] == ["qwen", "llama", "20", "2.00", "2.00", "10", "4", "0.40", "1.5"]


def test_who_waits_is_shown():
    """Clients with what is open for them."""
    clients = [
        ClientState(client=f"worker/qwen/{n}", policy="qwen", silent_s=4.2, unacknowledged=2, queued=1)
        for n in range(15)
    ]
    shown = " ".join(text(account(sessions=clients)).split())
    assert "worker/qwen/0 qwen 4.2 s ago 2 1" in shown
    assert "... and 3 more" in shown
    assert ("worker/qwen/11" in shown, "worker/qwen/12" in shown) == (True, False)


def test_names_are_no_markup():
    """Whatever a client calls itself."""
    client = ClientState(client="[/]\x1b[2J", policy="[red]x[/red]", silent_s=0.0, unacknowledged=0, queued=0)
    shown = text(account(sessions=[client], malformed={"[x]": 1}))
    assert all(word in shown for word in ("[red]x[/red]", "[/]\\x1b[2J", "[x] 1"))
    assert "\x1b" not in shown
