"""The asking end of a client: what it wants to know of prompts, asked again until the daemon has answered."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mrl.exchange.outbox import Outbox, Unanswered
from mrl.records.codec import encode
from mrl.records.exchange_messages import Fetch, Unwatch
from mrl.records.experience import RecordKind

MAX_UNANSWERED = 256
MAX_UNANSWERED_BYTES = 16 * 1024 * 1024
MAX_IDS = 1024
MAX_WATCHED = 4096


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about a prompt."""

    kinds: tuple[RecordKind, ...]
    limit: int
    max_age_versions: int | None


class Questions:
    """Used under the client's lock. Adds to `counts`: dropped_fetches."""

    def __init__(
        self,
        client: str,
        policy: str,
        counts: Counter[str],
        *,
        send: Callable[[bytes], None],
        next_seq: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._client, self._policy, self._counts = client, policy, counts
        self._send, self._next_seq, self._clock = send, next_seq, clock
        self._fetches = Outbox()
        self._watched: dict[str, Question] = {}

    def ask(self, prompt_ids: list[str], question: Question, *, watch: bool) -> None:
        """Nobody waits for the answer; the oldest questions of this kind go when there are too many."""
        if watch:
            self._watch(prompt_ids, question)
        self._ask(prompt_ids, question, watch=watch)

    def ask_now(self, prompt_ids: list[str], question: Question) -> int:
        """Somebody waits for the answer; returns the number of the question."""
        return self._post(prompt_ids, question, watch=False, is_awaited=True)

    def is_answered(self, seq: int) -> bool:
        """Whether the question of this number was answered in full."""
        return seq not in self._fetches

    def give_up(self, seq: int) -> None:
        """Nobody waits for this answer any more."""
        self._fetches.remove(seq)

    def note_part(self, seq: int, part: int, parts: int) -> None:
        """A part of an answer has come."""
        self._fetches.note_part(seq, part, parts)

    def unwatch(self, prompt_ids: Iterable[str]) -> None:
        """Later records on these prompts are not wanted."""
        ids = [prompt_id for prompt_id in prompt_ids if self._watched.pop(prompt_id, None) is not None]
        for part in slices(ids, MAX_IDS):
            self._send(encode(Unwatch(client=self._client, prompt_ids=part)))

    def ask_again(self, now_s: float) -> None:
        """What should have been answered by now."""
        for body in self._fetches.overdue(now_s):
            self._send(body)

    def start_over(self) -> None:
        """There is a new daemon, which knows of no question."""
        self._fetches.drop_watches()
        self._fetches.start_over()
        for body in self._fetches.next_to_send(MAX_UNANSWERED_BYTES, self._clock()):
            self._send(body)
        by_question: dict[Question, list[str]] = {}
        for prompt_id, question in self._watched.items():
            by_question.setdefault(question, []).append(prompt_id)
        for question, ids in by_question.items():
            self._ask(ids, question, watch=True)

    def _watch(self, prompt_ids: list[str], question: Question) -> None:
        for prompt_id in prompt_ids:
            self._watched.pop(prompt_id, None)
            self._watched[prompt_id] = question
        while len(self._watched) > MAX_WATCHED:
            del self._watched[next(iter(self._watched))]

    def _ask(self, prompt_ids: list[str], question: Question, *, watch: bool) -> None:
        for part in slices(prompt_ids, MAX_IDS):
            self._post(part, question, watch=watch)
        while len(self._fetches) > MAX_UNANSWERED and (seq := self._fetches.oldest()):
            self._fetches.remove(seq)
            self._counts["dropped_fetches"] += 1

    def _post(self, prompt_ids: list[str], question: Question, *, watch: bool, is_awaited: bool = False) -> int:
        seq = self._next_seq()
        message = Fetch(
            client=self._client,
            policy=self._policy,
            prompt_ids=prompt_ids,
            kinds=list(question.kinds),
            limit=question.limit,
            max_age_versions=question.max_age_versions,
            watch=watch,
            seq=seq,
        )
        body = encode(message)
        self._fetches.add(seq, Unanswered(body, self._clock(), is_watch=watch, is_awaited=is_awaited))
        self._send(body)
        return seq


def slices(ids: list[str], length: int) -> Iterator[list[str]]:
    """The ids in order, so many at a time."""
    return (ids[start : start + length] for start in range(0, len(ids), length))
