"""Episodes: answers of several segments, some sampled by a policy and the others given by an environment.

Messages mean the same to every policy; each policy's own chat template renders them in tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec

from mrl.errors import RecordError
from mrl.records.canonical_json import canonical_json, parse_json
from mrl.records.version import Count

MAX_TURN_BYTES = 1 << 20
"""Most bytes of UTF-8 text of all messages of a turn, tool calls included."""
MAX_TURN_MESSAGES, MAX_TURN_CALLS, MAX_NAME_CHARS = 256, 64, 64
MAX_TOOLS, MAX_SCHEMA_BYTES = 128, 1 << 16
"""Most tools of an environment, and most bytes of one tool's description and schema as canonical JSON."""
MAX_SEGMENTS = 2000
NAMELESS = "unknown"
"""Name of the tool in the answer to a broken call."""
CUT = "cut"
"""Ending of an episode whose last turn reached the policy's token limit."""
MAX_TOKENS = "max_tokens"
"""Ending of an episode that had no room for another turn."""
MAX_LAST_MESSAGES, MAX_LAST_CHARS = 8, 2000
"""Most messages, and characters of each, that are kept of an environment's words after the policy's last turn."""
Text = Annotated[str, msgspec.Meta(max_length=MAX_TURN_BYTES)]
MessageRole = Literal["system", "user", "assistant", "tool"]


class ToolCall(msgspec.Struct, frozen=True):
    """One call of a tool, in no model family's syntax."""

    name: str
    arguments: Text = "{}"
    """A JSON object in canonical form, `{"key":"b"}`."""

    def __post_init__(self) -> None:
        check_name("a tool call's name", self.name)
        try:
            value = parse_json(self.arguments)
        except ValueError as error:
            raise RecordError(f"arguments of {self.name}: {error}") from None
        if not isinstance(value, dict) or canonical_json(value) != self.arguments:
            raise RecordError(f"arguments of {self.name}: not a JSON object in canonical form")

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, Any]) -> "ToolCall":
        """Return a call with these arguments. Raises RecordError for arguments that are not JSON."""
        try:
            return cls(name, canonical_json(arguments))
        except (TypeError, ValueError) as error:
            raise RecordError(f"arguments of {name}: {error}") from None

    @property
    def values(self) -> dict[str, Any]:
        """Arguments by name."""
        return dict(parse_json(self.arguments))


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation.

    Example: `Message("tool", "42", name="calculate")`.
    """

    role: MessageRole
    content: Text
    tool_calls: Annotated[tuple[ToolCall, ...], msgspec.Meta(max_length=MAX_TURN_CALLS)] = ()
    """Tools that an assistant's message calls; empty in other messages."""
    name: str = ""
    """Tool that gives the answer of a tool's message; empty in other messages."""

    def __post_init__(self) -> None:
        if self.role not in get_args(MessageRole):
            raise RecordError(f"unknown role {self.role!r:.40}; wanted one of {', '.join(get_args(MessageRole))}")
        if self.tool_calls and self.role != "assistant":
            raise RecordError(f"a message of role {self.role} has tool calls; only assistant messages may")
        if len(self.tool_calls) > MAX_TURN_CALLS:
            raise RecordError(f"{len(self.tool_calls)} tool calls; at most {MAX_TURN_CALLS}")
        if self.name:
            check_name("a message's name", self.name)
        if self.num_bytes > MAX_TURN_BYTES:
            raise RecordError(f"content of {self.num_bytes:,} bytes; at most {MAX_TURN_BYTES:,}")

    @property
    def num_bytes(self) -> int:
        """Bytes of the content and the calls as UTF-8. Raises RecordError for text that is not UTF-8."""
        return bytes_of(self.content) + sum(bytes_of(call.name + call.arguments) for call in self.tool_calls)


Messages = Annotated[tuple[Message, ...], msgspec.Meta(max_length=MAX_TURN_MESSAGES)]


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool that an environment offers. `parameters` is the JSON schema of its arguments, as canonical text."""

    name: str
    description: str
    parameters: str

    def __post_init__(self) -> None:
        check_name("a tool's name", self.name)
        if self.num_bytes > MAX_SCHEMA_BYTES:
            raise RecordError(f"schema of {self.name}: {self.num_bytes:,} bytes; at most {MAX_SCHEMA_BYTES:,}")
        try:
            value = parse_json(self.parameters)
        except ValueError as error:
            raise RecordError(f"schema of {self.name}: {error}") from None
        if not isinstance(value, dict) or value.get("type") != "object":
            raise RecordError(f'schema of {self.name}: not a JSON schema of type "object"')

    @property
    def num_bytes(self) -> int:
        """Bytes of the description and the schema as UTF-8."""
        return bytes_of(self.description) + bytes_of(self.parameters)

    def as_chat(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates take."""
        described = {"name": self.name, "description": self.description, "parameters": parse_json(self.parameters)}
        return {"type": "function", "function": described}


class Opening(msgspec.Struct, frozen=True, omit_defaults=True):
    """First messages and tools of an environment's episode, in no model family's syntax."""

    messages: Annotated[tuple[Message, ...], msgspec.Meta(min_length=1, max_length=MAX_TURN_MESSAGES)]
    tools: Annotated[tuple[ToolSpec, ...], msgspec.Meta(max_length=MAX_TOOLS)] = ()


class EpisodeSegment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One segment of an episode after its prompt: a turn of the policy, or the messages that the environment gives."""

    num_tokens: Count
    """Tokens of the segment in its row; 0 for messages of the environment after the policy's last turn."""
    is_sampled: bool
    """Whether the policy sampled the segment. Only sampled tokens are trained on."""
    messages: Messages
    begins_row: bool = False
    """Whether a new row begins with the segment, so that the policy saw no earlier token. The tokens of the segment are
    given: the whole conversation as the chat template renders it, of which `messages` are the newest."""
    is_rewritten: bool = False
    """Whether an agent rewrote the conversation, so that the new row holds only these messages."""
    is_bare: bool = False
    """Whether an agent gave the segment as text or ids without roles, or the policy sampled the segment behind such a
    text. The roles of its messages are then only for readers: no template rendered them. A row that begins with such
    a segment holds none of the earlier conversation."""


Segments = Annotated[list[EpisodeSegment], msgspec.Meta(max_length=MAX_SEGMENTS)]


def check_name(what: str, name: str) -> None:
    """Check a name. Raises RecordError for a name that is empty, too long or not printable."""
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise RecordError(f"{what} {name!r:.80}: wanted 1 to {MAX_NAME_CHARS} printable characters")


def bytes_of(text: str) -> int:
    """Return the length of a text as UTF-8. Raises RecordError for text that is not UTF-8."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise RecordError("the text is not UTF-8: it has an unpaired surrogate") from None


def shortened(segment: EpisodeSegment) -> EpisodeSegment:
    """Return the environment's words after the policy's last turn as a segment without tokens, cut for readers."""
    first = segment.messages[:MAX_LAST_MESSAGES]
    kept = tuple(Message(one.role, one.content[:MAX_LAST_CHARS], name=one.name) for one in first)
    return EpisodeSegment(num_tokens=0, is_sampled=False, messages=kept)


def conversation_to_read(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages of a conversation that a segment has room for: the first and the last, cut where long."""
    half = MAX_TURN_MESSAGES // 2
    kept = tuple(messages if len(messages) <= MAX_TURN_MESSAGES else (*messages[:half], *messages[-half:]))
    if sum(one.num_bytes for one in kept) <= MAX_TURN_BYTES:
        return kept
    return tuple(Message(one.role, one.content[:MAX_LAST_CHARS], name=one.name) for one in kept)


def transcript(messages: Sequence[Message]) -> str:
    """Return a conversation for people to read: every message after its role, calls as `name(arguments)`."""
    return "\n".join(f"{_speaker(message)}: {_said(message)}" for message in messages)


def _speaker(message: Message) -> str:
    return f"{message.role} {message.name}" if message.name else message.role


def _said(message: Message) -> str:
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return " ".join([message.content, *calls] if message.content else calls)


def as_chat(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """Return messages in the form that chat templates take; answers of tools refer in order to the calls before them.

    The answer to a broken call is that of a tool `NAMELESS`: the templates of Hermes need a name in every answer.
    """
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
            chat |= {"tool_call_id": _call_id(num_answers), "name": message.name or NAMELESS}
            num_answers += 1
        found.append(chat)
    return found


def _call_id(place: int) -> str:
    """Return an id of 9 characters, as the templates of Mistral demand."""
    return f"call{place:05d}"
