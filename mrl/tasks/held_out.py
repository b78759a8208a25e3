"""The books of one evaluation: which held-out prompts wait, which are being answered, and what came of them.

A prompt whose answer was lost with a worker or an engine waits again, a bounded number of times: one that takes engines
down with it costs itself.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence

from mrl.records.evaluation_messages import EvaluatedAnswer, EvaluationResult, TaskAccuracy
from mrl.records.rollouts import HeldOutAnswer, HeldOutItem
from mrl.records.version import Version
from mrl.tasks.pool import Prompt

MAX_GRANTS = 3
"""Of one prompt. A worker outlives one loss of its engine more."""
SHOWN_PER_TASK = 3


class HeldOutBook:
    """One answer per prompt, for the evaluation of one version. Without a clock; not thread-safe."""

    def __init__(
        self,
        policy: str,
        version: Version,
        prompts: Sequence[Prompt],
        *,
        began_s: float,
        success_reward: float = 1.0,
    ) -> None:
        """An answer is right when its reward is at least `success_reward`."""
        self.version = version
        self._success_reward = success_reward
        self._policy, self._prompts, self._began_s = policy, list(prompts), began_s
        self._waiting = deque(range(len(self._prompts)))
        self._running: dict[int, str] = {}
        """Place of a prompt -> who answers it."""
        self._grants: Counter[int] = Counter()
        self._answers: dict[int, HeldOutAnswer] = {}

    @property
    def num_waiting(self) -> int:
        """Prompts that nobody answers yet."""
        return len(self._waiting)

    @property
    def num_missing(self) -> int:
        """Prompts that have no answer by now."""
        return len(self._prompts) - len(self._answered)

    @property
    def is_over(self) -> bool:
        """Whether no answer is to come any more."""
        return not self._waiting and not self._running

    def grant(self, worker: str, most: int) -> list[HeldOutItem]:
        """The next prompts, at most so many."""
        items = []
        for _ in range(min(most, len(self._waiting))):
            place = self._waiting.popleft()
            self._running[place] = worker
            self._grants[place] += 1
            prompt_id = self._prompts[place].prompt_id
            items.append(HeldOutItem(ticket=self._ticket(place), prompt_id=prompt_id, version=self.version))
        return items

    def accept(self, answer: HeldOutAnswer) -> bool:
        """Take an answer in, also when its prompt waits again meanwhile; False for one of another book, or repeated."""
        kind, _, number = answer.ticket.rpartition(".")
        if f"{kind}." != self._ticket("") or not number.isdigit() or int(number) >= len(self._prompts):
            return False
        place = int(number)
        if place in self._answers or not self._grants[place]:
            return False
        self._running.pop(place, None)
        if place in self._waiting:
            self._waiting.remove(place)
        self._answers[place] = answer
        return True

    def lose(self, is_lost: Callable[[str, str], bool]) -> int:
        """Prompts of which `is_lost` (worker, ticket) wait again, the first ones first; returns how many they are.

        One that was granted too often is given up.
        """
        lost = [place for place, worker in self._running.items() if is_lost(worker, self._ticket(place))]
        for place in sorted(lost, reverse=True):
            del self._running[place]
            if self._grants[place] < MAX_GRANTS:
                self._waiting.appendleft(place)
        return len(lost)

    def give_up(self, *, running: bool) -> None:
        """Begin no more prompts; with `running` await no answer either."""
        self._waiting.clear()
        if running:
            self._running.clear()

    def result(self, now_s: float) -> EvaluationResult | None:
        """What the answers say; None when there is none."""
        places = self._answered
        if not places:
            return None
        tasks = sorted({self._prompts[place].task for place in places})
        of_task = {task: [place for place in places if self._prompts[place].task == task] for task in tasks}
        spans = [span for place in places for span in self._answers[place].versions]
        own_tokens = sum(span.num_tokens for span in spans if span.version == self.version)
        return EvaluationResult(
            policy=self._policy,
            version=self.version,
            step=self.version.step,
            accuracy=self._accuracy(places),
            per_task={
                task: TaskAccuracy(accuracy=self._accuracy(mine), prompts=len(mine)) for task, mine in of_task.items()
            },
            answers=[self._shown(place) for mine in of_task.values() for place in mine[:SHOWN_PER_TASK]],
            oldest=min(span.version for span in spans),
            newest=max(span.version for span in spans),
            own_token_share=own_tokens / sum(span.num_tokens for span in spans),
            missing=self.num_missing,
            seconds=now_s - self._began_s,
        )

    def failures(self) -> dict[str, int]:
        """Why prompts have no answer -> how many of them; those that were never answered at all are not among them."""
        return dict(Counter(answer.failure for answer in self._answers.values() if answer.failure))

    @property
    def _answered(self) -> list[int]:
        """Places of the prompts that have an answer."""
        return [place for place, answer in sorted(self._answers.items()) if answer.versions and not answer.failure]

    def _ticket(self, place: int | str) -> str:
        return f"{self.version}.held-out.{place}"

    def _accuracy(self, places: Collection[int]) -> float:
        return sum(self._answers[place].reward >= self._success_reward for place in places) / len(places)

    def _shown(self, place: int) -> EvaluatedAnswer:
        prompt, answer = self._prompts[place], self._answers[place]
        text = answer.completion.decode("utf-8", errors="replace")
        return EvaluatedAnswer(task=prompt.task, prompt=prompt.text, completion=text, reward=answer.reward)
