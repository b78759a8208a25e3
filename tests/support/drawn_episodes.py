"""Conversations to play: what is said by a policy and to it, and episodes drawn of that."""

import numpy as np

from mrl.records.episodes import Message, ToolCall

CALL = ToolCall(name="look_up", arguments='{"key":"b"}')
OTHER_CALLS = "[{name}({arguments})]"
"""How another family writes a call, as of `PlainVoice`."""
CONTENTS = ["reverse: yah", "copy: hay", "h", "naïve café", "a reverse: hay yah 12"]


def own(content: str, *calls: ToolCall) -> Message:
    """A turn of the policy."""
    return Message("assistant", content, tool_calls=calls)


def told(content: str) -> Message:
    """What the environment says."""
    return Message("user", content)


def drawn(rng: np.random.Generator) -> list[Message]:
    """An episode of one to three turns."""
    said = []
    for _ in range(rng.integers(1, 4)):
        content = str(rng.choice(CONTENTS))
        said += [own(content, *[CALL] * int(rng.integers(0, 2))), told(str(rng.choice(["7", "higher"])))]
    return said[:-1]
