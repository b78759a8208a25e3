"""Episodes: answers of several segments, some sampled by a policy and the others given by an environment.

Messages mean the same to every policy; how they are spelled in tokens is a matter of each policy's own template.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from mrl.records.version import Count, Name

MAX_MESSAGE_CHARS = 1024 * 1024
Text = Annotated[str, msgspec.Meta(max_length=MAX_MESSAGE_CHARS)]
MessageRole = Literal["system", "user", "assistant", "tool"]


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a tool, free of any family's syntax."""

    name: Name
    arguments: Text = "{}"
    """A JSON object in its canonical form: keys sorted, no spaces."""

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name."""
        return dict(msgspec.json.decode(self.arguments))


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of a conversation.

    Example: `Message(role="tool", content="42", name="calculate")`.
    """

    role: MessageRole
    content: Text
    tool_calls: Annotated[tuple[ToolCall, ...], msgspec.Meta(max_length=64)] = ()
    """Of an assistant's message: the tools that it calls."""
    name: str = ""
    """Of a tool's message: the tool that answers."""


Messages = Annotated[tuple[Message, ...], msgspec.Meta(max_length=256)]


class Segment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stretch of an episode behind its prompt: one turn of the policy, or what the environment says to it."""

    num_tokens: Count
    """Tokens of the row that it takes; 0 for what an environment says at the very end."""
    is_sampled: bool
    """Whether the policy itself sampled these tokens. Only such tokens are trained on."""
    messages: Messages


MAX_SEGMENTS = 2000
Segments = Annotated[list[Segment], msgspec.Meta(max_length=MAX_SEGMENTS)]


def sampled_places(segments: Sequence[Segment]) -> npt.NDArray[np.bool_]:
    """[T] whether the policy sampled each token of a row of these segments."""
    return np.repeat(
        np.array([segment.is_sampled for segment in segments], dtype=bool),
        np.array([segment.num_tokens for segment in segments], dtype=np.int64),
    )


def transcript(messages: Sequence[Message]) -> str:
    """A conversation as people read it: every message behind its role, calls as `name(arguments)`."""
    return "\n".join(f"{_speaker(message)}: {_said(message)}" for message in messages)


def _speaker(message: Message) -> str:
    return f"{message.role} {message.name}" if message.name else message.role


def _said(message: Message) -> str:
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return " ".join([message.content, *calls] if message.content else calls)


def as_chat(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """Messages as chat templates take them; answers of tools name the calls before them in their order."""
    found: list[Mapping[str, Any]] = []
    num_answers = 0
    for message in messages:
        chat: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            num_answers = 0
            chat["tool_calls"] = [
                {"type": "function", "id": _call_id(place), "function": {"name": call.name, "arguments": call.values}}
                for place, call in enumerate(message.tool_calls)
            ]
        if message.role == "tool":
            chat |= {"tool_call_id": _call_id(num_answers)} | ({"name": message.name} if message.name else {})
            num_answers += 1
        found.append(chat)
    return found


def _call_id(place: int) -> str:
    """As long as the templates of Mistral want it."""
    return f"call{place:05d}"
