"""Supervised examples for locally made policies: every operation is practised, few are likely.

A completion names an operation and gives its result. Which operation a prompt calls for is drawn from a skewed prior:
a policy often takes the right one on the tasks it is skilled in, and rarely on the others. Practice prompts, which call
for no operation in particular, show all of them equally often. So a policy can execute everything, and what it lacks on
foreign tasks is the choice: a skill that reinforcement learning can elicit rather than build.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mrl.config.schema import PoolTable, TaskTable
from mrl.errors import TaskError
from mrl.tasks.operations import OPERATIONS, check_operation, write_completion
from mrl.tasks.source import Item
from mrl.tasks.sources import open_source
from mrl.tasks.split import distinct_items, part_of

ENTRIES = 12_000
RIGHT_SHARE = 0.75
"""On a task it is skilled in, this share of a policy's skilled choices falls on the right operation."""


@dataclass(frozen=True, slots=True)
class WarmStartTask:
    """Items of one task that are neither in the pool nor held out, and the operation that solves it."""

    operation: str
    items: Sequence[Item]


@dataclass(frozen=True, slots=True)
class Example:
    """One supervised example: the text of a prompt, and of the completion to imitate."""

    prompt: str
    completion: str


class WarmStartExamples:
    """Draws examples for a policy that is skilled in some operations and takes each other one with `rare_share`."""

    def __init__(self, tasks: Sequence[WarmStartTask], skilled_in: Sequence[str], rare_share: float) -> None:
        """Raises TaskError for a skill that no task needs, or shares that exceed 1."""
        self._tasks = list(tasks)
        self._operations = list(dict.fromkeys(task.operation for task in tasks))
        for skill in skilled_in:
            if skill not in self._operations:
                wanted = "one of " + ", ".join(self._operations)
                raise TaskError("skilled_in names an operation that no task needs", got=skill, wanted=wanted)
        self._shares = {
            operation: operation_shares(self._operations, skilled_in, rare_share, right=operation)
            for operation in self._operations
        }

    def draw(self, rng: random.Random, *, practice: bool) -> Example:
        """One example; with `practice` under the neutral prompt."""
        task = rng.choice(self._tasks)
        item = rng.choice(task.items)
        if practice:
            return write_example(practice_prompt(item), rng.choice(self._operations), item)
        shares = self._shares[task.operation]
        return write_example(item.text, rng.choices(list(shares), list(shares.values()))[0], item)


def collect_examples(
    tasks: Mapping[str, TaskTable], pool: PoolTable, *, skilled_in: Sequence[str], rare_share: float
) -> WarmStartExamples:
    """Examples of all tasks that name an operation, made of subjects that the pool never uses.

    Raises TaskError for an unknown operation or a data set whose prompts are not about one word.
    """
    named = {task: table for task, table in tasks.items() if table.operation}
    if not named:
        raise TaskError("no task names its operation", where="tasks", cure='for example operation = "reverse"')
    found = [_collect(task, table, seed=pool.seed) for task, table in named.items()]
    return WarmStartExamples(found, skilled_in, rare_share)


def operation_shares(
    operations: Sequence[str], skilled_in: Sequence[str], rare_share: float, *, right: str
) -> dict[str, float]:
    """Probability of naming each operation on a task that `right` solves; they sum to 1.

    An operation outside `skilled_in` has `rare_share`. The skilled ones divide the rest: evenly on a foreign task,
    RIGHT_SHARE to the right one on an own task. Without skills (or with all) the rare share plays no role.
    """
    skilled = [operation for operation in operations if operation in skilled_in] or list(operations)
    rare = [operation for operation in operations if operation not in skilled]
    rest = 1.0 - rare_share * len(rare)
    if rest <= 0:
        raise TaskError("rare_share leaves nothing for the skills", got=rare_share, wanted=f"< 1 / {len(rare)}")
    shares = dict.fromkeys(rare, rare_share)
    if right in skilled and len(skilled) > 1:
        others = rest * (1.0 - RIGHT_SHARE) / (len(skilled) - 1)
        return shares | {operation: rest * RIGHT_SHARE if operation == right else others for operation in skilled}
    return shares | dict.fromkeys(skilled, rest / len(skilled))


def practice_prompt(item: Item) -> str:
    """A prompt that calls for no operation in particular.

    >>> practice_prompt(Item("Spell this word backward (example: sun -> nus): hay", "hay", "", 0))
    'Practice: hay'
    """
    return f'Practice: "{item.letter}" "{item.subject}"' if item.letter else f"Practice: {item.subject}"


def write_example(prompt: str, operation: str, item: Item) -> Example:
    """`operation` executed correctly on the item's subject, whether or not the prompt calls for it."""
    return Example(prompt, write_completion(operation, OPERATIONS[operation](item.subject, item.letter)))


def _collect(task: str, table: TaskTable, *, seed: int) -> WarmStartTask:
    where = f"tasks.{task}"
    check_operation(table.operation, where=where)
    source = open_source(task, table, seed=seed)
    items = [item for item in distinct_items(source, table, ENTRIES) if part_of(item) == "warm_start"]
    if not items or not all(item.subject for item in items):
        raise TaskError(
            "no warm start is known for this data set, because its prompts are not about one word",
            where=where,
            got=table.dataset,
            cure='leave out `operation`, or take for example dataset = "spell_backward"',
        )
    return WarmStartTask(table.operation, items)
