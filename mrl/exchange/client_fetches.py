"""The asking half of a client: Fetches of prompts, each repeated until the daemon has answered it, and watches."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mrl.exchange.limits import ClientLimits
from mrl.records.codec import encode
from mrl.records.exchange_messages import Deliver, Fetch, Unwatch
from mrl.records.experience import RecordKind
from mrl.transport.requests import Requests


@dataclass(frozen=True, slots=True)
class FetchTerms:
    """Terms of a Fetch for each of its prompts: record kinds, greatest number of records, greatest age in versions."""

    kinds: tuple[RecordKind, ...]
    limit: int
    max_age_versions: int | None


@dataclass(slots=True)
class _Asked:
    is_awaited: bool
    """Whether a caller waits for the answer. All other Fetches watch their prompts."""
    parts: int = 0
    """Parts of the answer that have come, in an unbroken series."""


class ClientFetches:
    """Fetches and watches of one client. Used under the client's lock. Adds to `counts`: dropped_fetches."""

    def __init__(
        self,
        client: str,
        policy: str,
        requests: Requests,
        *,
        counts: Counter[str],
        limits: ClientLimits,
        send: Callable[[bytes], None],
    ) -> None:
        self._client, self._policy, self._requests = client, policy, requests
        self._counts, self._limits, self._send = counts, limits, send
        self._asked: dict[int, _Asked] = {}
        """Unanswered Fetches by number."""
        self._watched: OrderedDict[str, FetchTerms] = OrderedDict()
        """Watched prompt -> question, the oldest first."""

    def ask(self, prompt_ids: list[str], question: FetchTerms, now_s: float) -> None:
        """Fetch and watch prompts without waiting for the answer. Beyond a bound the oldest such Fetches go."""
        for prompt_id in prompt_ids:
            self._watched.pop(prompt_id, None)
            self._watched[prompt_id] = question
        while len(self._watched) > self._limits.watches:
            self._watched.popitem(last=False)
        for part in slices(prompt_ids, self._limits.fetch_prompts):
            self._post(part, question, now_s)
        idle = [number for number, asked in self._asked.items() if not asked.is_awaited]
        for number in idle[: max(0, len(self._asked) - self._limits.fetches)]:
            self.give_up(number)
            self._counts["dropped_fetches"] += 1

    def ask_now(self, prompt_ids: list[str], question: FetchTerms, now_s: float) -> int:
        """Fetch prompts for a caller that waits for the answer; return the number of the Fetch."""
        return self._post(prompt_ids, question, now_s, is_awaited=True)

    def is_answered(self, number: int) -> bool:
        """Whether the Fetch of this number was answered in full, or given up."""
        return number not in self._asked

    def give_up(self, number: int) -> None:
        """Await no answer to this Fetch any more."""
        self._requests.forget(number)
        self._asked.pop(number, None)

    def note_part(self, message: Deliver, now_s: float) -> None:
        """Note a part of an answer; the last part of an unbroken series completes the answer."""
        asked = self._asked.get(message.seq)
        if asked is None:
            return
        if message.part in (1, asked.parts + 1):
            asked.parts = message.part
        if asked.parts == message.part == message.parts:
            del self._asked[message.seq]
            self._requests.answered(message.seq, now_s)

    def unwatch(self, prompt_ids: Iterable[str]) -> None:
        """Stop watching these prompts."""
        ids = [prompt_id for prompt_id in prompt_ids if self._watched.pop(prompt_id, None) is not None]
        for part in slices(ids, self._limits.fetch_prompts):
            self._send(encode(Unwatch(client=self._client, prompt_ids=part)))

    def send(self, now_s: float) -> None:
        """Send Fetches for the first time, as far as the window has room."""
        for body in self._requests.first(now_s):
            self._send(body)

    def start_over(self, now_s: float) -> None:
        """Ask everything anew: the link is new, and its daemon may know of no watch."""
        for number in [number for number, asked in self._asked.items() if not asked.is_awaited]:
            self.give_up(number)
        self._requests.start_over()
        by_question: dict[FetchTerms, list[str]] = {}
        for prompt_id, question in self._watched.items():
            by_question.setdefault(question, []).append(prompt_id)
        for question, ids in by_question.items():
            for part in slices(ids, self._limits.fetch_prompts):
                self._post(part, question, now_s)
        self.send(now_s)

    def _post(self, prompt_ids: list[str], question: FetchTerms, now_s: float, *, is_awaited: bool = False) -> int:
        number = self._requests.next_number
        message = Fetch(
            client=self._client,
            policy=self._policy,
            prompt_ids=prompt_ids,
            kinds=list(question.kinds),
            limit=question.limit,
            max_age_versions=question.max_age_versions,
            watch=not is_awaited,
            seq=number,
        )
        self._requests.post(encode(message), now_s)
        self._asked[number] = _Asked(is_awaited)
        self.send(now_s)
        return number


def slices(ids: list[str], length: int) -> Iterator[list[str]]:
    """Return the ids in order, `length` at a time."""
    return (ids[start : start + length] for start in range(0, len(ids), length))
