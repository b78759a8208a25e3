"""Settings that lower the memory of a learner, the cheapest first."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from mrl.config.policy_tables import LearnerTable

LARGER_CURE = "use more sharded ranks (learner.processes), or train only adapters (learner.lora)"
LEAST_MICROBATCH_TOKENS = 256
"""Least `microbatch_tokens` to recommend: passes with fewer do not keep a processor busy."""
FEW_LOGITS = 1 << 25
"""Least `chunk_logits` to recommend: fewer save next to nothing."""


def shortest_cure(
    needed_mib: Callable[[LearnerTable], float], table: LearnerTable, room_mib: float, *, on_device: bool
) -> str:
    """Return the first setting that brings a learner's process below `room_mib`, or all that help.

    The text says how much memory the process then needs. `on_device`: whether the room is on a GPU, or else on the
    host.
    """
    now_mib = needed_mib(table)
    helping: dict[str, Any] = {}
    for change in _savings(table, on_device):
        mib = needed_mib(table.model_copy(update=change))
        if mib <= room_mib:
            return f"set {_told(change)}, which needs {mib:.0f} MiB"
        helping |= change if mib < now_mib else {}
    if not helping:
        return LARGER_CURE
    mib = needed_mib(table.model_copy(update=helping))
    if mib <= room_mib:
        return f"set {_told(helping)}, which needs {mib:.0f} MiB"
    return f"set {_told(helping)}, which still needs {mib:.0f} MiB; {LARGER_CURE} as well"


def all_cures(table: LearnerTable, *, on_device: bool) -> str:
    """Return every setting that lowers the memory of a learner's process, the cheapest first, without amounts."""
    changes: dict[str, Any] = {}
    for change in _savings(table, on_device):
        changes |= change
    return f"set {'some of ' * (len(changes) > 1)}{_told(changes)}, {LARGER_CURE}" if changes else LARGER_CURE


def _savings(table: LearnerTable, on_device: bool) -> Iterator[dict[str, Any]]:
    """Yield settings that need less memory than those of a table, the cheapest first."""
    if table.microbatch_tokens > (smaller := max(LEAST_MICROBATCH_TOKENS, table.microbatch_tokens // 4)):
        yield {"microbatch_tokens": smaller}
    if table.chunk_logits > FEW_LOGITS:
        yield {"chunk_logits": FEW_LOGITS}
    if not table.activation_checkpointing:
        yield {"activation_checkpointing": True}
    if table.processes > 1 and table.sharding != "shard":
        yield {"sharding": "shard"}
    short, other = ("device", "host") if on_device else ("host", "device")
    if table.optimizer_memory == short:
        yield {"optimizer_memory": other}
    if table.activation_offload != on_device:
        needed = {"activation_checkpointing": True} if on_device else {}
        yield needed | {"activation_offload": on_device}
    if table.precision != "bfloat16":
        yield {"precision": "bfloat16"}
    if table.optimizer_dtype != "bfloat16":
        yield {"optimizer_dtype": "bfloat16"}
    if table.parameter_dtype != "bfloat16" and table.lora is None:  # below adapters the folder has to have it already
        yield {"parameter_dtype": "bfloat16"}


def _told(change: dict[str, Any]) -> str:
    return ", ".join(f"learner.{key} = {json.dumps(value)}" for key, value in change.items())
