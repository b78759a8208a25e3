"""Was the answer right? Verdicts on completions, in this process or in processes of their own."""

import subprocess
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from mrl.config.schema import TaskTable
from mrl.errors import TaskError
from mrl.tasks.source import Item, Source
from mrl.tasks.verifier_pool import START_S, Outcome, VerifierPool, verifier_argv

MIB = 1024**2
Before = TypeVar("Before")
After = TypeVar("After")


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reward` is 1.0 for a right answer and else 0.0; `raw_score` is the data set's own number, for display only.

    Scorers give partial credit even to nonsense, which is why training never sees `raw_score`. `failure` says why an
    answer could not be judged ("verifier_timeout", "verifier_crash", ...); it then counts as wrong.
    """

    reward: float
    raw_score: float
    extracted: str
    failure: str = ""


@dataclass(frozen=True, slots=True)
class VerificationRequest:
    """One completion of an item of a task."""

    task: str
    source: Source
    item: Item
    completion: str


class Judge:
    """Verdicts on completions of all tasks, as they come. Threads and processes are started when first needed.

    One thread hands in and closes.
    """

    def __init__(self, tasks: Mapping[str, TaskTable]) -> None:
        self._tasks = tasks
        self._pools: dict[str, VerifierPool] = {}
        self._quick: ThreadPoolExecutor | None = None

    def submit(self, questions: Sequence[VerificationRequest], *, rank: int = 0) -> "Future[list[Verdict]]":
        """The verdicts on completions of one task, in order, once all are there; never waits.

        Where completions queue for a process, those of a lower `rank` come first.
        The future raises RoleFailed when the task's verifier cannot be started.
        """
        if not questions or not questions[0].source.verifier:
            self._quick = self._quick or ThreadPoolExecutor(1, thread_name_prefix="scoring")
            return self._quick.submit(lambda: [judge(one.source, one.item, one.completion) for one in questions])
        answers = [question.source.extract(question.completion) for question in questions]
        asked = [(question, answer) for question, answer in zip(questions, answers, strict=True) if answer]
        pool = self._pool(questions[0].task, questions[0].source)
        outcomes = pool.submit([(self._reference(question), answer) for question, answer in asked], rank=rank)
        return _then(outcomes, lambda found: _verdicts(answers, found))

    def judge(self, questions: Sequence[VerificationRequest]) -> list[Verdict]:
        """One verdict per question of any tasks, in order; waits. Raises RoleFailed as `submit`."""
        places: defaultdict[str, list[int]] = defaultdict(list)
        for index, question in enumerate(questions):
            places[question.task].append(index)
        futures = {task: self.submit([questions[index] for index in found]) for task, found in places.items()}
        verdicts: dict[int, Verdict] = {}
        for task, future in futures.items():
            verdicts.update(zip(places[task], future.result(), strict=True))
        return [verdicts[index] for index in range(len(questions))]

    def values(self) -> dict[str, float]:
        """Metrics over all tasks that are verified in processes of their own: totals, and what waits now."""
        if not self._pools:
            return {}
        counts = [pool.counts for pool in list(self._pools.values())]  # another thread may begin one
        return {
            "verify/answers": float(sum(one.answers for one in counts)),
            "verify/pending": float(sum(one.handed_in - one.answers for one in counts)),
            "verify/timeouts": float(sum(one.timeouts for one in counts)),
            "verify/crashes": float(sum(one.crashes for one in counts)),
        }

    def close(self) -> None:
        """End the processes; they also end with this one. What is not judged by then is cancelled."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        if self._quick is not None:
            self._quick.shutdown(cancel_futures=True)
            self._quick = None

    def _reference(self, question: VerificationRequest) -> str:
        """What the verifier is given beside the answer; a person's own one gets what the data set states."""
        is_own = bool(self._tasks[question.task].verifier)
        return question.item.reference if is_own else question.source.verifier_reference(question.item)

    def _pool(self, task: str, source: Source) -> VerifierPool:
        if task not in self._pools:
            table = self._tasks[task]
            self._pools[task] = VerifierPool(
                source.verifier,
                processes=table.verifier_processes,
                timeout_s=table.verifier_timeout_s,
                memory_bytes=table.verifier_memory_mib * MIB,
            )
        return self._pools[task]


def check_verifier(task: str, table: TaskTable) -> None:
    """Start a process of the task's own verifier once. Raises TaskError, with the reason, when it does not start."""
    argv = verifier_argv(
        table.verifier, memory_bytes=table.verifier_memory_mib * MIB, timeout_s=table.verifier_timeout_s
    )
    try:
        trial = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=START_S, check=False)
    except subprocess.TimeoutExpired:
        reason = f"it is not ready after {START_S:.0f} s"
    else:
        if trial.returncode == 0:
            return
        said = trial.stderr.decode(errors="replace").split("\n")
        reason = next((line for line in reversed(said) if line.strip()), f"exit code {trial.returncode}")
    raise TaskError(
        f"the verifier {table.verifier} does not start ({reason.strip()})",
        where=f"tasks.{task}.verifier",
        wanted='"module:function" of an installed module, one on PYTHONPATH, or one in the folder where mrl is started',
    )


def judge(source: Source, item: Item, completion: str) -> Verdict:
    """The verdict on a completion: right means that the data set's own scorer gives exactly 1.0."""
    extracted = source.extract(completion)
    return _verdict(source.score(item, extracted), extracted)


def _verdict(raw_score: float, extracted: str, failure: str = "") -> Verdict:
    return Verdict(1.0 if raw_score == 1.0 else 0.0, raw_score, extracted, failure)


def _verdicts(answers: Sequence[str], outcomes: Sequence[Outcome]) -> list[Verdict]:
    """Verdicts on extracted answers; of the outcomes there is one for each that is not empty."""
    found = iter(outcomes)
    verdicts = []
    for answer in answers:
        outcome = next(found) if answer else Outcome(0.0, "no_answer")
        verdicts.append(_verdict(outcome.score, answer, outcome.failure))
    return verdicts


def _then(future: "Future[Before]", convert: Callable[[Before], After]) -> "Future[After]":
    """A future of what `convert` makes of the result."""
    converted: Future[After] = Future()

    def settle(done: "Future[Before]") -> None:
        if done.cancelled():
            converted.cancel()
        elif (error := done.exception()) is not None:
            converted.set_exception(error)
        else:
            converted.set_result(convert(done.result()))

    future.add_done_callback(settle)
    return converted
