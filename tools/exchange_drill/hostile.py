"""Authenticated clients that want the daemon's memory: `python -m exchange_drill.hostile ATTACK RUN`, until killed.

Each is a process of its own, holds the key of a worker or learner, knows the protocol, and does what no client of mrl
does.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import zmq

from exchange_drill.clients import BareClient
from exchange_drill.workload import READER
from mrl.records.codec import encode
from mrl.records.exchange_messages import (
    Announce,
    Barrier,
    ClientMessage,
    Done,
    Fetch,
    Ping,
    Put,
    Subscribe,
    Unwatch,
)
from mrl.records.experience import ExperienceRecord, GivenAnswer, RolloutRecord, ScoreRequestRecord, SharedAnswer
from mrl.records.finish import FinishReason
from mrl.records.version import Version

MILLION = 1_000_000
WIDE = "\U0001f4a3"
"""A character that makes Python store every string with it at four bytes a character."""
MAX_NAME = 200
BOMB_BYTES = 3_200_000_000
NUM_READERS = 24


def connected(run: Path, name: str, policy: str) -> BareClient:
    """Connect a client and say Hello, again and again until the daemon answers."""
    while True:
        client = BareClient(run, name)
        if client.hello(policy) is not None:
            return client
        client.close()


def name_of(number: int) -> str:
    """Name with this number, as long as may be, of characters as wide as may be."""
    text = f"{number}"
    return WIDE * (MAX_NAME - len(text)) + text


def flood(run: Path) -> None:
    """Put rollouts as fast as they go, whatever window the daemon states, with acknowledgements unread."""
    client = connected(run, f"worker/{READER}/9", READER)
    for seq in count(1):
        client.send(_put(client, seq, [_rollout(f"f{seq}-{place}", 37_000) for place in range(20)]))


def large_records(run: Path) -> None:
    """Put one record of nearly 8 MB at a time, from four connections."""
    clients = [connected(run, f"worker/{READER}/{number}", READER) for number in range(4)]
    for seq in count(1):
        for place, client in enumerate(clients):
            client.send(_put(client, seq, [_rollout(f"l{seq}-{place}", 8_300_000)]))


def prompt_ids(run: Path) -> None:
    """Fetch and watch a million prompts, with names as long as may be, from many connections."""
    clients = [connected(run, f"worker/{READER}/{number}", READER) for number in range(20)]
    for start in count(0, 1000):
        client = clients[start // 1000 % len(clients)]
        client.send(_fetch(client, [name_of(number % MILLION) for number in range(start, start + 1000)], watch=True))
        while client.answer(timeout_s=0.0):
            pass


def slow_readers(run: Path) -> None:
    """Watch all prompts that come, from many connections, and read nothing."""
    clients = [connected(run, f"learner/{READER}/{number}", READER) for number in range(NUM_READERS)]
    for start in count(0, 500):
        for client in clients:
            ids = [f"{producer}:{start + number}" for producer in range(2) for number in range(1000)]
            client.send(_fetch(client, ids, watch=True), timeout_s=0.1)
            client.send(Ping(client=client.name), timeout_s=0.1)
        time.sleep(0.5)


def deaf_fetchers(run: Path) -> None:
    """Fetch the records that the daemon holds over and over; read and acknowledge no answer."""
    clients = [connected(run, f"learner/{READER}/{number}", READER) for number in range(NUM_READERS)]
    for seq in count(1):
        for client in clients:
            ids = [f"{producer}:{seq * 200 + number}" for producer in range(2) for number in range(200)]
            client.send(_fetch(client, ids, seq=seq), timeout_s=0.1)


def counts(run: Path) -> None:
    """Send messages with every list as long as may be, every name as long and new, every number as large."""
    client = connected(run, f"learner/{READER}/9", READER)
    for number in count():
        for message in _largest(client.name, number):
            client.send(message)
        while client.answer(timeout_s=0.0):
            pass


def _largest(client: str, number: int) -> Iterator[ClientMessage]:
    names = [name_of(number * 4096 + place) for place in range(4096)]
    yield Barrier(client=client, policy=READER, number=number, members=names[:256])
    yield Announce(client=client, policy=READER, version=Version(0, number))
    yield Subscribe(client=client, kinds=["score_request"] * 16)
    yield Done(client=client, deliveries=list(range(4096)), requests=names)
    yield Unwatch(client=client, prompt_ids=names)


def requests(run: Path) -> None:
    """Put score requests for names that are no policies, which nobody serves."""
    client = connected(run, f"worker/{READER}/9", READER)
    for seq in count(1):
        client.send(_put(client, seq, [_request(f"q{seq}-{place}", name_of(seq)) for place in range(1000)]))
        while client.answer(timeout_s=0.0):
            pass


def connections(run: Path) -> None:
    """Open two hundred connections at a time, each under a new name, close them, and open others."""
    for turn in count():
        clients = [BareClient(run, f"worker/{READER}/{turn}-{number}") for number in range(200)]
        for client in clients:
            client.send(_fetch(client, [name_of(turn)], watch=True), timeout_s=1.0)
            client.hello(READER)
        for client in clients:
            client.close()


def bomb(run: Path, *, frame_bytes: int) -> None:
    """Send one message of 3.2 GB in frames that are short enough; end when the daemon answers again."""
    client = connected(run, f"worker/{READER}/9", READER)
    frame = bytes(frame_bytes)
    for _ in range(BOMB_BYTES // frame_bytes):
        client.socket.send(frame, zmq.SNDMORE, copy=False)
    client.socket.send(b"")
    while client.answer(timeout_s=1.0) is None:
        client.send(Ping(client=client.name), timeout_s=1.0)


def _put(client: BareClient, seq: int, records: list[ExperienceRecord]) -> Put:
    return Put(client=client.name, seq=seq, records=[msgspec.Raw(encode(record)) for record in records])


def _fetch(client: BareClient, ids: list[str], *, watch: bool = False, seq: int = 0) -> Fetch:
    return Fetch(
        client=client.name,
        policy=READER,
        prompt_ids=ids,
        kinds=["outcome", "rollout"],
        limit=64,
        max_age_versions=None,
        watch=watch,
        seq=seq,
    )


def _rollout(name: str, num_bytes: int) -> RolloutRecord:
    length = min(num_bytes, 250_000)
    answer = SharedAnswer(completion=bytes(length), finish_reason=FinishReason.STOP, reward=1.0, advantage=0.5)
    return RolloutRecord(**_tags(name), answers=[answer] * (num_bytes // length))


def _request(name: str, scorer: str) -> ScoreRequestRecord:
    answer = GivenAnswer(completion=b"yes", finish_reason=FinishReason.STOP)
    return ScoreRequestRecord(**_tags(name), scorer=scorer, answers=[answer])


def _tags(name: str) -> dict[str, Any]:
    version = Version(0, 0)
    return {
        "record_id": name,
        "source": READER,
        "prompt_id": name,
        "oldest": version,
        "newest": version,
        "fingerprint": "f",
        "task": "t",
        "created_unix_s": 0.0,
    }


ATTACKS: Mapping[str, Callable[[Path], None]] = {
    "flood": flood,
    "large_records": large_records,
    "prompt_ids": prompt_ids,
    "slow_readers": slow_readers,
    "deaf_fetchers": deaf_fetchers,
    "counts": counts,
    "requests": requests,
    "connections": connections,
    "bomb_of_4_MB": partial(bomb, frame_bytes=4_000_000),
    "bomb_of_8_KB": partial(bomb, frame_bytes=8_000),
}

if __name__ == "__main__":
    ATTACKS[sys.argv[1]](Path(sys.argv[2]))
