"""Requests and answers of the chat API <-> messages, tools and turns.

The form is that of https://platform.openai.com/docs/api-reference/chat. A key that a policy in training cannot follow
is refused by name, or named as unheeded.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mrl.errors import RecordError
from mrl.records.canonical_json import canonical_json
from mrl.records.episodes import Message, ToolCall, ToolSpec
from mrl.tasks.environments.contract import PolicyTurn, RawPrompt

SAMPLING = (
    "temperature", "top_p", "max_tokens", "max_completion_tokens", "stop", "seed", "top_logprobs",
    "frequency_penalty", "presence_penalty", "logit_bias", "tool_choice", "response_format",
)  # fmt: skip
"""Keys that say how to sample. In a session none is heeded: the policy is sampled as its configuration says."""
MAX_CHOICES = 1


class ChatRefusal(Exception):
    """Refusal of a request: HTTP status, a code in one word, and a line that says why, with the cure."""

    def __init__(self, words: str, *, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(words)
        self.code, self.status = code, status

    def as_json(self) -> dict[str, Any]:
        """JSON body of the refusal, as clients of OpenAI's API read it."""
        return {"error": {"message": str(self), "type": "invalid_request_error", "param": None, "code": self.code}}


@dataclass(frozen=True, slots=True)
class ChatCall:
    """An agent's request for the policy's next turn."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    is_streamed: bool
    wants_logprobs: bool
    unheeded: dict[str, Any]
    """Key -> value of what the request sets and the policy does not follow."""
    bare: RawPrompt | None = None
    """Text or token ids without roles, in the place of messages; None for a request with messages."""

    def is_same(self, other: "ChatCall") -> bool:
        """Whether both requests ask for the same turn."""
        return (self.messages, self.tools, self.bare) == (other.messages, other.tools, other.bare)


def read_chat(body: object, *, models: Sequence[str]) -> ChatCall:
    """Read a request for a turn; `models` are the names that it may ask. Raises ChatRefusal."""
    if not isinstance(body, Mapping):
        raise ChatRefusal("the body is not a JSON object")
    check_model(body.get("model"), models)
    if body.get("n") not in (None, MAX_CHOICES):
        raise ChatRefusal(f"n = {body['n']}: a session gives one answer at a time; omit n")
    try:
        messages = read_messages(body.get("messages"))
        tools = read_tools(body.get("tools"))
    except RecordError as error:
        raise ChatRefusal(str(error)) from None
    unheeded = {key: body[key] for key in SAMPLING if body.get(key) is not None}
    return ChatCall(messages, tools, body.get("stream") is True, read_flag(body, "logprobs"), unheeded)


def read_flag(body: Mapping[str, Any], key: str) -> bool:
    """Read a boolean key; False where it is missing or null. Raises ChatRefusal."""
    found = body.get(key)
    if found is not None and found is not True and found is not False:  # 1 == True
        raise ChatRefusal(f"{key} {found!r:.40}: wanted true or false")
    return found is True


def check_model(model: object, models: Sequence[str]) -> None:
    """Check the name of a request's model. Raises ChatRefusal for a name that is none of `models`."""
    if model not in models:
        raise ChatRefusal(
            f"model {model!r:.80}: wanted {' or '.join(map(repr, models))}", code="model_not_found", status=404
        )


def read_messages(found: object) -> tuple[Message, ...]:
    """Read a conversation; a tool's answer gets the name of its call. Raises ChatRefusal, RecordError."""
    if not isinstance(found, list) or not found:
        raise ChatRefusal("messages: wanted a list of at least one message")
    names: dict[str, str] = {}
    messages = []
    for place, one in enumerate(found):
        if not isinstance(one, Mapping):
            raise ChatRefusal(f"messages[{place}]: wanted an object with role and content")
        found_calls = _list(one.get("tool_calls"), f"messages[{place}].tool_calls")
        calls = tuple(_call(call, names, place) for call in found_calls)
        role = "system" if one.get("role") == "developer" else one.get("role")
        name = ""
        if role == "tool":
            name = names.get(str(one.get("tool_call_id")), "") or str(one.get("name") or "")
        messages.append(Message(role, _text(one.get("content"), place), calls, name))  # type: ignore[arg-type]
    return tuple(messages)


def read_tools(found: object) -> tuple[ToolSpec, ...]:
    """Read the tools that a request offers. Raises ChatRefusal, RecordError."""
    return tuple(_tool(one) for one in _list(found, "tools"))


def completion(call_id: str, model: str, turn: PolicyTurn, said: Message, *, created_s: int) -> dict[str, Any]:
    """JSON body that answers a request for a turn with the policy's turn."""
    choice = answered_choice(call_id, said, is_cut=turn.is_cut)
    return {"id": call_id, "object": "chat.completion", "created": created_s, "model": model, "choices": [choice]}


def answered_choice(call_id: str, said: Message, *, is_cut: bool) -> dict[str, Any]:
    """JSON of a choice with a whole answer; the ids of its tool calls begin with `call_id`."""
    message: dict[str, Any] = {"role": "assistant", "content": said.content or (None if said.tool_calls else "")}
    if said.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"{call_id}-{place}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for place, call in enumerate(said.tool_calls)
        ]
    reason = "length" if is_cut else "tool_calls" if said.tool_calls else "stop"
    return {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}


def said_by(turn: PolicyTurn) -> Message:
    """Message of a policy's turn; where a tool call in the turn cannot be read, its whole text and no calls."""
    if turn.broken or not turn.tool_calls:
        return Message("assistant", turn.text)
    return Message("assistant", turn.content, turn.tool_calls)


def is_same(one: Message, other: Message) -> bool:
    """Whether two messages are equal, but for white space at either end of the assistant's text."""
    if one.role == other.role == "assistant":
        return one.content.strip() == other.content.strip() and one.tool_calls == other.tool_calls
    return one == other


def _list(found: object, where: str) -> list[Any]:
    """Read a list; empty where it is missing or null. Raises ChatRefusal."""
    if found is None:
        return []
    if not isinstance(found, list):
        raise ChatRefusal(f"{where}: wanted a list")
    return found


def _text(content: object, place: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [one.get("text") if isinstance(one, Mapping) and one.get("type") == "text" else None for one in content]
        if all(isinstance(part, str) for part in parts):
            return "".join(part for part in parts if part)
    raise ChatRefusal(f"messages[{place}].content: wanted text; the policies of this run read neither images nor files")


def _call(call: object, names: dict[str, str], place: int) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise ChatRefusal(f"messages[{place}].tool_calls: wanted objects with id and function")
    name = str(function.get("name") or "")
    names[str(call.get("id"))] = name
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError, RecursionError):
        raise ChatRefusal(f"messages[{place}].tool_calls: the arguments of {name!r:.40} are not JSON") from None
    if not isinstance(arguments, Mapping):
        raise ChatRefusal(f"messages[{place}].tool_calls: the arguments of {name!r:.40} are not a JSON object")
    return ToolCall.of(name, arguments)


def _tool(found: object) -> ToolSpec:
    function = found.get("function") if isinstance(found, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatRefusal('tools: wanted objects {"type": "function", "function": {"name": ..., "parameters": ...}}')
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    try:
        return ToolSpec(function["name"], str(function.get("description") or ""), canonical_json(parameters))
    except (TypeError, ValueError) as error:
        raise ChatRefusal(f"tools: {error}") from None
