"""The finite prompt pool that all policies cycle over, and the held-out split.

The task tables and `pool.seed` alone determine the prompts, so that all processes and all runs agree.
"""

import hashlib
import heapq
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from mrl.config.task_tables import PoolTable, TaskTable
from mrl.errors import TaskError
from mrl.tasks.benchmarks.catalogue import BENCHMARKS
from mrl.tasks.environments.environment_pool import EpisodeSession
from mrl.tasks.environments.environments import Environments
from mrl.tasks.environments.gateway_location import GatewayLocation
from mrl.tasks.source import Item, Source, Turn
from mrl.tasks.sources import open_source
from mrl.tasks.split import HELD_OUT_PERCENT, LeftOut, distinct_items, part_of
from mrl.tasks.verify import Judge, Verdict, VerificationRequest

MIN_ENTRIES = 2_000
ENTRIES_PER_PROMPT = 25
"""Entries looked at per wanted prompt, MIN_ENTRIES at least in all. Too few distinct prompts in them are an error."""
ALL = sys.maxsize


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `prompt_id` is the task and 16 hex digits of the text's hash: equal in every process and run.

    Example: `Prompt("spell_backward:1f0c...", "spell_backward", "Spell this word backward ...: hay")`.
    """

    prompt_id: str
    task: str
    text: str
    turns: tuple[Turn, ...] = ()
    """Messages of a prompt that is a conversation."""

    @property
    def content(self) -> str | tuple[Turn, ...]:
        """The question for a policy: the text of one user's turn, or the messages of a conversation."""
        return self.turns or self.text


@dataclass(frozen=True, slots=True)
class _Verifiable:
    prompt: Prompt
    source: Source
    item: Item


class TaskPool:
    """Training prompts in seeded, resumable order; held-out prompts; verification of both. Not thread-safe."""

    def __init__(
        self,
        train: list[_Verifiable],
        held_out: list[_Verifiable],
        *,
        order_seed: int,
        judge: Judge,
        environments: Environments,
    ) -> None:
        self._train = [one.prompt for one in train]
        self._held_out = [one.prompt for one in held_out]
        self._trained_ids = {prompt.prompt_id for prompt in self._train}
        self._by_id = {one.prompt.prompt_id: one for one in (*train, *held_out)}
        self._order_seed, self._judge, self._environments = order_seed, judge, environments
        self._epoch, self._order = 0, self._permutation(0)

    def __len__(self) -> int:
        """Number of training prompts."""
        return len(self._train)

    @property
    def held_out(self) -> list[Prompt]:
        """The held-out split, tasks mixed; `prompt_at` never returns one of these prompts."""
        return list(self._held_out)

    @property
    def prompts(self) -> list[Prompt]:
        """All prompts, training prompts first."""
        return [*self._train, *self._held_out]

    def longest(self, count: int) -> list[Prompt]:
        """Return the `count` training prompts with the most bytes."""
        return heapq.nlargest(count, self._train, key=lambda prompt: len(prompt.text.encode()))

    def prompt_at(self, position: int) -> Prompt:
        """Return the training prompt at `position` >= 0 of an endless pass; every epoch has each once, reshuffled."""
        epoch, index = divmod(position, len(self._train))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._permutation(epoch)
        return self._train[self._order[index]]

    def prompt(self, prompt_id: str) -> Prompt:
        """Return the prompt of this id, training or held-out. Raises TaskError when the pool has none."""
        return self._find(prompt_id).prompt

    def submit(self, completions: Sequence[tuple[str, str]], *, rank: int = 0) -> "Future[list[Verdict]]":
        """Return a future of the verdicts on (prompt id, completion text) pairs of one task, in order; never waits.

        Where completions queue for a verifier process, those of a lower `rank` come first. Raises TaskError for an
        unknown id; the future raises RoleFailed when the task's verifier cannot be started.
        """
        return self._judge.submit(self._questions(completions), rank=rank)

    @property
    def has_episodes(self) -> bool:
        """Whether any prompt is a start state of an environment."""
        return any(self.is_episode(prompt.prompt_id) for prompt in self.prompts)

    def is_episode(self, prompt_id: str) -> bool:
        """Whether the prompt is a start state of an environment, which asks the question."""
        return self._environments.has(self.prompt(prompt_id).task)

    def open_episode(self, prompt_id: str) -> EpisodeSession:
        """Begin an episode from this start state; never waits."""
        found = self._find(prompt_id)
        return self._environments.open(found.prompt.task, found.item)

    def verifier_values(self) -> dict[str, float]:
        """Return metrics of verifier and environment processes, totals since the start; empty when no task has any."""
        return self._judge.values() | self._environments.values()

    def close(self) -> None:
        """End the processes of verifiers and environments."""
        self._judge.close()
        self._environments.close()

    def _questions(self, completions: Sequence[tuple[str, str]]) -> list[VerificationRequest]:
        found = [(self._find(prompt_id), text) for prompt_id, text in completions]
        return [
            VerificationRequest(
                one.prompt.task,
                one.source,
                one.item,
                text,
                is_voted=self._judge.is_voted(one.prompt.task) and one.prompt.prompt_id in self._trained_ids,
            )
            for one, text in found
        ]

    def _find(self, prompt_id: str) -> _Verifiable:
        try:
            return self._by_id[prompt_id]
        except KeyError:
            cure = "run all processes with the same tasks, pool settings and package versions"
            raise TaskError("the prompt id is not in the pool", got=prompt_id, cure=cure) from None

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self._order_seed, epoch]).permutation(len(self._train))


def build_pool(
    tasks: Mapping[str, TaskTable],
    pool: PoolTable,
    *,
    order_seed: int | None = None,
    meeting: GatewayLocation | None = None,
    on_note: Callable[[str], None] = lambda note: None,
) -> TaskPool:
    """Build the pool that the configuration describes: held-out prompts spread evenly over the tasks, others by weight.

    `order_seed` orders the training prompts (by default `pool.seed` does); it must be the same for all policies. At
    `meeting` the episodes of a run meet their agents. `on_note` gets a line about rows of data that are left out.
    Raises TaskError for a task that does not exist or a data set with too few distinct prompts, MissingError for
    missing data or packages.
    """
    weights = [table.weight for table in tasks.values()]
    num_train = spread(pool.train_prompts, weights)
    num_held_out = spread(pool.held_out_prompts, [1.0] * len(tasks))
    train: list[list[_Verifiable]] = []
    held_out: list[_Verifiable] = []
    for index, (task, table) in enumerate(tasks.items()):
        source = open_source(task, table, seed=pool.seed)
        left_out: Counter[LeftOut] = Counter()
        wanted = {"train": num_train[index], "held_out": num_held_out[index]}
        chosen = _choose(task, table, source, wanted, left_out)
        if source.is_finite:
            for note in _left_out(task, table, left_out):
                on_note(note)
        train.append(chosen[0])
        held_out += chosen[1]
    mixed = np.random.default_rng([pool.seed, len(held_out)]).permutation(len(held_out))
    chosen_seed = pool.seed if order_seed is None else order_seed
    mixture = [one for part in (train if pool.train_prompts else _weighed(train, weights)) for one in part]
    return TaskPool(
        mixture,
        [held_out[i] for i in mixed],
        order_seed=chosen_seed,
        judge=Judge(tasks),
        environments=Environments(tasks, meeting),
    )


def prompt_id_of(task: str, text: str) -> str:
    """Return the id of a prompt, equal across processes and policies."""
    return f"{task}:{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def spread(total: int, weights: Sequence[float]) -> list[int]:
    """Return the number of prompts of each task, by largest remainders; a total of 0 means all, without weight none.

    Raises TaskError where no task has any weight.
    """
    if not any(weights):
        cure = "set tasks.NAME.weight above 0 for a task to train on"
        raise TaskError("no task has a weight above 0", where="tasks", cure=cure)
    if not total:
        return [ALL if weight else 0 for weight in weights]
    shares = [total * Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    given = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: (given[index] - shares[index], index))
    for index in by_remainder[: total - sum(given)]:
        given[index] += 1
    return given


def _weighed(parts: Sequence[list[_Verifiable]], weights: Sequence[float]) -> list[list[_Verifiable]]:
    """Return the first prompts of each task, in proportion to the weights; equal weights take all prompts."""
    if len({weight for weight in weights if weight}) <= 1:
        return list(parts)
    unit = min(Fraction(len(part)) / Fraction(weight) for part, weight in zip(parts, weights, strict=True) if weight)
    return [part[: int(unit * Fraction(weight))] for part, weight in zip(parts, weights, strict=True)]


def _left_out(task: str, table: TaskTable, left_out: Counter[LeftOut]) -> Iterator[str]:
    why: dict[LeftOut, str] = {
        "repeated": "another row has the same prompt",
        "contradicted": "another row has the same prompt and a different reference, and is used",
        "too long": f"the prompt is longer than max_prompt_chars = {table.max_prompt_chars}",
    }
    yield from (f"tasks.{task}: rows left out: {left_out[kind]}; {why[kind]}" for kind in why if left_out[kind])


def _choose(
    task: str, table: TaskTable, source: Source, wanted: Mapping[str, int], left_out: Counter[LeftOut]
) -> tuple[list[_Verifiable], list[_Verifiable]]:
    if ALL in wanted.values() and not source.is_finite:
        cure = "set pool.train_prompts and pool.held_out_prompts above 0"
        raise TaskError(
            f"data set {table.dataset!r} is endless, so the number of prompts must be given",
            where=f"tasks.{task}",
            cure=cure,
        )
    chosen: dict[str, list[_Verifiable]] = {"train": [], "held_out": []}
    limit = max(MIN_ENTRIES, ENTRIES_PER_PROMPT * sum(wanted.values()))
    for item in distinct_items(source, table, limit, left_out):
        part = part_of(item)
        if len(chosen.get(part, ())) < wanted.get(part, 0):
            prompt = Prompt(prompt_id_of(task, item.text), task, item.text, item.turns)
            chosen[part].append(_Verifiable(prompt, source, item))
        if all(len(chosen[part]) == number for part, number in wanted.items()):
            break
    if any(len(found) < (wanted[part] if wanted[part] != ALL else 1) for part, found in chosen.items()):
        raise _too_few(task, table, chosen, wanted, left_out["too long"])
    return chosen["train"], chosen["held_out"]


def _too_few(
    task: str, table: TaskTable, chosen: Mapping[str, Sequence[object]], wanted: Mapping[str, int], num_too_long: int
) -> TaskError:
    is_benchmark = table.source == "benchmark"
    is_file = is_benchmark or table.source in ("jsonl", "math")
    short = [part for part, found in chosen.items() if len(found) < (1 if wanted[part] == ALL else wanted[part])]
    cure = "lower " + " and ".join(f"pool.{part}_prompts" for part in short)
    cure += " (0 uses all rows)" if is_file else ", or set options that allow more distinct prompts"
    if any(wanted[part] == ALL for part in short) and not is_benchmark:
        cure = f"add rows: a hash of each prompt holds out about {HELD_OUT_PERCENT} % of them"
        cure += f"; or set tasks.{task}.options.held_out to a file of held-out prompts" * (table.source == "jsonl")
    if is_benchmark and wanted["train"] and not BENCHMARKS[table.dataset].train:
        cure = f"set tasks.{task}.weight = 0 (only evaluated): this benchmark has no training split"
    elif num_too_long:
        cure = f"raise tasks.{task}.max_prompt_chars, which leaves out {num_too_long} longer prompts; or {cure}"
    train, held_out = ("at least 1" if wanted[part] == ALL else str(wanted[part]) for part in ("train", "held_out"))
    return TaskError(
        f"data set {table.dataset!r} has too few distinct prompts",
        where=f"tasks.{task}",
        got=f"{len(chosen['train'])} for training and {len(chosen['held_out'])} held out",
        wanted=f"{train} and {held_out}",
        cure=cure,
    )
