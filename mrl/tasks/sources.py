"""The one list of task sources."""

from collections.abc import Callable

from mrl.config.schema import TaskTable
from mrl.tasks.jsonl_source import JsonlSource
from mrl.tasks.math_source import MathSource
from mrl.tasks.reasoning_gym_source import ReasoningGymSource
from mrl.tasks.sealed.sealing import sealing_of
from mrl.tasks.source import Source
from mrl.tasks.words import WordSource

SOURCES: dict[str, Callable[..., Source]] = {
    "reasoning_gym": ReasoningGymSource,
    "words": WordSource,
    "math": MathSource,
    "jsonl": JsonlSource,
}
"""Name -> (dataset, options, *, seed, where, get) -> Source. A new source is one file and one line here."""


def open_source(task: str, table: TaskTable, *, seed: int) -> Source:
    """The data set behind one task of the configuration, judged by the task's own verifier where it names one.

    Raises TaskError when there is no such thing, or its answers are evaluated and this host cannot seal a process;
    MissingError when it is still to be fetched.
    """
    source = SOURCES[table.source](table.dataset, table.options, seed=seed, where=f"tasks.{task}", get=table.get)
    source.verifier = table.verifier or source.verifier
    sealing_of(task, table, evaluates=source.evaluates)
    return source
