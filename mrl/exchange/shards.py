"""Several daemons as one exchange: each prompt lives on one of them, and everybody knows on which without asking.

A prompt goes to the shard with the highest random weight, a hash of prompt and shard (rendezvous hashing, Thaler and
Ravishankar 1998). One more shard takes its part evenly from all others, a shard less gives its part to all others, and
nothing else moves. What a policy has on a prompt, who asks for it, and requests and scores about it meet on one shard,
so shards never speak to each other. Records on prompts that moved stay where they are until they age out or are
evicted: readers of streams still get them, and who asks by prompt does not.

A shard that does not answer costs the records on its prompts and nothing else: what waits waits for all shards at once,
within one bound. In a run that steps together it costs what a lost daemon costs: the bound runs out and the run ends.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

import msgspec

from mrl.exchange.client import ExchangeClient
from mrl.records.exchange_messages import RequestKind
from mrl.records.experience import ExperienceRecord, Received, RecordKind
from mrl.records.version import Version

WEIGHT_BYTES = 8
WEIGHTS_PER_DIGEST = 8
"""One hash is long enough for so many shards."""
MAX_REMEMBERED_PROMPTS = 65_536

T = TypeVar("T")

Position = int | Sequence[int]
"""How far a reader of a stream has come, as a checkpoint stores it: the number of the last record of every shard.

Shards beyond its end stand at 0, and one number is that of the first shard: what a reader of fewer shards, or of a
single daemon, has stored still holds.
"""


def role_of(shard: int) -> str:
    """The name under which a shard's process speaks: "exchange", "exchange/1", and so on."""
    return f"exchange/{shard}" if shard else "exchange"


def endpoint_of(shard: int) -> str:
    """The name of a shard's endpoint file and socket file."""
    return role_of(shard).replace("/", "-")


def folder_of(exchange: Path, shard: int) -> Path:
    """Where a shard's log lies in the exchange's folder; the first one's lies where that of a single daemon does."""
    return exchange / f"shard_{shard}" if shard else exchange


@lru_cache(MAX_REMEMBERED_PROMPTS)
def shard_of(prompt_id: str, shards: range | tuple[int, ...]) -> int:
    """The one of these shards on which the prompt lives, the same in every process and on every host."""
    prompt = prompt_id.encode(errors="surrogatepass")  # a record with such a name is counted and dropped later
    digests = {block: _digest(prompt, block) for block in {shard // WEIGHTS_PER_DIGEST for shard in shards}}

    def weight(shard: int) -> tuple[bytes, int]:
        block, place = divmod(shard, WEIGHTS_PER_DIGEST)
        return digests[block][WEIGHT_BYTES * place : WEIGHT_BYTES * (place + 1)], shard

    return max(shards, key=weight)


def come_to(position: Position, received: Iterable[Received]) -> list[int]:
    """`position` after these records of the stream, as `take` has handed them out."""
    numbers = _numbers(position)
    for item in received:
        numbers += [0] * (item.shard + 1 - len(numbers))
        numbers[item.shard] = max(numbers[item.shard], item.number)
    return numbers


class ShardedExchange:
    """The calls of an `ExchangeClient`, over one client per shard. Use the client itself where there is one shard."""

    def __init__(self, clients: Sequence[ExchangeClient]) -> None:
        """`clients[shard]` speaks to that shard; all of them for one process, under one name."""
        self._clients = list(clients)
        self._shards = range(len(self._clients))

    @property
    def counts(self) -> dict[str, int]:
        """Totals as of one client, over all shards."""
        total: Counter[str] = Counter()
        for client in self._clients:
            total.update(client.counts)
        return dict(total)

    @property
    def lost_shards(self) -> list[int]:
        """Shards that do not answer at the moment."""
        return [shard for shard, client in enumerate(self._clients) if client.lost_s()]

    @property
    def storage(self) -> str:
        """Why a shard stores nothing at the moment; "" when all do."""
        return next((client.storage for client in self._clients if client.storage), "")

    def publish(self, records: Sequence[ExperienceRecord], *, room_within_s: float = 0.0) -> None:
        """Hand each record to the shard of its prompt; the order stays within a shard. As `ExchangeClient.publish`."""
        parts: dict[int, list[ExperienceRecord]] = {}
        for record in records:
            parts.setdefault(self._shard_of(record.prompt_id), []).append(record)
        if room_within_s <= 0:
            for shard, part in parts.items():
                self._clients[shard].publish(part)
            return
        _at_once(
            [partial(self._clients[shard].publish, part, room_within_s=room_within_s) for shard, part in parts.items()]
        )

    def flush(self, timeout_s: float) -> bool:
        """As `ExchangeClient.flush`, for all shards within one bound."""
        end_s = time.monotonic() + timeout_s
        return all(client.flush(max(0.0, end_s - time.monotonic())) for client in self._clients)

    def announce(self, version: Version, *, resumed: bool = False) -> None:
        """Tell every shard, because each one dates the records that it holds."""
        for client in self._clients:
            client.announce(version, resumed=resumed)

    def fetch(
        self,
        prompt_ids: Iterable[str],
        *,
        kinds: Sequence[RecordKind],
        limit: int,
        max_age_versions: int | None,
        watch: bool,
    ) -> None:
        """As `ExchangeClient.fetch`; every shard is asked for its own prompts."""
        for shard, ids in self._split(prompt_ids).items():
            self._clients[shard].fetch(ids, kinds=kinds, limit=limit, max_age_versions=max_age_versions, watch=watch)

    def fetch_now(
        self,
        prompt_ids: Iterable[str],
        *,
        kinds: Sequence[RecordKind],
        limit: int,
        max_age_versions: int | None,
        timeout_s: float,
    ) -> bool:
        """As `ExchangeClient.fetch_now`, all shards at once; what the others answered is there when one did not."""
        asking = [
            partial(
                self._clients[shard].fetch_now,
                ids,
                kinds=kinds,
                limit=limit,
                max_age_versions=max_age_versions,
                timeout_s=timeout_s,
            )
            for shard, ids in self._split(prompt_ids).items()
        ]
        return all(_at_once(asking))

    def subscribe(self, kinds: Sequence[RequestKind]) -> None:
        """Serve requests on every shard: each lies where its prompt does."""
        for client in self._clients:
            client.subscribe(kinds)

    def unwatch(self, prompt_ids: Iterable[str]) -> None:
        """No longer interested in these prompts."""
        for shard, ids in self._split(prompt_ids).items():
            self._clients[shard].unwatch(ids)

    def read(
        self,
        stream: str,
        *,
        kinds: Sequence[RecordKind],
        sources: Sequence[str] = (),
        tasks: Sequence[str] = (),
        max_age_versions: int | None = None,
        after: Position = 0,
    ) -> None:
        """As `ExchangeClient.read`, on every shard after its own number; between shards there is no order."""
        for client, number in zip(self._clients, self._numbers(after), strict=True):
            client.read(
                stream, kinds=kinds, sources=sources, tasks=tasks, max_age_versions=max_age_versions, after=number
            )

    def commit(self, stream: str, upto: Position) -> None:
        """As `ExchangeClient.commit`, on every shard up to its own number."""
        for client, number in zip(self._clients, self._numbers(upto), strict=True):
            client.commit(stream, number)

    def take(self) -> list[Received]:
        """What came since the last call, shard by shard; what came by a stream carries its shard."""
        return [
            msgspec.structs.replace(item, shard=shard) if shard and item.number else item
            for shard, client in enumerate(self._clients)
            for item in client.take()
        ]

    def barrier(self, number: int, members: Sequence[str], timeout_s: float) -> list[str]:
        """As `ExchangeClient.barrier`, on every shard within one bound; open when it is open on all of them.

        So each shard has heard everything that the members said before they came, as a single daemon has.
        """
        missing = _at_once([partial(client.barrier, number, members, timeout_s) for client in self._clients])
        return [policy for policy in members if any(policy in of_shard for of_shard in missing)]

    def tell(self, progress: Callable[[], int]) -> None:
        """As `ExchangeClient.tell`, to every shard."""
        for client in self._clients:
            client.tell(progress)

    def progress_of(self, policy: str) -> int:
        """As `ExchangeClient.progress_of`: another number once any shard has heard that the policy got on."""
        return sum(client.progress_of(policy) for client in self._clients)

    def lost_s(self) -> float:
        """Seconds without any answer from the shard that is silent longest; 0 while all answer in time."""
        return max(client.lost_s() for client in self._clients)

    def close(self, timeout_s: float) -> None:
        """Send what is queued for at most `timeout_s`, on all links at once, and end them."""
        _at_once([partial(client.close, timeout_s) for client in self._clients])

    def _shard_of(self, prompt_id: str) -> int:
        return shard_of(prompt_id, self._shards)

    def _split(self, prompt_ids: Iterable[str]) -> dict[int, list[str]]:
        parts: dict[int, list[str]] = {}
        for prompt_id in prompt_ids:
            parts.setdefault(self._shard_of(prompt_id), []).append(prompt_id)
        return parts

    def _numbers(self, position: Position) -> list[int]:
        return [*_numbers(position), *[0] * len(self._clients)][: len(self._clients)]


Exchange = ExchangeClient | ShardedExchange
"""What learners and workers call: one daemon, or several behind one face."""


def _numbers(position: Position) -> list[int]:
    return [position] if isinstance(position, int) else list(position)


def _digest(prompt: bytes, block: int) -> bytes:
    """The weights of a prompt on eight consecutive shards."""
    return hashlib.blake2b(prompt, digest_size=WEIGHT_BYTES * WEIGHTS_PER_DIGEST, key=block.to_bytes(4, "big")).digest()


def _at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """The results of calls that may wait, none of which waits for another."""
    if len(calls) < 2:
        return [call() for call in calls]
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))
