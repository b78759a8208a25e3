"""Records of the drill, made from producer and number alone: a restarted producer makes the same again."""

import time

from mrl.records.experience import OutcomeRecord
from mrl.records.finish import FinishReason
from mrl.records.version import Version

SOURCE, READER = "qwen", "llama"
LARGE_EVERY, LARGE_BYTES = 61, 37_000
HUGE_EVERY, HUGE_BYTES = 2003, 250_000


def num_bytes(number: int) -> int:
    """Length of the answer in the record of this number: mostly below 1 KB, now and then 37 KB or 250 KB."""
    if number % HUGE_EVERY == HUGE_EVERY - 1:
        return HUGE_BYTES
    if number % LARGE_EVERY == LARGE_EVERY - 1:
        return LARGE_BYTES
    return 100 + number * 7919 % 900


def record_id(producer: int, number: int) -> str:
    """Id of the producer's record with this number."""
    return f"{producer}:{number}"


def completion(name: str, length: int) -> bytes:
    """Answer in which every byte depends on the record's id."""
    word = f"{name};".encode()
    return (word * (length // len(word) + 1))[:length]


def make_record(producer: int, number: int) -> OutcomeRecord:
    """Make the producer's record with this number."""
    name = record_id(producer, number)
    return OutcomeRecord(
        record_id=name,
        source=SOURCE,
        oldest=Version(0, 1),
        newest=Version(0, 1),
        fingerprint="f",
        prompt_id=name,
        task="drill",
        created_unix_s=max(0.0, time.time()),
        completion=completion(name, num_bytes(number)),
        finish_reason=FinishReason.STOP,
        verifier="drill",
        reward=1.0,
    )


def is_intact(record: object) -> bool:
    """Whether a record that came is as it was made."""
    if not isinstance(record, OutcomeRecord):
        return False
    number = int(record.record_id.partition(":")[2])
    return record.completion == completion(record.record_id, num_bytes(number))
