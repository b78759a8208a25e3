"""A producer or the consumer of a drill: `python -m exchange_drill.part producer|consumer RUN SETTINGS`.

producer   publishes records of rising numbers in chunks of random length, each record on a prompt of its own. Notes in
           its journal up to which number all are acknowledged, and goes on from there when it is started again. Ends
           on SIGTERM once all are acknowledged.
consumer   watches the prompts that it awaits, as a learner of another policy does. Its journal is the checkpoint: the
           ids of the records that were trained on. Started again, it asks for the records that it awaits, and drops by
           their ids those that the checkpoint holds. With `die_at` it kills itself in one of `die_every` batches: after
           it "took" them, or after the "checkpoint".
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from exchange_drill.journals import Journal, entries, last_entry
from exchange_drill.workload import READER, SOURCE, is_intact, make_record, record_id
from mrl.exchange.client import ExchangeClient
from mrl.processes.role_runtime import stop_event
from mrl.records.experience import Received
from mrl.transport.background import BackgroundClient
from mrl.transport.client_socket import ClientSocket
from mrl.transport.endpoints import nearest_endpoint, read_endpoint
from mrl.transport.grants import grant_of
from mrl.transport.keys import load_client_keys

DEADLINE_S = 120.0
FLUSH_S = 0.5
POLL_S = 0.001
MAX_CHUNK_RECORDS = 200
AWAITED = 1500
"""Number of one producer's prompts that are awaited at once."""
GIVE_UP_S = 5.0
"""Seconds after which a record counts as evicted if later ones have come; a learner's pending table is bounded too."""


def connect(run: Path, name: str, *, over_tcp: bool = False) -> ExchangeClient:
    """Connect a client as the roles of a run do."""
    grant = grant_of(name)
    resolve = read_endpoint if over_tcp else nearest_endpoint
    socket = ClientSocket(
        load_client_keys(run / "keys", grant), lambda: resolve(run / "endpoints", "exchange"), identity=name
    )
    return ExchangeClient.connect(
        lambda on_message, on_tick: BackgroundClient(socket, on_message=on_message, on_tick=on_tick),
        client=name,
        policy=grant.policy,
    )


def produce(run: Path, settings: dict[str, Any], stop: threading.Event) -> None:
    """Publish until `stop` is set. Raises RuntimeError when records were dropped or refused, but for duplicates."""
    producer = settings["number"]
    client = connect(run, f"worker/{SOURCE}/{producer}", over_tcp=settings["over_tcp"])
    rng = random.Random(f"{settings['seed']} {producer} {os.getpid()}")
    path = run / f"producer-{producer}.jsonl"
    upto = (last_entry(path) or {"upto": -1})["upto"]
    journal = Journal(path)
    while not stop.is_set():
        chunk = range(upto + 1, upto + 1 + rng.randint(1, MAX_CHUNK_RECORDS))
        begun_s = time.monotonic()
        client.publish([make_record(producer, number) for number in chunk], room_within_s=DEADLINE_S)
        while not client.flush(FLUSH_S):
            check_counts(client)
        check_counts(client)
        upto = chunk[-1]
        journal.append({"upto": upto, "begun_s": begun_s, "at_s": time.monotonic()})
        stop.wait(settings["pause_s"])
    client.close(0.0)


def check_counts(client: ExchangeClient) -> None:
    """Check the client's counts. Raises RuntimeError when a published record can never be acknowledged."""
    bad = {name: number for name, number in client.counts.items() if name in ("dropped", "too_large")}
    bad |= {name: number for name, number in client.counts.items() if name.startswith("refused/")}
    bad.pop("refused/duplicate", None)
    if any(bad.values()):
        raise RuntimeError(f"not everything was taken: {bad}")


class Awaited:
    """Prompts of one producer that are awaited: watched, with no record trained on yet."""

    def __init__(self, run: Path, producer: int, trained: Iterable[int]) -> None:
        self._path = run / f"producer-{producer}.jsonl"
        self._producer, self._trained = producer, set(trained)
        self._next, self._asked_s, self._newest = 0, dict[int, float](), max(self._trained, default=-1)

    def note(self, number: int) -> None:
        """Note that the record with this number was trained on."""
        self._asked_s.pop(number, None)
        self._newest = max(self._newest, number)

    def ask(self, client: ExchangeClient, now_s: float) -> None:
        """Give up records that are too late, and ask for further prompts."""
        late = [number for number, at_s in self._asked_s.items() if number < self._newest and now_s - at_s > GIVE_UP_S]
        client.unwatch(record_id(self._producer, number) for number in late)
        for number in late:
            del self._asked_s[number]
        if self._asked_s and now_s - max(self._asked_s.values()) > GIVE_UP_S:
            self._skip_evicted()
        new: list[int] = []
        while len(self._asked_s) + len(new) < AWAITED:
            if self._next not in self._trained:
                new.append(self._next)
            self._next += 1
        if len(new) > AWAITED // 4 or (new and not self._asked_s):
            ids = [record_id(self._producer, number) for number in new]
            client.fetch(ids, kinds=["outcome"], limit=1, max_age_versions=None)
            self._asked_s |= dict.fromkeys(new, now_s)
        else:
            self._next -= len(new)  # asked for later, together with others

    def _skip_evicted(self) -> None:
        """Go on near the producer's last publication if no awaited record came, as after a very long absence."""
        first = (last_entry(self._path) or {"upto": 0})["upto"] - AWAITED
        if first > max(self._asked_s):
            self._asked_s.clear()
            self._next = first


def consume(run: Path, settings: dict[str, Any], stop: threading.Event) -> None:
    """Consume until `stop` is set. Raises RuntimeError when a record came damaged."""
    client = connect(run, f"learner/{READER}", over_tcp=settings["over_tcp"])
    path = run / "consumer.jsonl"
    trained = {name for entry in entries(path) for name in entry["ids"]}
    by_producer: dict[int, list[int]] = {number: [] for number in range(settings["num_producers"])}
    for name in trained:
        producer, _, number = name.partition(":")
        by_producer[int(producer)].append(int(number))
    awaited = {producer: Awaited(run, producer, numbers) for producer, numbers in by_producer.items()}
    journal, rng = Journal(path), random.Random()
    while not stop.is_set():
        for one in awaited.values():
            one.ask(client, time.monotonic())
        received = [item for item in client.take() if item.record.record_id not in trained]
        if not received:
            stop.wait(POLL_S)
            continue
        check(received)
        dies = rng.random() < 1.0 / settings["die_every"] if settings["die_every"] else False
        die_if(dies and settings["die_at"] == "took")
        ids = [item.record.record_id for item in received]
        journal.append({"at_s": time.monotonic(), "ids": ids})
        die_if(dies and settings["die_at"] == "checkpoint")
        trained.update(ids)
        for name in ids:
            producer, _, number = name.partition(":")
            awaited[int(producer)].note(int(number))
    client.close(0.0)


def check(received: list[Received]) -> None:
    """Check records. Raises RuntimeError unless their contents are those that their producers made."""
    for item in received:
        if not is_intact(item.record):
            raise RuntimeError(f"{item.record.record_id} was changed on its way")


def die_if(is_due: bool) -> None:
    """Kill this process with SIGKILL if `is_due`, as from outside."""
    if is_due:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    kind, run, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    stop = stop_event()
    print("drill: ready", flush=True)
    {"producer": produce, "consumer": consume}[kind](run, settings, stop)


if __name__ == "__main__":
    main()
