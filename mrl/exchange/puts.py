"""Records on their way into messages: checked one by one, and packed into parts of bounded size."""

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from mrl.errors import RecordError
from mrl.records.codec import MAX_MESSAGE_BYTES, decode, encode
from mrl.records.experience import ExperienceRecord, experience_decoder

ENVELOPE_BYTES = 1024
"""What a message holds beside its records, at most."""
MAX_RECORD_BYTES = MAX_MESSAGE_BYTES - ENVELOPE_BYTES
MAX_PUT_BYTES = 1024 * 1024
MAX_PUT_RECORDS = 1024


def packed(records: Iterable[ExperienceRecord], counts: Counter[str]) -> Iterator[tuple[list[msgspec.Raw], int]]:
    """The encoded records in consecutive parts with their bytes, each small enough for one Put.

    What no daemon would take is left out and added to `counts`.
    """
    part: list[msgspec.Raw] = []
    part_bytes = 0
    for record in records:
        body = encode(record)
        if fault := fault_of(body):
            counts[fault] += 1
            continue
        if part and (part_bytes + len(body) > MAX_PUT_BYTES or len(part) == MAX_PUT_RECORDS):
            yield part, part_bytes
            part, part_bytes = [], 0
        part.append(msgspec.Raw(body))
        part_bytes += len(body)
    if part:
        yield part, part_bytes


def fault_of(body: bytes) -> str:
    """Why an encoded record would cost a whole Put its reception, or "". Encoding alone checks no bounds."""
    if len(body) > MAX_RECORD_BYTES:
        return "too_large"
    try:
        decode(body, experience_decoder)
    except RecordError:
        return "invalid"
    return ""
