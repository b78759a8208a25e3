"""What depends on a record's type: how many are kept, and whether in packs. And what all weigh beside their bytes."""

from mrl.records.experience import RecordKind

OVERHEAD_BYTES = 1280
"""Memory that one held record costs beyond its encoded form: tags, keys, indices (a test measures it)."""

ALWAYS_INDEXED: tuple[RecordKind, ...] = ("score_request", "score")
"""Types of which each record has an addressee."""


def quotas(successes_per_prompt: int) -> dict[RecordKind, int]:
    """Records kept of every type, source policy and prompt. Of groups the newest is enough: it is the least stale."""
    return {"outcome": successes_per_prompt, "rollout": 1, "value": 1, "score_request": 4, "score": 4}
