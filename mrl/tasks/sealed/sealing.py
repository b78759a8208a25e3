"""The choice of answers that are judged in sealed processes, and whether this host can seal a process.

Answers that are evaluated are judged so: by a data set's own scorer, or by the task's evaluator, a function of the user
that runs the answer before the user's verifier compares. Scorers that only compare cannot be made to do anything else,
and their process judges one answer after the other. A user's own verifier runs as the user wrote it, with files and
network.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mrl.config.task_tables import TaskTable
from mrl.errors import TaskError
from mrl.plugins import MODULES
from mrl.tasks.sealed.seal import unsealed_reason

_KEPT = ("PATH", "HOME", "TZ", "LANG", "LD_LIBRARY_PATH")
_KEPT_BEGINNINGS = ("PYTHON", "LC_")
_LARGE_PAGES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment for large pages. A process forked for an answer copies its parent's page table: with pages of 2 MiB,
where kernel and glibc (2.35) have them, that takes a third of the time. Elsewhere these variables change nothing."""


@dataclass(frozen=True, slots=True)
class Sealing:
    """Settings of a pool's sealed processes."""

    evaluator: str = ""
    """"module:function" that turns an answer into the text to judge; empty where the answer itself is judged."""
    is_trusted: bool = False
    """Whether answers are run with limits only where the host has no seal."""


def sealing_of(task: str, table: TaskTable, *, evaluates: bool) -> Sealing | None:
    """Return how answers of this task are sealed; None where nothing is known to evaluate them.

    `evaluates`: whether the source's own scorer evaluates answers as code. Raises TaskError where answers are
    evaluated, this host has no seal, and the task does not trust the answers; also for an evaluator without a verifier.
    """
    if table.evaluator and not table.own_verifier:
        raise TaskError(
            "an evaluator needs a verifier", where=f"tasks.{task}.evaluator", cure=f"set tasks.{task}.verifier"
        )
    if not table.evaluator and (table.own_verifier or not evaluates):
        return None
    if not table.trusted_answers and (reason := unsealed_reason()):
        raise TaskError(
            f"answers are evaluated as code, but this host cannot seal a process ({reason})",
            where=f"tasks.{task}",
            wanted="seccomp filters (Linux on x86-64 or AArch64)",
            cure="use another host or data set, or, if such code can do no harm here, "
            f"set tasks.{task}.trusted_answers = true",
        )
    return Sealing(table.evaluator, is_trusted=table.trusted_answers)


def described_seal() -> str:
    """Return in words how this host runs answers that are evaluated."""
    reason = unsealed_reason()
    return f"refused unless trusted_answers = true ({reason})" if reason else "each in a sealed process of its own"


def sealed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the processes of a sealed pool need to start; sealed processes have no environment."""
    kept = {
        name: value
        for name, value in environment.items()
        if name in (*_KEPT, MODULES) or name.startswith(_KEPT_BEGINNINGS)
    }
    return _LARGE_PAGES | kept | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # forking needs one thread
