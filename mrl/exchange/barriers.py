"""Where policies in step wait for each other. Bounds of waiting are the clients' business; nothing here knows time."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Waiting:
    number: int
    members: Collection[str]


class Barriers:
    """The last barrier that every policy has come to. Saying it twice changes nothing; a lost answer is asked again."""

    def __init__(self) -> None:
        self._reached: dict[str, int] = {}
        self._waiting: dict[bytes, _Waiting] = {}
        self._progress: dict[str, int] = {}

    def reached(self, policy: str) -> int | None:
        """The last barrier that the policy has come to."""
        return self._reached.get(policy)

    def arrive(
        self, client: bytes, policy: str, number: int, members: Collection[str]
    ) -> list[tuple[bytes, int, list[str]]]:
        """`policy` has come to `number`. Who is to be told what: (client, number, policies missing there).

        The client that came is always told; others only when the barrier that they wait at has opened.
        """
        self._reached[policy] = max(number, self._reached.get(policy, number))
        before = self._waiting.get(client)
        if before is None or before.number <= number:  # otherwise an old message comes late
            self._waiting[client] = _Waiting(number, members)
        opened: list[tuple[bytes, int, list[str]]] = [
            (other, waiting.number, []) for other, waiting in self._waiting.items() if not self._missing(waiting)
        ]
        for other, _, _ in opened:
            del self._waiting[other]
        answer = (client, number, self._missing(_Waiting(number, members)))
        return opened if answer in opened else [*opened, answer]

    def note_progress(self, policy: str, progress: int) -> None:
        """A client of the policy says how far that is on its way to the next barrier; 0 where it does not say."""
        if progress:
            self._progress[policy] = progress

    def progress(self, policies: Collection[str]) -> list[int]:
        """What these policies said last of how far they are; 0 of one that has said nothing."""
        return [self._progress.get(policy, 0) for policy in policies]

    def reset(self, policy: str) -> None:
        """The policy went back: it has come to no barrier yet."""
        self._reached.pop(policy, None)

    def forget(self, client: bytes) -> None:
        """The client waits no longer."""
        self._waiting.pop(client, None)

    def _missing(self, waiting: _Waiting) -> list[str]:
        return [policy for policy in waiting.members if self._reached.get(policy, -1) < waiting.number]
