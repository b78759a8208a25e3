"""What a learner needs of the exchange client."""

from collections.abc import Callable, Sequence
from typing import Protocol

from mrl.records.experience import Received, RecordKind
from mrl.records.version import Version


class PeerSource(Protocol):
    """The exchange for a learner that goes its own pace; nothing here ever waits."""

    def fetch(
        self,
        prompt_ids: Sequence[str],
        *,
        kinds: Sequence[RecordKind],
        limit: int,
        max_age_versions: int | None,
        watch: bool,
    ) -> None:
        """Ask for records of these kinds on these prompts; with `watch` for later ones too."""

    def unwatch(self, prompt_ids: Sequence[str]) -> None:
        """No longer interested."""

    def take(self) -> list[Received]:
        """Records that came since the last call."""

    def announce(self, version: Version, *, resumed: bool = False) -> None:
        """This policy now trains at `version`."""

    def tell(self, progress: Callable[[], int]) -> None:
        """Have peers that wait for this policy hear how far it is; any thread may ask."""

    def lost_s(self) -> float:
        """Seconds without any answer from the exchange."""


class LockstepPeers(PeerSource, Protocol):
    """The exchange for a synchronous run: what waits has a bound."""

    def fetch_now(
        self,
        prompt_ids: Sequence[str],
        *,
        kinds: Sequence[RecordKind],
        limit: int,
        max_age_versions: int | None,
        timeout_s: float,
    ) -> bool:
        """Ask, and wait until everything was answered; `take` then has it. False when the time ran out."""

    def barrier(self, number: int, members: Sequence[str], timeout_s: float) -> list[str]:
        """Come to barrier `number` and wait for the other members; who is missing when the time runs out."""

    def progress_of(self, policy: str) -> int:
        """What a policy that is missing there said last of how far it is: another number whenever it has got on."""
