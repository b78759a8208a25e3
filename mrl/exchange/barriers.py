"""Barriers at which the policies of a synchronous run wait for each other.

Clients bound their waiting themselves; nothing here knows time.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Waiting:
    number: int
    members: Collection[str]


class Barriers:
    """The last barrier that each policy has reached, and the clients that wait.

    A repeated message changes nothing, so that a client whose answer was lost asks again.
    """

    def __init__(self) -> None:
        self._reached: dict[str, int] = {}
        self._waiting: dict[bytes, _Waiting] = {}
        self._progress: dict[str, int] = {}

    def reached(self, policy: str) -> int | None:
        """Return the last barrier that the policy has reached; None before its first."""
        return self._reached.get(policy)

    def arrive(
        self, client: bytes, policy: str, number: int, members: Collection[str]
    ) -> list[tuple[bytes, int, list[str]]]:
        """Note that `policy` has reached barrier `number`.

        Return the messages to send: (client, number, missing policies).

        `client` is always told; others only when the barrier at which they wait has opened.
        """
        self._reached[policy] = max(number, self._reached.get(policy, number))
        before = self._waiting.get(client)
        if before is None or before.number <= number:  # otherwise the message is an old one that came late
            self._waiting[client] = _Waiting(number, members)
        opened: list[tuple[bytes, int, list[str]]] = [
            (other, waiting.number, []) for other, waiting in self._waiting.items() if not self._missing(waiting)
        ]
        for other, _, _ in opened:
            del self._waiting[other]
        answer = (client, number, self._missing(_Waiting(number, members)))
        return opened if answer in opened else [*opened, answer]

    def note_progress(self, policy: str, progress: int) -> None:
        """Note how far a client says that its policy is on the way to the next barrier; 0 says nothing."""
        if progress:
            self._progress[policy] = progress

    def progress(self, policies: Collection[str]) -> list[int]:
        """Return the last progress that each of these policies told; 0 for a policy that has told none."""
        return [self._progress.get(policy, 0) for policy in policies]

    def reset(self, policy: str) -> None:
        """Forget the barriers that the policy has reached: a resume took it back."""
        self._reached.pop(policy, None)

    def forget(self, client: bytes) -> None:
        """Remove a client from those that wait."""
        self._waiting.pop(client, None)

    def _missing(self, waiting: _Waiting) -> list[str]:
        return [policy for policy in waiting.members if self._reached.get(policy, -1) < waiting.number]
