"""Verdicts on completions, from this process or from processes of their own."""

import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from mrl.config.task_tables import TaskTable
from mrl.errors import TaskError
from mrl.plugins import near_module
from mrl.tasks import verifier_process
from mrl.tasks.judging.judge_model import judge_environment
from mrl.tasks.rewards import (
    MAX_REWARD,
    NAMES,
    RAISED,
    TOO_LARGE,
    UNNAMED,
    UNREADABLE,
    Outcome,
    failed,
    other_names,
    outcome_of,
    weighted_sum,
)
from mrl.tasks.sealed.sealing import sealing_of
from mrl.tasks.source import Item, Source
from mrl.tasks.verifier_pool import START_S, VerifierPool, verifier_argv
from mrl.tasks.verifier_process import VerifierCall

MIB = 1024**2
_FRAME = re.compile(r'  File "([^"]+)", line (\d+)')
"""A line of a traceback."""
Before = TypeVar("Before")
After = TypeVar("After")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reward of an answer. Where the verifier gave none, `failure` is the kind of its failure, `words` the cause.

    A task's own verifier decides the number. Of a data set's own scorer only the full score, 1.0, is rewarded, by 1.0:
    scorers give partial credit even to nonsense.
    """

    reward: float
    extracted: str
    """The part of the completion that was judged; empty where there is none, and the answer then counts as failed."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    failure: str = ""
    words: str = ""
    is_voted: bool = False
    """Whether the collective votes on `extracted`; then there is no reward yet."""


@dataclass(frozen=True, slots=True)
class VerificationRequest:
    """One completion of an item of a task."""

    task: str
    source: Source
    item: Item
    completion: str
    is_voted: bool = False
    """Whether the collective votes on the answer: only for a training prompt. The data set judges held-out ones."""


class Judge:
    """Verdicts on completions of all tasks, as they come. Threads and processes are started when first needed.

    Only one thread may hand in and close.
    """

    def __init__(self, tasks: Mapping[str, TaskTable]) -> None:
        self._tasks = tasks
        self._pools: dict[str, VerifierPool] = {}
        self._quick: ThreadPoolExecutor | None = None
        self._names: dict[str, tuple[str, ...]] = {}
        """Task -> names of the rewards of its first answer; written only by the thread of the task's pool."""

    def submit(self, questions: Sequence[VerificationRequest], *, rank: int = 0) -> "Future[list[Verdict]]":
        """Return a future of the verdicts on completions of one task, in order; never waits.

        Where completions queue for a process, those of a lower `rank` come first. The future raises RoleFailed when the
        task's verifier cannot be started.
        """
        if not questions or questions[0].is_voted or not questions[0].source.verifier:
            self._quick = self._quick or ThreadPoolExecutor(1, thread_name_prefix="scoring")
            return self._quick.submit(lambda: [self._at_once(one) for one in questions])
        task, source = questions[0].task, questions[0].source
        answers = [(question.item, source.extract(question.completion)) for question in questions]
        return self.submit_answers(task, source, answers, rank=rank)

    def submit_answers(
        self, task: str, source: Source, answers: Sequence[tuple[Item, str]], *, rank: int = 0
    ) -> "Future[list[Verdict]]":
        """Submit answers that were extracted already, of a task with a verifier; otherwise as `submit`."""
        calls = [self._call(task, source, item, answer) for item, answer in answers if answer]
        outcomes = self._pool(task, source).submit(calls, rank=rank)
        return _then(outcomes, lambda found: self._verdicts(task, [answer for _, answer in answers], found))

    def values(self) -> dict[str, float]:
        """Return metrics over all tasks that are verified in separate processes: totals, and answers waiting now."""
        if not self._pools:
            return {}
        counts = [pool.counts for pool in list(self._pools.values())]  # another thread may begin one
        failures = sum((one.failures.copy() for one in counts), Counter[str]())
        spent = Counter[str]()
        for one in counts:
            spent.update(one.spent)  # a sum would leave zeros out
        return {
            "verify/answers": float(sum(one.answers for one in counts)),
            "verify/pending": float(sum(one.handed_in - one.answers for one in counts)),
            **{f"verify/failures/{kind}": float(count) for kind, count in sorted(failures.items())},
            **{f"verify/judge/{what}": float(count) for what, count in sorted(spent.items())},
        }

    def close(self) -> None:
        """End the processes, which also end with this one, and cancel all that is not judged by then."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        if self._quick is not None:
            self._quick.shutdown(cancel_futures=True)
            self._quick = None

    def is_voted(self, task: str) -> bool:
        """Whether the collective votes on answers to the task's training prompts."""
        return self._tasks[task].is_voted

    def _at_once(self, question: VerificationRequest) -> Verdict:
        """Return the verdict of the data set's scorer; for a vote only the extracted answer: no label is read."""
        if not question.is_voted:
            return judge(question.source, question.item, question.completion)
        extracted = question.source.extract(question.completion).strip()
        return Verdict(0.0 if extracted else self._tasks[question.task].failed_reward, extracted, is_voted=True)

    def _call(self, task: str, source: Source, item: Item, answer: str) -> VerifierCall:
        """Return the request to a verifier; a user's own verifier gets the reference that the data set states."""
        reference = item.reference if self._is_own(task) else source.verifier_reference(item)
        return VerifierCall(reference, answer, item.text, item.row)

    def _is_own(self, task: str) -> bool:
        return bool(self._tasks[task].own_verifier)

    def _verdicts(self, task: str, answers: Sequence[str], outcomes: Sequence[Outcome]) -> list[Verdict]:
        """Return verdicts on extracted answers; `outcomes` has one outcome for each answer that is not empty."""
        found = iter(outcomes)
        nothing = Verdict(self._tasks[task].failed_reward, "")
        return [self._verdict(task, answer, next(found)) if answer else nothing for answer in answers]

    def _verdict(self, task: str, answer: str, outcome: Outcome) -> Verdict:
        table = self._tasks[task]
        if not self._is_own(task):
            return _full_score(outcome, answer, failed_reward=table.failed_reward)
        outcome = outcome if outcome.failure else self._with_known_names(task, outcome)
        if outcome.failure:
            return Verdict(table.failed_reward, answer, failure=outcome.failure, words=outcome.words)
        named = {name: reward for name, reward in outcome.rewards.items() if name != UNNAMED}
        return Verdict(weighted_sum(outcome.rewards, table.reward_weights), answer, named)

    def _with_known_names(self, task: str, outcome: Outcome) -> Outcome:
        """Return the outcome, or a failure where its names are not the task's or the weighted sum is beyond bounds."""
        weights = self._tasks[task].reward_weights
        known = tuple(weights) or self._names.setdefault(task, tuple(outcome.rewards))
        known_from = f"tasks.{task}.reward_weights has" if weights else "the first answer had"
        if problem := other_names(outcome.rewards, known, known_from=known_from):
            return failed(NAMES, problem)
        total = weighted_sum(outcome.rewards, weights)
        if abs(total) > MAX_REWARD:
            what = f"the weighted sum {total:g} exceeds {MAX_REWARD:,.0f} in absolute value; lower the weights"
            return failed(TOO_LARGE, what)
        return outcome

    def _pool(self, task: str, source: Source) -> VerifierPool:
        if task not in self._pools:
            table = self._tasks[task]
            self._pools[task] = VerifierPool(
                source.verifier,
                processes=table.verifier_processes,
                timeout_s=table.verifier_timeout_s,
                memory_bytes=table.verifier_memory_mib * MIB,
                sealing=sealing_of(task, table, evaluates=source.evaluates),
                environment=judge_environment(table, os.environ),
            )
        return self._pools[task]


def check_verifier(task: str, table: TaskTable) -> None:
    """Start a process of the task's own verifier once. Raises TaskError, with the reason, when it does not start."""
    argv = verifier_argv(
        table.verifier,
        memory_bytes=table.verifier_memory_mib * MIB,
        timeout_s=table.verifier_timeout_s,
        sealing=sealing_of(task, table, evaluates=False),
    )
    try:
        trial = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=START_S, check=False)
    except subprocess.TimeoutExpired:
        reason, cure = f"not ready after {START_S:.0f} s", ""
    else:
        if trial.returncode == 0:
            return
        said = trial.stderr.decode(errors="replace").split("\n")
        reason = next((line for line in reversed(said) if line.strip()), f"exit code {trial.returncode}")
        cure = _cure_of_start(table.verifier, said)
    raise TaskError(
        f"the verifier {table.verifier} does not start ({reason.strip()})",
        where=f"tasks.{task}.verifier",
        wanted='"module:function" in a module that is installed, on PYTHONPATH, or beside the configuration file',
        cure=cure,
    )


def _cure_of_start(verifier: str, said: Sequence[str]) -> str:
    """Return where a user's module ended its own import, or which module may have been meant; "" for other reasons."""
    places = [found.groups() for line in said if (found := _FRAME.match(line))]
    files = [file for file, _ in places]
    begun = len(files) - files[::-1].index(verifier_process.__file__) if verifier_process.__file__ in files else 0
    if own := [f"line {line} of {file}" for file, line in places[begun:] if "importlib" not in file]:
        return f"see {own[-1]}"
    is_missing = any(line.startswith("ModuleNotFoundError") for line in said)
    return near_module(verifier.partition(":")[0]) if is_missing else ""


def judge(source: Source, item: Item, completion: str) -> Verdict:
    """Return the verdict on a completion by the data set's own scorer, which runs in this process."""
    extracted = source.extract(completion)
    return _full_score(outcome_of(source.score(item, extracted)), extracted, failed_reward=0.0)


def _full_score(outcome: Outcome, answer: str, *, failed_reward: float) -> Verdict:
    """Return a verdict with reward 1.0 for the full score of a data set's own scorer, else without.

    A scorer that raises is not at fault: it cannot read the answer.
    """
    if outcome.failure:
        failure = UNREADABLE if outcome.failure == RAISED else outcome.failure
        return Verdict(failed_reward, answer, failure=failure, words=outcome.words)
    if set(outcome.rewards) != {UNNAMED}:  # a scorer gives one number: other code has answered in its place
        words = f"the scorer returned rewards named {sorted(outcome.rewards)[:5]}; wanted one number"
        return Verdict(failed_reward, answer, failure=NAMES, words=words)
    return Verdict(float(outcome.rewards[UNNAMED] == 1.0), answer)


def _then(future: "Future[Before]", convert: Callable[[Before], After]) -> "Future[After]":
    """Return a future of the converted result."""
    converted: Future[After] = Future()

    def settle(done: "Future[Before]") -> None:
        if done.cancelled():
            converted.cancel()
            return
        try:
            converted.set_result(convert(done.result()))
        except BaseException as error:  # noqa: BLE001 - whoever awaits the verdicts raises it; nobody else hears of it
            converted.set_exception(error)

    future.add_done_callback(settle)
    return converted
