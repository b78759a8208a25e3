"""Conversations to play: messages of a policy and of an environment, and episodes drawn of these."""

import numpy as np

from mrl.records.episodes import Message, ToolCall

CALL = ToolCall(name="look_up", arguments='{"key":"b"}')
OTHER_CALLS = "[{name}({arguments})]"
"""Format of a call in another family, for `DirectRequestCodec`."""
CONTENTS = ["reverse: yah", "copy: hay", "h", "naïve café", "a reverse: hay yah 12"]


def own(content: str, *calls: ToolCall) -> Message:
    """Return a turn of the policy."""
    return Message("assistant", content, tool_calls=calls)


def told(content: str) -> Message:
    """Return a message of the environment."""
    return Message("user", content)


def drawn(rng: np.random.Generator) -> list[Message]:
    """Draw an episode of one to three turns."""
    said = []
    for _ in range(rng.integers(1, 4)):
        content = str(rng.choice(CONTENTS))
        said += [own(content, *[CALL] * int(rng.integers(0, 2))), told(str(rng.choice(["7", "higher"])))]
    return said[:-1]
