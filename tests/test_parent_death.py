"""The process between a supervisor and a role: what it says when it cannot become the role."""

import os
import subprocess
import sys
from collections.abc import Sequence

from mrl.parent_death import CORES, command

CORE = min(os.sched_getaffinity(0))


def run(cores: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Become `argv` on these cores."""
    environ = os.environ | {CORES: cores}
    return subprocess.run(command(os.getpid(), tuple(argv)), env=environ, capture_output=True, text=True, timeout=120)


def test_a_process_is_bound_to_its_cores() -> None:
    """The role itself finds that it may run there and nowhere else."""
    code = "import os; print(os.sched_getaffinity(0))"
    assert run(str(CORE), [sys.executable, "-S", "-c", code]).stdout == f"{{{CORE}}}\n"


def test_a_core_that_is_not_there_is_named() -> None:
    """Also where others of the unit are there: the kernel would silently leave it out."""
    for cores in ("4000", f"{CORE},4000"):
        ended = run(cores, ["true"])
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr == "mrl: error: CPU core 4000 is not available to this run on this host\n"


def test_a_command_that_is_not_there_is_named() -> None:
    """And not some core."""
    assert run(str(CORE), ["/no/such"]).stderr == "mrl: error: cannot start /no/such (No such file or directory)\n"
