"""Who speaks to the daemons: policies that publish successes and ask for those of others, and forwarders.

Both are made of real `ExchangeClient`s, behind a `ShardedExchange` where a site has several daemons.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence

from exchange_simulation.events import Events
from exchange_simulation.station import Station
from mrl.exchange.client import ExchangeClient
from mrl.exchange.shards import ShardedExchange
from mrl.records.experience import ExperienceRecord, OutcomeRecord
from mrl.records.finish import FinishReason
from mrl.records.version import Version

BATCH_RECORDS = 16
"""Successes that one batch of groups brings and publishes together."""
BATCH_FAILURES = 4
"""Prompts of a batch that failed as a whole: others are asked for them."""
BATCHES_PER_VERSION = 2
PROMPTS_PER_POLICY = 16
"""Policies go over the same prompts in one order, each from its own place: so many lie between two neighbours."""
WATCHED_BATCHES = 16
LIMIT = 4
MAX_AGE_VERSIONS = 20
COMPLETION_BYTES = 700
"""Makes a record of about 1 KB."""
CLIENT_TICK_S = 0.5
MAX_SOURCES = 256
"""Policies that one stream can name."""

Client = ExchangeClient | ShardedExchange


def connect(
    events: Events, stations: Sequence[Station], name: str, policy: str, heard: Callable[[], object], *, is_remote: bool
) -> Client:
    """One process's end of the exchange at a site; `heard` is called when something may have come."""
    clients = [_connect_one(events, station, name, policy, heard, is_remote=is_remote) for station in stations]
    return clients[0] if len(clients) == 1 else ShardedExchange(clients)


def _connect_one(
    events: Events, station: Station, name: str, policy: str, heard: Callable[[], object], *, is_remote: bool
) -> ExchangeClient:
    def open_link(on_message: Callable[[bytes], None], on_tick: Callable[[float], None]) -> "_Link":
        def hear(body: bytes, brings_records: bool) -> None:
            on_message(body)
            if brings_records:
                heard()

        first_s = random.Random(name).random() * CLIENT_TICK_S
        events.every(CLIENT_TICK_S, lambda: on_tick(events.now_s), first_s=first_s)
        return _Link(station.connect(name, hear, is_remote=is_remote))

    return ExchangeClient.connect(open_link, client=name, policy=policy, clock=lambda: events.now_s)


class _Link:
    """A line of a station, as a client wants it."""

    def __init__(self, post: Callable[[bytes], bool]) -> None:
        self.post = post

    def request_reconnect(self) -> None:
        """There is no other address."""

    def close(self, timeout_s: float) -> None:
        """Nothing is left behind."""


class Tally:
    """What the policies of one trial have seen since it was last cleared."""

    def __init__(self) -> None:
        self.offered = 0
        self.latencies_s: list[float] = []
        """From the publishing of a record to its arrival at one who was waiting for it."""
        self.ages_versions: list[int] = []
        """Of everything that arrived."""

    def clear(self) -> None:
        """Count anew from here on."""
        self.offered = 0
        self.latencies_s.clear()
        self.ages_versions.clear()


class Policy:
    """Learner and worker in one: publishes a batch, asks for what failed, announces its versions."""

    def __init__(self, events: Events, tally: Tally, name: str, *, batch_s: float, num_prompts: int, seed: int) -> None:
        """`num_prompts`: how many there are, after which the first comes again."""
        self.name = name
        self.exchange: Client | None = None
        self._events, self._tally = events, tally
        self._rng = random.Random(f"{name} {seed}")
        self._num_prompts = num_prompts
        self._next_prompt = self._rng.randrange(num_prompts)
        self._batches = 0
        self._asked_s: dict[str, float] = {}
        self._watched: deque[list[str]] = deque()
        events.every(batch_s, self._batch, first_s=self._rng.random() * batch_s)

    def heard(self) -> None:
        """Take what came."""
        assert self.exchange is not None, "connected before it runs"
        for item in self.exchange.take():
            self._tally.ages_versions.append(item.age_versions)
            if item.record.created_unix_s >= self._asked_s.get(item.record.prompt_id, float("inf")):
                self._tally.latencies_s.append(self._events.now_s - item.record.created_unix_s)

    def _batch(self) -> None:
        assert self.exchange is not None, "connected before it runs"
        numbers = range(self._next_prompt, self._next_prompt + BATCH_RECORDS + BATCH_FAILURES)
        prompts = [f"prompt-{number % self._num_prompts}" for number in numbers]
        self._rng.shuffle(prompts)
        self._next_prompt += len(prompts)
        version = Version(0, self._batches // BATCHES_PER_VERSION)
        if self._batches % BATCHES_PER_VERSION == 0:
            self.exchange.announce(version)
        self._batches += 1
        self.exchange.publish([self._success(prompt_id, version) for prompt_id in prompts[:BATCH_RECORDS]])
        self._tally.offered += BATCH_RECORDS
        self._ask(prompts[BATCH_RECORDS:])

    def _success(self, prompt_id: str, version: Version) -> OutcomeRecord:
        record_id = f"{self.name}:{self._batches}:{prompt_id}"
        return success(self.name, prompt_id, version, record_id=record_id, now_s=self._events.now_s)

    def _ask(self, failed: list[str]) -> None:
        assert self.exchange is not None, "connected before it runs"
        self._watched.append(failed)
        if len(self._watched) > WATCHED_BATCHES:
            self.exchange.unwatch(self._watched.popleft())
        self._asked_s.update(dict.fromkeys(failed, self._events.now_s))
        self.exchange.fetch(failed, kinds=["outcome"], limit=LIMIT, max_age_versions=MAX_AGE_VERSIONS, watch=True)


def success(source: str, prompt_id: str, version: Version, *, record_id: str, now_s: float) -> OutcomeRecord:
    """A record of about 1 KB that was made now."""
    return OutcomeRecord(
        record_id=record_id,
        source=source,
        oldest=version,
        newest=version,
        fingerprint="simulated",
        prompt_id=prompt_id,
        task="simulated",
        created_unix_s=now_s,
        completion=bytes(COMPLETION_BYTES),
        finish_reason=FinishReason.STOP,
        verifier="simulated",
        reward=1.0,
    )


class Forwarder:
    """Carries what the policies of one site publish to the other sites.

    It reads one stream of its own site's daemons, under a name of its own, and publishes at the others as the policies
    of its site, whose keys it has, and no others. It passes on records of its own site only: none goes in a circle.
    """

    def __init__(
        self, events: Events, site: int, sources: Sequence[str], stations: Sequence[Sequence[Station]]
    ) -> None:
        """`stations[site]` are the daemons of a site; `sources` live at `site`."""
        self._announced: dict[str, Version] = {}
        others = [there for other, there in enumerate(stations) if other != site]
        self._away = {source: [_abroad(events, there, source) for there in others] for source in sources}
        name = reader_of(site)
        self._home = connect(events, stations[site], f"learner/{name}", name, self._heard, is_remote=False)
        for start in range(0, len(sources), MAX_SOURCES):
            part = sources[start : start + MAX_SOURCES]
            self._home.read(f"forward-{start}", kinds=["outcome"], sources=part)

    @property
    def clients(self) -> list[Client]:
        """All its ends at other sites."""
        return [client for clients in self._away.values() for client in clients]

    def _heard(self) -> None:
        by_source: dict[str, list[ExperienceRecord]] = {}
        for item in self._home.take():
            by_source.setdefault(item.record.source, []).append(item.record)
        for source, records in by_source.items():
            newest = max(record.newest for record in records)
            is_new = source not in self._announced or newest > self._announced[source]
            self._announced[source] = max(newest, self._announced.get(source, newest))
            for client in self._away[source]:
                if is_new:
                    client.announce(newest)
                client.publish(records)


def _abroad(events: Events, stations: Sequence[Station], source: str) -> Client:
    return connect(events, stations, f"worker/{source}/forwarder", source, lambda: None, is_remote=True)


def reader_of(site: int) -> str:
    """The name under which the forwarder of a site reads."""
    return f"site-{site}"
