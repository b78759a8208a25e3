"""A verifier tried before a run: on a few prompts, with the reference as the answer, a wrong one, and garbage."""

from collections.abc import Sequence
from dataclasses import dataclass

from mrl.config.schema import TaskTable
from mrl.errors import TaskError
from mrl.tasks.rewards import FAILURES
from mrl.tasks.source import Item
from mrl.tasks.sources import open_source
from mrl.tasks.split import distinct_items
from mrl.tasks.verify import Judge, Verdict, check_verifier

PROMPTS = 3
WRONG = "no such answer"
GARBAGE = {"blank": " \n", "garbage": "}{ \\frac{1,2.3e-- \ufffd [[\"'' <tool"}
"""What policies write before they have learned better; an answer without any character never reaches a verifier."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a task's verifier gave for one prompt."""

    task: str
    prompt: str
    reference: str
    of_reference: Verdict
    of_wrong: Verdict
    """For an answer that is another prompt's reference, or nonsense."""
    of_garbage: tuple[Verdict, ...] = ()
    """For the values of `GARBAGE`, of the first prompt alone."""


def try_verifier(task: str, table: TaskTable, *, seed: int) -> list[Trial]:
    """Call the task's own verifier on its first prompts; behind an evaluator, where no reference is an answer, none.

    Raises TaskError, with the line that failed, when it does not start or fails on any; MissingError when the data are
    not there.
    """
    check_verifier(task, table)
    if table.evaluator:
        return []
    source = open_source(task, table, seed=seed)
    items = [item for item, _ in zip(distinct_items(source, table, PROMPTS * 10), range(PROMPTS), strict=False)]
    asked = [(item, answer) for item in items for answer in (item.reference or WRONG, _wrong(item, items))]
    num_sound = len(asked)
    asked += [(item, answer) for item in items[:1] for answer in GARBAGE.values()]
    judge = Judge({task: table})
    try:
        verdicts = judge.submit_answers(task, source, asked).result()
    finally:
        judge.close()
    for (item, answer), verdict in zip(asked, verdicts, strict=True):
        if verdict.failure:
            raise _refused(task, table, item, answer, verdict)
    sound, of_garbage = verdicts[:num_sound], tuple(verdicts[num_sound:])
    return [
        Trial(task, item.text, item.reference, right, wrong, of_garbage if item is items[0] else ())
        for item, right, wrong in zip(items, sound[::2], sound[1::2], strict=True)
    ]


def tells_nothing(trials: Sequence[Trial]) -> bool:
    """Whether one task's verifier gave one reward for everything: there is nothing to learn from that."""
    return len({verdict.reward for one in trials for verdict in (one.of_reference, one.of_wrong)}) == 1


def _wrong(item: Item, items: Sequence[Item]) -> str:
    return next((other.reference for other in items if other.reference not in ("", item.reference)), WRONG)


def _refused(task: str, table: TaskTable, item: Item, answer: str, verdict: Verdict) -> TaskError:
    return TaskError(
        f"the verifier {table.verifier} failed on the answer {answer[:60]!r} to {item.text[:60]!r}",
        where=f"tasks.{task}.verifier",
        got=f"{verdict.failure}: {verdict.words}",
        wanted="a finite number, or several by name, for any text",
        cure=f"{FAILURES[verdict.failure]}; mend it there",
    )
