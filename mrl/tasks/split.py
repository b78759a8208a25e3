"""The part of the data that a prompt belongs to: as its data set says, or by a hash of its subject.

The hash is the same for every task and seed.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, TypeAlias

from mrl.config.task_tables import TaskTable
from mrl.tasks.source import Item, Part, Source

LeftOut: TypeAlias = Literal["repeated", "contradicted", "too long"]
HELD_OUT_PERCENT = 15
TRAIN_PERCENT = 40


def part_of(item: Item) -> Part:
    """Return an item's part, shared by prompts about the same word in any case. Without a subject the text decides."""
    if item.part is not None:
        return item.part
    percent = _hash_percent(item.subject.lower() or item.text)
    if percent < HELD_OUT_PERCENT:
        return "held_out"
    return "train" if percent < HELD_OUT_PERCENT + TRAIN_PERCENT else "warm_start"


def hashed_part(text: str) -> Part:
    """Return the part of an entry of a data set that names none and has no part for the warm start."""
    return "held_out" if _hash_percent(text) < HELD_OUT_PERCENT else "train"


def _hash_percent(text: str) -> int:
    """Return 0 to 99, evenly spread, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % 100


def distinct_items(
    source: Source, table: TaskTable, limit: int, left_out: Counter[LeftOut] | None = None
) -> Iterator[Item]:
    """Yield items with distinct prompts among the first `limit` entries, tagged, and no longer than the task allows.

    Adds the numbers of the other entries to `left_out`, by reason.
    """
    seen: dict[str, str] = {}
    others: Counter[LeftOut] = Counter() if left_out is None else left_out
    for item in source.items(limit):
        if item.text in seen:
            others["repeated" if item.reference == seen[item.text] else "contradicted"] += 1
        elif table.max_prompt_chars and len(item.text) > table.max_prompt_chars:
            others["too long"] += 1
        else:
            seen[item.text] = item.reference
            turns = item.turns and (*item.turns[:-1], ("user", _tagged(item.turns[-1][1], table.tags)))
            yield replace(item, text=_tagged(item.text, table.tags), turns=turns)


def _tagged(text: str, tags: list[str]) -> str:
    """Return the prompt after one of the kind tags, always the same tag for the same prompt."""
    if not any(tags):
        return text
    choice = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % len(tags)
    return f"{tags[choice]} {text}" if tags[choice] else text
