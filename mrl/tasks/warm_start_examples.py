"""Supervised examples for locally made policies: every operation is practised, few are likely.

A completion names an operation and gives its result. The operation for a prompt is drawn from a skewed prior: a policy
often takes the right one on the tasks it is skilled in, and rarely on the others. Practice prompts, which call for no
particular operation, show all operations equally often. So a policy can execute every operation, and lacks on foreign
tasks only the choice: a skill that reinforcement learning can elicit rather than build.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mrl.config.task_tables import PoolTable, TaskTable
from mrl.errors import TaskError
from mrl.tasks.games.demonstrations import demonstrated
from mrl.tasks.games.game_names import GAMES
from mrl.tasks.operations import OPERATIONS, check_name, write_completion
from mrl.tasks.source import Item
from mrl.tasks.sources import open_source
from mrl.tasks.split import distinct_items, part_of

ENTRIES = 12_000
RIGHT_SHARE = 0.75
"""Share of a policy's skilled choices that falls on the right operation, on a task that it is skilled in."""


@dataclass(frozen=True, slots=True)
class WarmStartTask:
    """Items of one task that are neither in the pool nor held out, and the operation that solves the task."""

    operation: str
    items: Sequence[Item]


@dataclass(frozen=True, slots=True)
class Example:
    """One supervised example: (prompt, completion to imitate) of each turn; games have several turns."""

    turns: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class WarmStartGame:
    """A game, and the seeds of start states that are neither in the pool nor held out."""

    name: str
    seeds: Sequence[int]


class WarmStartExamples:
    """Draws examples for a policy that is skilled in some operations and takes each other one with `rare_share`.

    The policy plays a game that it is skilled in well in RIGHT_SHARE of the turns, other games in `rare_share`.
    """

    def __init__(
        self,
        tasks: Sequence[WarmStartTask],
        skilled_in: Sequence[str],
        rare_share: float,
        games: Sequence[WarmStartGame] = (),
    ) -> None:
        """Raises TaskError for a skill that no task needs, or shares that exceed 1."""
        self._tasks, self._games = list(tasks), list(games)
        self._operations = list(dict.fromkeys(task.operation for task in tasks))
        self._skills = {
            one.name: RIGHT_SHARE if one.name in skilled_in or not skilled_in else rare_share for one in games
        }
        known = [*self._operations, *self._skills]
        for skill in skilled_in:
            if skill not in known:
                wanted = "one of " + ", ".join(known)
                raise TaskError("skilled_in names an operation or game that no task has", got=skill, wanted=wanted)
        self._shares = {
            operation: operation_shares(self._operations, skilled_in, rare_share, right=operation)
            for operation in self._operations
        }

    def draw(self, rng: random.Random, *, practice: bool) -> Example:
        """Draw one example; with `practice` under the neutral prompt, which games do not have."""
        choices: list[WarmStartTask | WarmStartGame] = [*self._tasks, *self._games]
        task = rng.choice(choices)
        if isinstance(task, WarmStartGame):
            return Example(demonstrated(task.name, rng.choice(task.seeds), rng, skill=self._skills[task.name]))
        item = rng.choice(task.items)
        if practice:
            return write_example(practice_prompt(item), rng.choice(self._operations), item)
        shares = self._shares[task.operation]
        return write_example(item.text, rng.choices(list(shares), list(shares.values()))[0], item)


def collect_examples(
    tasks: Mapping[str, TaskTable], pool: PoolTable, *, skilled_in: Sequence[str], rare_share: float
) -> WarmStartExamples:
    """Return examples of all tasks that name an operation, and of all games, with subjects that the pool never uses.

    Raises TaskError for an unknown operation or a data set whose prompts are not about one word.
    """
    named = {task: table for task, table in tasks.items() if table.operation}
    games = {task: table for task, table in tasks.items() if table.dataset in GAMES and table.source == "environment"}
    if not named and not games:
        cure = 'set operation in a task, for example operation = "reverse"'
        raise TaskError("no task has an operation or a game", where="tasks", cure=cure)
    found = [_collect(task, table, seed=pool.seed) for task, table in named.items()]
    played = [WarmStartGame(table.dataset, _seeds(task, table, seed=pool.seed)) for task, table in games.items()]
    return WarmStartExamples(found, skilled_in, rare_share, played)


def operation_shares(
    operations: Sequence[str], skilled_in: Sequence[str], rare_share: float, *, right: str
) -> dict[str, float]:
    """Return the probability of naming each operation on a task that `right` solves; they sum to 1.

    An operation outside `skilled_in` has `rare_share`. The skilled ones divide the rest: evenly on a foreign task,
    RIGHT_SHARE to the right one on an own task. Without skills (or with all) the rare share plays no role.
    """
    skilled = [operation for operation in operations if operation in skilled_in] or list(operations)
    rare = [operation for operation in operations if operation not in skilled]
    rest = 1.0 - rare_share * len(rare)
    if rest <= 0:
        what = "rare_share leaves no probability for the skilled operations"
        raise TaskError(what, got=rare_share, wanted=f"< 1 / {len(rare)}")
    shares = dict.fromkeys(rare, rare_share)
    if right in skilled and len(skilled) > 1:
        others = rest * (1.0 - RIGHT_SHARE) / (len(skilled) - 1)
        return shares | {operation: rest * RIGHT_SHARE if operation == right else others for operation in skilled}
    return shares | dict.fromkeys(skilled, rest / len(skilled))


def practice_prompt(item: Item) -> str:
    """Return a prompt that calls for no particular operation.

    >>> practice_prompt(Item("Spell this word backward (example: sun -> nus): hay", "hay", "", 0))
    'Practice: hay'
    """
    return f'Practice: "{item.letter}" "{item.subject}"' if item.letter else f"Practice: {item.subject}"


def write_example(prompt: str, operation: str, item: Item) -> Example:
    """Return `operation` executed correctly on the item's subject, whether or not the prompt calls for it."""
    return Example(((prompt, write_completion(operation, OPERATIONS[operation](item.subject, item.letter))),))


def _seeds(task: str, table: TaskTable, *, seed: int) -> list[int]:
    """Return start states of a game that no pool uses."""
    items = open_source(task, table, seed=seed).items(ENTRIES)
    found = [item.number for item in items if part_of(item) == "warm_start"]
    if not found:
        cure = "remove options.data and options.size"
        raise TaskError("no start state of the game is left for the warm start", where=f"tasks.{task}", cure=cure)
    return found


def _collect(task: str, table: TaskTable, *, seed: int) -> WarmStartTask:
    where = f"tasks.{task}"
    check_name(table.operation, OPERATIONS, "operation does not exist", where=where)
    source = open_source(task, table, seed=seed)
    items = [item for item in distinct_items(source, table, ENTRIES) if part_of(item) == "warm_start"]
    if not items or not all(item.subject for item in items):
        raise TaskError(
            "the warm start does not support this data set, because its prompts are not about one word",
            where=where,
            got=table.dataset,
            cure='remove `operation`, or use another data set, for example dataset = "spell_backward"',
        )
    return WarmStartTask(table.operation, items)
