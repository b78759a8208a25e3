"""What went from which policy to which since the daemon started."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mrl.records.exchange_messages import PairFlow

MAX_IDLE_PAIRS = 10_000


@dataclass(slots=True)
class _Pair:
    hits: int = 0
    records: int = 0
    num_bytes: int = 0
    ages_versions: int = 0


class Flows:
    """Counts per ordered pair of policies. A prompt counts once per asking, for `asked` as well as for `hits`."""

    def __init__(self) -> None:
        self._asked: Counter[str] = Counter()
        self._pairs: dict[tuple[str, str], _Pair] = {}

    def ask(self, receiver: str, num_prompts: int) -> None:
        """The receiver asked for this many prompts."""
        self._asked[receiver] += num_prompts

    def hit(self, source: str, receiver: str) -> None:
        """The receiver was given the first record of the source on a prompt that it had asked for."""
        self._pair(source, receiver).hits += 1

    def deliver(self, source: str, receiver: str, num_bytes: int, age_versions: int) -> None:
        """One record went over."""
        pair = self._pair(source, receiver)
        pair.records += 1
        pair.num_bytes += num_bytes
        pair.ages_versions += age_versions

    def table(self, sources: Iterable[str]) -> list[PairFlow]:
        """One row per pair: everybody who has asked, from every one of the `sources` but itself.

        Of very many, those between which nothing went are left out.
        """
        sources, pairs = list(sources), set(self._pairs)
        if len(sources) * len(self._asked) <= MAX_IDLE_PAIRS:
            pairs |= {(source, receiver) for source in sources for receiver in self._asked if source != receiver}
        return [self._row(source, receiver) for source, receiver in sorted(pairs)]

    def _pair(self, source: str, receiver: str) -> _Pair:
        return self._pairs.setdefault((source, receiver), _Pair())

    def _row(self, source: str, receiver: str) -> PairFlow:
        pair = self._pairs.get((source, receiver), _Pair())
        return PairFlow(
            source=source,
            receiver=receiver,
            asked=self._asked[receiver],
            hits=pair.hits,
            records=pair.records,
            bytes=pair.num_bytes,
            mean_age_versions=pair.ages_versions / max(1, pair.records),
            ages_versions=pair.ages_versions,
        )
