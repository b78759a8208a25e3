"""A producer or the consumer: `python -m exchange_drill.part producer|consumer RUN SETTINGS`.

producer   publishes records of rising numbers in chunks of random length. Notes in its journal up to which number all
           are acknowledged, and goes on from there when it is started again. Ends on SIGTERM once all are.
consumer   reads the stream of all records. Its journal is the checkpoint of a learner: the position and the ids of what
           was trained on, in one write. Commits afterwards, and goes on from there when it is started again. With
           `die_at` it kills itself in one of `die_every` batches: after it "took" them, after the "checkpoint", or
           after it "committed".
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from exchange_drill.journals import Journal, last_entry
from exchange_drill.workload import READER, SOURCE, STREAM, is_intact, make_record
from mrl.exchange.client import ExchangeClient
from mrl.records.experience import Received
from mrl.transport.background import BackgroundClient
from mrl.transport.client import ClientSocket
from mrl.transport.endpoints import nearest_endpoint, read_endpoint
from mrl.transport.grants import grant_of
from mrl.transport.keys import load_client_keys

DEADLINE_S = 120.0
FLUSH_S = 0.5
POLL_S = 0.001
MAX_CHUNK_RECORDS = 1500


def connect(run: Path, name: str, *, over_tcp: bool) -> ExchangeClient:
    """A client as the roles connect theirs."""
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
    """Until told to stop. Raises RuntimeError when records were dropped or refused, for another reason than doubles."""
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
    """Raises RuntimeError when something that was published can never be acknowledged."""
    bad = {name: number for name, number in client.counts.items() if name in ("dropped", "invalid", "too_large")}
    bad |= {name: number for name, number in client.counts.items() if name.startswith("refused/")}
    bad.pop("refused/duplicate", None)
    if any(bad.values()):
        raise RuntimeError(f"not everything was taken: {bad}")


def consume(run: Path, settings: dict[str, Any], stop: threading.Event) -> None:
    """Until told to stop. Raises RuntimeError when a record came out of order or damaged."""
    client = connect(run, f"learner/{READER}", over_tcp=settings["over_tcp"])
    path = run / "consumer.jsonl"
    position = (last_entry(path) or {"position": 0})["position"]
    journal, rng = Journal(path), random.Random()
    client.read(STREAM, kinds=["outcome"], after=position)
    while not stop.is_set():
        received = client.take()
        if not received:
            stop.wait(POLL_S)
            continue
        check(received, position)
        dies = rng.random() < 1.0 / settings["die_every"] if settings["die_every"] else False
        die_if(dies and settings["die_at"] == "took")
        position = received[-1].number
        ids = [item.record.record_id for item in received]
        journal.append({"position": position, "at_s": time.monotonic(), "ids": ids})
        die_if(dies and settings["die_at"] == "checkpoint")
        client.commit(STREAM, position)
        die_if(dies and settings["die_at"] == "committed")
    client.close(0.0)


def check(received: list[Received], position: int) -> None:
    """Raises RuntimeError unless numbers rise and contents are what their producers made."""
    for item in received:
        if item.number <= position:
            raise RuntimeError(f"number {item.number} came after {position}")
        if not is_intact(item.record):
            raise RuntimeError(f"{item.record.record_id} was changed on its way")
        position = item.number


def die_if(is_due: bool) -> None:
    """As a process dies that is killed from outside."""
    if is_due:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    kind, run, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    print("drill: ready", flush=True)
    {"producer": produce, "consumer": consume}[kind](run, settings, stop)


if __name__ == "__main__":
    main()
