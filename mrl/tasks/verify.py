"""Was the answer right? Verdicts on completions, in this process or in processes of their own."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mrl.config.schema import TaskTable
from mrl.tasks.source import Item, Source
from mrl.tasks.verifier_pool import VerifierPool


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
class Question:
    """One completion of an item of a task."""

    task: str
    source: Source
    item: Item
    completion: str


class Judge:
    """Verdicts on completions of all tasks. Processes are started when a source first needs them. Not thread-safe."""

    def __init__(self, tasks: Mapping[str, TaskTable]) -> None:
        self._tasks = tasks
        self._pools: dict[str, VerifierPool] = {}

    def judge(self, questions: Sequence[Question]) -> list[Verdict]:
        """One verdict per question, in order."""
        outside: defaultdict[str, list[int]] = defaultdict(list)
        verdicts: dict[int, Verdict] = {}
        for index, question in enumerate(questions):
            if question.source.verifier:
                outside[question.task].append(index)
            else:
                verdicts[index] = judge(question.source, question.item, question.completion)
        for task, places in outside.items():
            found = self._judge_outside(task, [questions[index] for index in places])
            verdicts.update(zip(places, found, strict=True))
        return [verdicts[index] for index in range(len(questions))]

    def values(self) -> dict[str, float]:
        """Metrics: totals since the start, over all tasks that are verified in processes of their own."""
        if not self._pools:
            return {}
        counts = [pool.counts for pool in self._pools.values()]
        return {
            "verify/answers": float(sum(one.answers for one in counts)),
            "verify/timeouts": float(sum(one.timeouts for one in counts)),
            "verify/crashes": float(sum(one.crashes for one in counts)),
        }

    def close(self) -> None:
        """End the processes; they also end with this one."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _judge_outside(self, task: str, questions: Sequence[Question]) -> list[Verdict]:
        answers = [question.source.extract(question.completion) for question in questions]
        asked = [(index, answer) for index, answer in enumerate(answers) if answer]
        verdicts = [Verdict(0.0, 0.0, "", "no_answer")] * len(questions)
        pairs = [(questions[index].item.reference, answer) for index, answer in asked]
        outcomes = self._pool(task, questions[0].source).verify(pairs) if pairs else []
        for (index, answer), outcome in zip(asked, outcomes, strict=True):
            verdicts[index] = _verdict(outcome.score, answer, outcome.failure)
        return verdicts

    def _pool(self, task: str, source: Source) -> VerifierPool:
        if task not in self._pools:
            table = self._tasks[task]
            self._pools[task] = VerifierPool(
                source.verifier, processes=table.verifier_processes, timeout_s=table.verifier_timeout_s
            )
        return self._pools[task]


def judge(source: Source, item: Item, completion: str) -> Verdict:
    """The verdict on a completion: right means that the data set's own scorer gives exactly 1.0."""
    extracted = source.extract(completion)
    return _verdict(source.score(item, extracted), extracted)


def _verdict(raw_score: float, extracted: str, failure: str = "") -> Verdict:
    return Verdict(1.0 if raw_score == 1.0 else 0.0, raw_score, extracted, failure)
