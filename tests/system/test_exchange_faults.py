"""Short forms of `tools/drill_exchange.py`: a real daemon under load; all that is acknowledged is trained on once."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from exchange_drill.outcome import Outcome
from exchange_drill.rig import add_up

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.system
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="a small file system or a network namespace can only be made by root"
)
needs_nft = pytest.mark.skipif(
    not shutil.which("nft") or not shutil.which("ip"),
    reason="packets are dropped with ip and nft: apt-get install iproute2 nftables",
)


PATIENT = """
import runpy, sys
sys.path.insert(0, "tools")
from exchange_drill import faults
faults.AFTER_RESTART_BOUND_S = 60.0
runpy.run_path("tools/drill_exchange.py", run_name="__main__")
"""
"""How long the exchange takes to come back is for a quiet machine to tell."""


def drill(folder, *arguments):
    """Runs it; returns exit code, the figures of its last line by fault and name, and all that it said."""
    done = subprocess.run(
        [sys.executable, "-c", PATIENT, "--folder", str(folder), *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bench"] == "exchange_faults"
    return done.returncode, {row["name"].rpartition(": ")[2]: row for row in found["rows"]}, done.stdout + done.stderr


def test_what_is_lost_or_doubled_is_seen():
    """Of three that are gone two were evicted; one came twice, and one before its acknowledgement."""
    outcome = Outcome("a fault")
    add_up(outcome, {f"0:{n}" for n in range(5)}, {"0:0": 1, "0:1": 2, "0:9": 1}, num_gone=3, num_evicted=2)

    assert (outcome.acknowledged, outcome.evicted, outcome.lost, outcome.doubled) == (5, 2, 1, 1)
    assert outcome.faults() == ["1 lost", "1 trained on twice"]


@pytest.mark.parametrize(
    ("fault", "arguments", "tried"),
    [
        ("kill", ["--kills", "6"], 3),
        ("consumer", ["--deaths", "3"], 3),
        ("producer", ["--deaths", "3"], 3),
        ("stop", ["--seconds", "1"], 3),
        pytest.param("disk", ["--rounds", "1"], 1, marks=needs_root),
        pytest.param("partition", ["--partition-seconds", "1"], 5, marks=[needs_root, needs_nft]),
    ],
)
def test_nothing_is_lost_or_doubled(fault, arguments, tried, tmp_path):
    """And the load goes on after every fault."""
    code, figures, said = drill(tmp_path, "--faults", fault, *arguments)

    assert code == 0, said
    assert (figures["lost"]["value"], figures["doubled"]["value"]) == (0, 0)
    assert figures["tried"]["value"] >= tried
    assert figures["acknowledged"]["value"] > 100
    assert [*tmp_path.iterdir()] == []


def test_memory_is_bounded_while_long_records_come_in(tmp_path):
    """From a client that is let in and sends as fast as it goes; what is lost beside it was evicted and counted."""
    code, figures, said = drill(tmp_path, "--faults", "memory", "--attacks", "large_records", "--attack-seconds", "6")

    assert code == 0, said
    assert figures["peak resident memory"]["value"] > 64 * 2**20
    assert figures["peak resident memory"]["ok"]
    assert (figures["lost"]["value"], figures["unasked deaths"]["value"]) == (0, 0)


@pytest.mark.slow
def test_a_torn_log_leaves_a_beginning(tmp_path):
    """Cut or spoiled, wherever that is."""
    code, figures, said = drill(tmp_path, "--faults", "torn")

    assert code == 0, said
    assert figures["tried"]["value"] >= 60
    assert (figures["lost"]["value"], figures["doubled"]["value"]) == (0, 0)


def test_a_fault_that_does_not_exist_is_one_clear_line(tmp_path):
    """Exit code 2, before anything is started."""
    done = subprocess.run(
        [sys.executable, "tools/drill_exchange.py", "--faults", "kill,flood"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (2, "")
    assert "no fault flood; wanted some of kill, torn, consumer" in done.stderr
