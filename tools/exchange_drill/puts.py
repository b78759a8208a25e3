"""Puts as a client of the library makes them, from whoever they claim to be."""

from collections.abc import Sequence

import msgspec

from mrl.exchange.packing import OpenPut
from mrl.records.exchange_messages import Put
from mrl.records.experience import ExperienceRecord


def put_of(client: str, seq: int, records: Sequence[ExperienceRecord]) -> Put:
    """A Put of these records, in packs. Raises ValueError when they do not fit into one."""
    put = OpenPut()
    for record in records:
        if put.add(record) != "taken":
            raise ValueError("the records do not fit into one Put")
    heads, arrays = put.sealed()
    packs = [msgspec.structs.replace(head, records=msgspec.Raw(a)) for head, a in zip(heads, arrays, strict=True)]
    return Put(client=client, seq=seq, packs=packs)
