"""Conversations of clients with the exchange daemon, and mutations of them: hostile inputs."""

import operator
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from mrl.records.codec import encode, pack_array
from mrl.records.exchange_messages import (
    Announce,
    Barrier,
    ClientMessage,
    Done,
    Fetch,
    Hello,
    Ping,
    Put,
    StatRequest,
    Subscribe,
    Unwatch,
)
from mrl.records.experience import (
    ExperienceRecord,
    GivenAnswer,
    OutcomeRecord,
    ScoreRecord,
    ScoreRequestRecord,
    TokenTrace,
    ValueRecord,
)
from mrl.records.finish import FinishReason
from mrl.records.version import Version
from tests.support.exchange_stage import CLIENTS, joined, pieces

MAX_PIECE_BYTES = 65_535
SPECIAL: Sequence[Any] = (
    None, True, 0, -1, 1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 0.0, -1.5, float("nan"), float("inf"), "", "x", "qwen",
    "llama", "x" * 201, "\U0001f4a3" * 200, b"", b"\xff" * 64, [], {}, [[]] * 50, {"": ""}, ["x"] * 5000,
)  # fmt: skip
QWEN_WORKER, LLAMA_LEARNER, LLAMA_WORKER, QWEN_LEARNER, ADMIN = range(5)


def conversations() -> dict[str, bytes]:
    """One conversation of every sort that clients of mrl hold, by name."""
    outcome, value = _outcome("r1"), ValueRecord(**_tags("v1", "qwen"), rewards=[0.5, 1.0])
    request = ScoreRequestRecord(**_tags("q1", "qwen"), scorer="llama", answers=[GivenAnswer(**_ANSWER)])
    score = ScoreRecord(**_tags("s1", "llama"), request_id="q1", receiver="qwen", scores=[_trace(3), None])
    ask = Fetch(client="l", policy="llama", prompt_ids=["p1", "p2"], limit=4, max_age_versions=3, watch=True, seq=1)
    spoken: dict[str, list[tuple[int, ClientMessage]]] = {
        "hello": [(QWEN_WORKER, Hello(client="w", policy="qwen")), (ADMIN, Ping(client="a"))],
        "stat": [(QWEN_WORKER, _put(1, outcome)), (ADMIN, StatRequest(client="a"))],
        "fetch": [(QWEN_WORKER, _put(1, outcome, value)), (LLAMA_LEARNER, ask), _done(1), _unwatch("p1")],
        "watch": [(LLAMA_LEARNER, ask), (QWEN_WORKER, _put(1, outcome)), _done(1)],
        "twice": [(QWEN_WORKER, _put(1, outcome)), (QWEN_WORKER, _put(1, outcome)), (QWEN_WORKER, _put(2, outcome))],
        "score": [
            (LLAMA_WORKER, Subscribe(client="w", kinds=["score_request"])),
            (QWEN_WORKER, _put(1, request)),
            (LLAMA_WORKER, _put(1, score)),
            (LLAMA_WORKER, Done(client="w", requests=["q1"])),
        ],
        "barrier": [
            (place, Barrier(client="l", policy=policy, number=3, members=["llama", "qwen"]))
            for place, policy in ((LLAMA_LEARNER, "llama"), (QWEN_LEARNER, "qwen"))
        ],
        "versions": [
            (QWEN_LEARNER, Announce(client="l", policy="qwen", version=Version(0, 5))),
            (QWEN_WORKER, _put(1, outcome)),
            (QWEN_LEARNER, Announce(client="l", policy="qwen", version=Version(1, 2), resumed=True)),
            (QWEN_WORKER, _put(2, _outcome("r3", epoch=0, step=4), _outcome("r4", epoch=1, step=2))),
        ],
        "full": [(QWEN_WORKER, _put(seq, _outcome(f"f{seq}", prompt_id=f"p{seq}", size=2500))) for seq in range(1, 9)],
    }
    return {name: joined((client, encode(message)) for client, message in said) for name, said in spoken.items()}


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return a conversation with one change: of a value in a message, or of a message."""
    said = pieces(data)
    if not said:
        return data
    place = rng.randrange(len(said))
    client, body = said[place]
    match rng.randrange(6):
        case 0:
            said.insert(rng.randrange(len(said) + 1), (client, body))
        case 1:
            said[place] = (rng.randrange(len(CLIENTS)), body)
        case 2:
            del said[place]
        case 3:
            said[place] = (client, body[: rng.randrange(len(body) + 1)])
        case _:
            said[place] = (client, _changed(body, rng)[:MAX_PIECE_BYTES])
    return joined(said)


def _changed(body: bytes, rng: random.Random) -> bytes:
    """Return a message with one value, however deep, replaced; bytes that are no message lose or change one byte."""
    try:
        content = msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        place = rng.randrange(len(body) + 1)
        return body[:place] + rng.randbytes(rng.randrange(3)) + body[place + 1 :]
    places: list[Callable[[Any], None]] = []
    _collect(content, places, rng)
    if not places:
        return msgspec.msgpack.encode(rng.choice(SPECIAL))
    rng.choice(places)(rng.choice(SPECIAL))
    return msgspec.msgpack.encode(content)


def _collect(content: Any, places: list[Callable[[Any], None]], rng: random.Random) -> None:
    """Collect setters of all values inside of `content`."""
    if isinstance(content, dict):
        pairs = list(content.items())
    elif isinstance(content, list):
        pairs = list(enumerate(content))
    else:
        return
    for key, value in pairs:
        places.append(partial(operator.setitem, content, key))
        _collect(value, places, rng)


_ANSWER: dict[str, Any] = {"completion": b"yes", "finish_reason": FinishReason.STOP}


def _tags(name: str, source: str, epoch: int = 0, step: int = 0) -> dict[str, Any]:
    version = Version(epoch, step)
    return {
        "record_id": name, "source": source, "prompt_id": "p1", "oldest": version, "newest": version,
        "fingerprint": "f", "task": "t", "created_unix_s": 0.0,
    }  # fmt: skip


def _outcome(name: str, *, prompt_id: str = "p1", epoch: int = 0, step: int = 0, size: int = 3) -> OutcomeRecord:
    tags = _tags(name, "qwen", epoch, step) | {"prompt_id": prompt_id}
    return OutcomeRecord(
        **tags, completion=b"y" * size, finish_reason=FinishReason.STOP, verifier="v", reward=1.0, trace=_trace(size)
    )


def _trace(num_tokens: int) -> TokenTrace:
    ones = [1] * min(num_tokens, 3)
    return TokenTrace(
        byte_lengths=pack_array(ones, "i4"), logprobs=pack_array(ones, "f4"), special=pack_array(ones, "u1")
    )


def _put(seq: int, *records: ExperienceRecord) -> Put:
    return Put(client="w", seq=seq, records=[msgspec.Raw(encode(record)) for record in records])


def _done(delivery: int) -> tuple[int, Done]:
    return LLAMA_LEARNER, Done(client="l", deliveries=[delivery])


def _unwatch(prompt_id: str) -> tuple[int, Unwatch]:
    return LLAMA_LEARNER, Unwatch(client="l", prompt_ids=[prompt_id])
