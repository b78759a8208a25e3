"""The exchange of mrl in the benchmark: the daemon as its role runs it, and its client library at both ends.

Settings: `run` (folder with keys, endpoints and file), `durability`, `is_near` (False: clients use TCP, as from another
host). The consumer belongs to another policy and watches the prompts on which the producer publishes.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench_peers.loads import SINGLE_KINDS, SOURCE, Checklist
from bench_peers.part import DEADLINE_S, Settings, Stamp, stamp
from mrl.exchange.client import ExchangeClient
from mrl.exchange.daemon import ENDPOINT, ExchangeDaemon
from mrl.exchange.limits import Limits
from mrl.records.experience import ExperienceRecord
from mrl.transport.background import BackgroundClient
from mrl.transport.client_socket import ClientSocket
from mrl.transport.endpoints import nearest_endpoint, read_endpoint
from mrl.transport.grants import Grant, grant_of
from mrl.transport.keys import create_keys, load_client_keys, load_keys

PRODUCER, CONSUMER, READER = f"worker/{SOURCE}/0", "learner/llama", "llama"
ROUND_S = 0.2
POLL_S = 0.002
"""Seconds between two looks for records. The client has no call that waits for them: a learner looks once per step."""
AWAITED, ASKED_AT_ONCE = 4000, 500
"""Number of prompts that are watched at a time, and in one question."""


def serve(settings: Settings) -> Iterator[Settings]:
    """Run the daemon, one round at a time."""
    run = Path(str(settings["run"]))
    create_keys(run / "keys", [Grant("worker", SOURCE), Grant("learner", READER)])
    daemon = ExchangeDaemon(
        run / "exchange",
        run / "endpoints",
        load_keys(run / "keys"),
        host="127.0.0.1",
        port=0,
        limits=Limits(durability=settings["durability"]),  # type: ignore[arg-type]
        clock=time.monotonic,
    )
    yield settings
    while True:
        daemon.round(ROUND_S)
        yield settings


class WatchedClient(ExchangeClient):
    """Client that notes the times of the daemon's acknowledgements, as (records stored so far, monotonic time)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.acknowledged: list[tuple[int, float]] = []

    def on_message(self, body: bytes) -> None:
        """Handle the message as the client does, then note the count of stored records if it rose."""
        super().on_message(body)
        stored = self.counts.get("stored", 0)
        if not self.acknowledged or stored > self.acknowledged[-1][0]:
            self.acknowledged.append((stored, time.monotonic()))


def connect(settings: Settings, client: str) -> WatchedClient:
    """Connect a client as the roles of a run do."""
    run, grant = Path(str(settings["run"])), grant_of(client)
    find = nearest_endpoint if settings["is_near"] else read_endpoint
    socket = ClientSocket(
        load_client_keys(run / "keys", grant), lambda: find(run / "endpoints", ENDPOINT), identity=client
    )
    found = WatchedClient.connect(
        lambda on_message, on_tick: BackgroundClient(socket, on_message=on_message, on_tick=on_tick),
        client=client,
        policy=grant.policy,
    )
    assert isinstance(found, WatchedClient)
    return found


class Producer:
    """Producer that waits for room in the client's queue, as a worker of a synchronous run does."""

    def __init__(self, settings: Settings) -> None:
        self._client = connect(settings, PRODUCER)
        self._stored_before = self._num_twice = 0

    def prepare(self, records: Sequence[ExperienceRecord]) -> Sequence[ExperienceRecord]:
        """Return the records unchanged: the client takes them as they are."""
        self._stored_before = self._client.counts.get("stored", 0)
        self._client.acknowledged.clear()
        return records

    def send(self, part: Sequence[ExperienceRecord], *, is_paced: bool) -> None:
        """Publish records, without waiting for their acknowledgement."""
        self._client.publish(part, room_within_s=DEADLINE_S)

    def finish(self) -> None:
        """Wait until all is acknowledged; report records that were put twice.

        Raises RuntimeError when a record was refused for another reason or dropped, or not all is acknowledged in time.
        """
        if not self._client.flush(DEADLINE_S):
            raise RuntimeError(f"not everything was acknowledged: {self._client.counts}")
        refused = {name: number for name, number in self._client.counts.items() if name.startswith("refused/")}
        num_twice = refused.pop("refused/duplicate", 0)
        if refused:
            raise RuntimeError(f"the daemon has refused records: {refused}")
        if num_twice > self._num_twice:
            sys.stderr.write(f"{num_twice - self._num_twice} records were put twice: the daemon was silent for long\n")
            self._num_twice = num_twice

    def acknowledgements(self) -> list[tuple[int, float]]:
        """See bench_peers.part.Producer; the client's counts are read after every message of the daemon."""
        return [(total - self._stored_before, at_s) for total, at_s in self._client.acknowledged]

    def close(self) -> None:
        """Close the client."""
        self._client.close(0.0)


class Consumer:
    """Consumer that watches prompts, up to `AWAITED` ahead of the records that came."""

    def __init__(self, settings: Settings) -> None:
        self._client = connect(settings, CONSUMER)

    def take_all(self, checklist: Checklist) -> Stamp:
        """Take records until none is missing; return that moment. Raises RuntimeError after `DEADLINE_S`."""
        end_s = time.monotonic() + DEADLINE_S
        num_asked = 0
        while checklist.num_missing:
            if num_asked - checklist.num_came <= AWAITED - ASKED_AT_ONCE and num_asked < len(checklist.ids):
                ids = checklist.ids[num_asked : num_asked + ASKED_AT_ONCE]
                self._client.fetch(ids, kinds=SINGLE_KINDS, limit=1, max_age_versions=None)
                num_asked += len(ids)
            received = self._client.take()
            if received:
                checklist.tick_off(one.record for one in received)
            elif time.monotonic() > end_s:
                raise RuntimeError(f"records are missing: {self._client.counts}")
            else:
                time.sleep(POLL_S)
        return stamp()

    def close(self) -> None:
        """Close the client."""
        self._client.close(0.0)
