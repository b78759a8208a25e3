"""A trial of a verifier before a run: on a few prompts, with the reference, a wrong answer, and garbage as answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from mrl.config.task_tables import TaskTable
from mrl.errors import TaskError
from mrl.tasks.rewards import FAILURES, TOO_LONG, UNEVALUATED
from mrl.tasks.source import Item, Source
from mrl.tasks.sources import open_source
from mrl.tasks.split import distinct_items
from mrl.tasks.verify import Judge, Verdict, check_verifier

PROMPTS = 3
WRONG = "no such answer"
AS_IT_IS = "builtins:str"
"""An evaluator that returns the answer unchanged."""
GARBAGE = {"blank": " \n", "garbage": "}{ \\frac{1,2.3e-- \ufffd [[\"'' <tool"}
"""Texts that untrained policies write. An answer without any character never reaches a verifier."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Verdicts of a task's verifier for one prompt."""

    task: str
    prompt: str
    reference: str
    of_reference: Verdict
    of_wrong: Verdict
    """Verdict on a wrong answer: another prompt's reference, or nonsense."""
    evaluated: Verdict | None = None
    """Verdict on the reference, given to the evaluator as a policy's answer would be; None without an evaluator."""
    of_garbage: tuple[Verdict, ...] = ()
    """Verdicts on the values of `GARBAGE`, for the first prompt only."""


def try_verifier(task: str, table: TaskTable, *, seed: int) -> list[Trial]:
    """Call the task's own verifier on its first prompts, with the reference, a wrong answer, and garbage as answers.

    Where there is an evaluator, the verifier gets these texts unevaluated. The evaluator might or might not return such
    texts, so a failure is then a verdict, not an error. The evaluator itself is tried on the references, although they
    need not be code that it can read.

    Raises TaskError, with the line that failed, when verifier or evaluator does not start, or when the verifier fails
    on a text that it must be able to read: any text, or where there is an evaluator, any text that the evaluator
    returned. Raises MissingError when the data are not there.
    """
    check_verifier(task, table)
    source = open_source(task, table, seed=seed)
    items = [item for item, _ in zip(distinct_items(source, table, PROMPTS * 10), range(PROMPTS), strict=False)]
    asked = [(item, answer) for item in items for answer in (item.reference or WRONG, _wrong(item, items))]
    num_sound = len(asked)
    asked += [(item, answer) for item in items[:1] for answer in GARBAGE.values()]
    verdicts = _verdicts(task, table, source, asked, as_it_is=bool(table.evaluator))
    references = asked[:num_sound:2] if table.evaluator else []
    evaluated = _verdicts(task, table, source, references)
    sound, of_garbage = verdicts[:num_sound], tuple(verdicts[num_sound:])
    return [
        Trial(task, item.text, item.reference, right, wrong, after, of_garbage if item is items[0] else ())
        for item, right, wrong, after in zip_longest(items, sound[::2], sound[1::2], evaluated)
    ]


def tells_nothing(trials: Sequence[Trial]) -> bool:
    """Whether one task's verifier gave the same reward for everything, from which there is nothing to learn.

    A failure on an unevaluated text is no reward, and gives False.
    """
    verdicts = [verdict for one in trials for verdict in (one.of_reference, one.of_wrong)]
    return len({one.reward for one in verdicts}) == 1 and not any(one.failure for one in verdicts)


def evaluates_nothing(trials: Sequence[Trial]) -> bool:
    """Whether one task's evaluator returned no text for any reference."""
    return all(one.evaluated is not None and one.evaluated.failure for one in trials)


def fails_as_they_are(trials: Sequence[Trial]) -> bool:
    """Whether one task's verifier failed on unevaluated texts, which its evaluator may never return."""
    return any(verdict.failure for one in trials for verdict in (one.of_reference, one.of_wrong, *one.of_garbage))


def _verdicts(
    task: str, table: TaskTable, source: Source, asked: Sequence[tuple[Item, str]], *, as_it_is: bool = False
) -> list[Verdict]:
    """Return the verdicts on these answers; with `as_it_is` no evaluator changes them.

    Raises TaskError where the verifier fails on a text that it must be able to read.
    """
    judge = Judge({task: table.model_copy(update={"evaluator": AS_IT_IS}) if as_it_is else table})
    try:
        verdicts = judge.submit_answers(task, source, asked).result()
    finally:
        judge.close()
    for (item, answer), verdict in zip(asked, verdicts, strict=True):
        if verdict.failure and verdict.failure != UNEVALUATED and not as_it_is:
            raise _refused(task, table, item, answer, verdict)
    return verdicts


def _wrong(item: Item, items: Sequence[Item]) -> str:
    return next((other.reference for other in items if other.reference not in ("", item.reference)), WRONG)


def _refused(task: str, table: TaskTable, item: Item, answer: str, verdict: Verdict) -> TaskError:
    cure = f"fix the verifier: {FAILURES[verdict.failure]}"
    if verdict.failure == TOO_LONG:
        cure = "shorten the prompt or the reference of this row, or remove it"
    made = f"the output of {table.evaluator} for " * bool(table.evaluator)
    return TaskError(
        f"the verifier {table.verifier} failed on {made}the answer {answer[:60]!r} to {item.text[:60]!r}",
        where=f"tasks.{task}.verifier",
        got=f"{verdict.failure}: {verdict.words}",
        wanted="a finite number, or a dict of named finite numbers, for any text",
        cure=cure,
    )
