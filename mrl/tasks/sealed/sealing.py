"""Which answers are judged in sealed processes, and what a host has to have for it.

Those that are evaluated: by a data set's own scorer, or by the task's evaluator, a function of the user's that runs
them before the user's verifier compares. Scorers that only compare cannot be made to do anything else, and go on from
one answer to the next; a verifier of the user's own runs as the user wrote it, with files and network.
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
"""A process that is forked for an answer copies its parent's table of pages: with pages of 2 MiB, where the kernel and
glibc (2.35) have them, that takes a third of the time. Elsewhere these change nothing."""


@dataclass(frozen=True, slots=True)
class Sealing:
    """How the processes of a pool are sealed."""

    evaluator: str = ""
    """"module:function" that turns an answer into the text that is judged; empty where the answer itself is judged."""
    is_trusted: bool = False
    """Whether they go on with the limits alone where the host has no seal."""


def sealing_of(task: str, table: TaskTable, *, evaluates: bool) -> Sealing | None:
    """How answers of this task are sealed; None where nothing evaluates them, as far as the task says.

    `evaluates`: whether the source's own scorer takes answers for code. Raises TaskError where answers are evaluated,
    this host has no seal, and the task does not say that they may be all the same.
    """
    if table.evaluator and not table.own_verifier:
        raise TaskError(
            "an evaluator without a verifier", where=f"tasks.{task}.evaluator", cure=f"give tasks.{task}.verifier"
        )
    if not table.evaluator and (table.own_verifier or not evaluates):
        return None
    if not table.trusted_answers and (reason := unsealed_reason()):
        raise TaskError(
            f"answers are evaluated as code, and this host cannot seal a process ({reason})",
            where=f"tasks.{task}",
            wanted="seccomp filters (Linux on x86-64 or AArch64)",
            cure=f"another host or data set; or tasks.{task}.trusted_answers = true, if nobody is harmed by such code",
        )
    return Sealing(table.evaluator, is_trusted=table.trusted_answers)


def described_seal() -> str:
    """What becomes of answers that are evaluated on this host, in words."""
    reason = unsealed_reason()
    return f"refused, unless trusted ({reason})" if reason else "each in a sealed process of its own"


def sealed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What the processes of a sealed pool need of the environment to start; the sealed ones have nothing of it."""
    kept = {
        name: value
        for name, value in environment.items()
        if name in (*_KEPT, MODULES) or name.startswith(_KEPT_BEGINNINGS)
    }
    return _LARGE_PAGES | kept | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # with threads none must fork
