"""The books of one evaluation: answers to held-out prompts that wait, that are being given, and that came.

All answers to a prompt are begun before those to the next prompt. An answer lost with a worker or an engine waits
again, a bounded number of times: an answer that takes engines down with it then counts as missing.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mrl.config.schema import RunConfig
from mrl.metrics.pass_at_k import Majority, estimate, majority, passes
from mrl.records.evaluation_messages import Estimate, EvaluatedAnswer, EvaluationResult, PromptTally, TaskAccuracy
from mrl.records.rollouts import HeldOutAnswer, HeldOutItem
from mrl.records.version import Version
from mrl.tasks.pool import Prompt

MAX_GRANTS = 3
"""Most grants of one answer. A worker survives one loss of its engine more than that."""
SHOWN_PER_TASK = 3


@dataclass(frozen=True, slots=True)
class Measure:
    """Measures of an evaluation."""

    success_reward: float = 1.0
    """Least reward of a right answer."""
    samples: int = 1
    """Answers to every prompt."""
    ks: tuple[int, ...] = (1,)
    """k of each pass@k, none above `samples`."""


PLAIN = Measure()


def measure_of(config: RunConfig) -> Measure:
    """Return the measures that a run's configuration defines."""
    table = config.evaluation
    return Measure(config.run.success_reward, table.samples, tuple(sorted(set(table.k))))


class HeldOutTally:
    """The answers to all prompts, for the evaluation of one version. Without a clock; not thread-safe."""

    def __init__(
        self,
        policy: str,
        version: Version,
        prompts: Sequence[Prompt],
        *,
        began_s: float,
        measure: Measure = PLAIN,
    ) -> None:
        """Begin with all answers waiting.

        The place of an answer is the number of its prompt times `measure.samples`, plus its number among the prompt's
        answers.
        """
        self.version = version
        self._measure = measure
        self._policy, self._prompts, self._began_s = policy, list(prompts), began_s
        self._num_places = len(self._prompts) * measure.samples
        self._waiting = deque(range(self._num_places))
        self._is_waiting = set(self._waiting)
        """Places in the queue that still wait; other places in the queue are skipped."""
        self._running: dict[int, str] = {}
        """Place of an answer -> worker that gives it."""
        self._grants: Counter[int] = Counter()
        self._answers: dict[int, HeldOutAnswer] = {}
        self._num_answered = 0

    @property
    def num_waiting(self) -> int:
        """Answers that no worker gives yet."""
        return len(self._is_waiting)

    @property
    def num_missing(self) -> int:
        """Answers that have not come so far."""
        return self._num_places - self._num_answered

    @property
    def is_over(self) -> bool:
        """Whether no answer is awaited any more."""
        return not self._is_waiting and not self._running

    def grant(self, worker: str, most: int) -> list[HeldOutItem]:
        """Grant the next answers to a worker, at most `most`."""
        items: list[HeldOutItem] = []
        while self._is_waiting and len(items) < most:
            place = self._waiting.popleft()
            if place not in self._is_waiting:
                continue
            self._is_waiting.remove(place)
            self._running[place] = worker
            self._grants[place] += 1
            items.append(
                HeldOutItem(
                    ticket=self._ticket(place),
                    prompt_id=self._prompt(place).prompt_id,
                    version=self.version,
                    sample=place % self._measure.samples,
                )
            )
        return items

    def accept(self, answer: HeldOutAnswer) -> bool:
        """Take an answer, also while its prompt waits again; return False for another book's or a repeated answer."""
        kind, _, number = answer.ticket.rpartition(".")
        if f"{kind}." != self._ticket("") or not number.isdigit() or int(number) >= self._num_places:
            return False
        place = int(number)
        if place in self._answers or not self._grants[place]:
            return False
        self._running.pop(place, None)
        self._is_waiting.discard(place)
        self._answers[place] = answer
        self._num_answered += _came(answer)
        return True

    def lose(self, is_lost: Callable[[str, str], bool]) -> int:
        """Have the answers for which `is_lost` (worker, ticket) wait again, first ones first; return their number.

        An answer that was granted too often is given up.
        """
        lost = [place for place, worker in self._running.items() if is_lost(worker, self._ticket(place))]
        for place in sorted(lost, reverse=True):
            del self._running[place]
            if self._grants[place] < MAX_GRANTS:
                self._waiting.appendleft(place)
                self._is_waiting.add(place)
        return len(lost)

    def give_up(self, *, running: bool) -> None:
        """Begin no more answers; with `running` also await none that was begun."""
        self._is_waiting.clear()
        if running:
            self._running.clear()

    def result(self, now_s: float) -> EvaluationResult | None:
        """Return the result of the answers that came; None without any."""
        places = self._answered
        if not places:
            return None
        tasks = sorted({self._prompt(place).task for place in places})
        of_task = {task: [place for place in places if self._prompt(place).task == task] for task in tasks}
        tallies = self._tallies(places)
        majorities = self._majorities(places) if self._measure.samples > 1 else {}
        spans = [span for place in places for span in self._answers[place].versions]
        own_tokens = sum(span.num_tokens for span in spans if span.version == self.version)
        return EvaluationResult(
            policy=self._policy,
            version=self.version,
            step=self.version.step,
            accuracy=_accuracy(tallies),
            per_task={task: _task_accuracy(self._tallies(mine)) for task, mine in of_task.items()},
            answers=[self._shown(place) for mine in of_task.values() for place in mine[:SHOWN_PER_TASK]],
            oldest=min(span.version for span in spans),
            newest=max(span.version for span in spans),
            own_token_share=own_tokens / sum(span.num_tokens for span in spans),
            missing=self.num_missing,
            seconds=now_s - self._began_s,
            samples=self._measure.samples,
            estimates=self._estimates(tallies, list(majorities.values())),
            tied_majorities=sum(one.is_tied for one in majorities.values()),
            prompts=tallies,
        )

    def failures(self) -> dict[str, int]:
        """Return reason -> number of answers that did not come; answers that were never begun are not counted."""
        return dict(Counter(answer.failure for answer in self._answers.values() if answer.failure))

    @property
    def _answered(self) -> list[int]:
        """Places of the answers that came."""
        return [place for place, answer in sorted(self._answers.items()) if _came(answer)]

    def _ticket(self, place: int | str) -> str:
        return f"{self.version}.held-out.{place}"

    def _prompt(self, place: int) -> Prompt:
        return self._prompts[place // self._measure.samples]

    def _is_right(self, place: int) -> bool:
        return self._answers[place].reward >= self._measure.success_reward

    def _of_prompts(self, places: Sequence[int]) -> dict[str, list[int]]:
        """Return prompt id -> places of its answers, in the order of the prompts."""
        found: dict[str, list[int]] = {}
        for place in places:
            found.setdefault(self._prompt(place).prompt_id, []).append(place)
        return found

    def _tallies(self, places: Sequence[int]) -> list[PromptTally]:
        return [
            PromptTally(prompt_id=prompt_id, answered=len(mine), right=sum(map(self._is_right, mine)))
            for prompt_id, mine in self._of_prompts(places).items()
        ]

    def _majorities(self, places: Sequence[int]) -> dict[str, Majority]:
        """Return the majority of every prompt with all answers."""
        return {
            prompt_id: majority([(self._answers[place].choice, self._is_right(place)) for place in mine])
            for prompt_id, mine in self._of_prompts(places).items()
            if len(mine) == self._measure.samples
        }

    def _estimates(self, tallies: Sequence[PromptTally], majorities: Sequence[Majority]) -> dict[str, Estimate]:
        """Return the estimates; none with one answer per prompt, where all would equal the accuracy."""
        samples = self._measure.samples
        if samples == 1:
            return {}
        values = {f"pass@{k}": list(passes(tallies, k).values()) for k in self._measure.ks}
        values[f"avg@{samples}"] = [one.right / one.answered for one in tallies]
        values[f"maj@{samples}"] = [one.right for one in majorities]
        return {name: estimate(found) for name, found in values.items() if found}

    def _shown(self, place: int) -> EvaluatedAnswer:
        prompt, answer = self._prompt(place), self._answers[place]
        text = answer.completion.decode("utf-8", errors="replace")
        return EvaluatedAnswer(
            task=prompt.task,
            prompt=prompt.text,
            completion=text,
            reward=answer.reward,
            opening=answer.opening,
            turns=answer.turns,
        )


def _came(answer: HeldOutAnswer) -> bool:
    """Whether the answer counts: it was sampled, and judged."""
    return bool(answer.versions) and not answer.failure


def _accuracy(tallies: Sequence[PromptTally]) -> float:
    return sum(one.right / one.answered for one in tallies) / len(tallies)


def _task_accuracy(tallies: Sequence[PromptTally]) -> TaskAccuracy:
    return TaskAccuracy(accuracy=_accuracy(tallies), prompts=len(tallies))
