"""Answers of made-up tokens, for tests of what becomes of groups on their way."""

from typing import Any

from mrl.records.codec import pack_array
from mrl.records.finish import FinishReason
from mrl.records.rollouts import Answer
from mrl.records.version import Version, VersionSpan


def made_answer(*steps: int, reward: float = 0.0, **fields: Any) -> Answer:
    """Make an answer of one token for each of these steps, sampled by the version of that step."""
    told = {
        "token_ids": pack_array([1] * len(steps), "i4"),
        "logprobs": pack_array([-1.0] * len(steps), "f4"),
        "versions": [VersionSpan(1, Version(0, step)) for step in steps],
        "completion": b"",
        "finish_reason": FinishReason.STOP,
    }
    return Answer(**(told | fields), reward=reward)
