"""What depends on a record's type: how many are kept, for whom they are, and what they weigh in memory."""

from mrl.records.experience import (
    ExperienceRecord,
    OutcomeRecord,
    RecordKind,
    RolloutRecord,
    ScoreRecord,
    ScoreRequestRecord,
    ValueRecord,
)

OVERHEAD_BYTES = 1000
"""Memory that one held record costs beyond its encoded form: objects, keys, indices (a test measures it)."""
ANSWER_OVERHEAD_BYTES = 300
"""The same for each answer with its trace inside a record of many."""
GIVEN_OVERHEAD_BYTES = 100
"""The same for each answer without a trace."""
REWARD_OVERHEAD_BYTES = 32
"""The same for each reward."""


def quotas(successes_per_prompt: int) -> dict[RecordKind, int]:
    """Records kept of every type, source policy and prompt. Of groups the newest is enough: it is the least stale."""
    return {"outcome": successes_per_prompt, "rollout": 1, "value": 1, "score_request": 4, "score": 4}


def addressee(record: ExperienceRecord) -> str:
    """The one policy that may have the record; "" when all may."""
    match record:
        case ScoreRequestRecord():
            return record.scorer
        case ScoreRecord():
            return record.receiver
        case _:
            return ""


def is_for(record: ExperienceRecord, policy: str) -> bool:
    """Whether this policy may have the record."""
    return addressee(record) in ("", policy)


def held_bytes(record: ExperienceRecord, payload_bytes: int) -> int:
    """Memory that a record of this encoded size takes, as counted against the budget."""
    return payload_bytes + OVERHEAD_BYTES + _overhead_of_answers(record)


def _overhead_of_answers(record: ExperienceRecord) -> int:
    match record:
        case OutcomeRecord():
            return 0
        case ValueRecord():
            return REWARD_OVERHEAD_BYTES * len(record.rewards)
        case ScoreRequestRecord():
            return GIVEN_OVERHEAD_BYTES * len(record.answers)
        case RolloutRecord():
            return ANSWER_OVERHEAD_BYTES * len(record.answers)
        case ScoreRecord():
            return ANSWER_OVERHEAD_BYTES * len(record.scores)
