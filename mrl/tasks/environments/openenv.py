"""An OpenEnv server as an environment: one WebSocket per episode, over aiohttp.

Messages are those of `openenv.core.env_server.types` (0.10): {"type": "reset" | "step" | "close", "data": {...}} is
answered by {"type": "observation", "data": {"observation": {...}, "reward": x, "done": b}} or {"type": "error", ...}.
Where the server offers MCP tools, the policy's calls are actions `call_tool`; else its text is the action, under the
key that the URL names: ws://127.0.0.1:8000/ws?text=message. A server does not tell whether it answers equal turns
equally; the URL may: ws://127.0.0.1:8000/ws?deterministic=yes.
"""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

import aiohttp

from mrl.records.canonical_json import canonical_json
from mrl.records.episodes import Message, ToolSpec
from mrl.tasks.environments.attentive_socket import AttentiveSocket
from mrl.tasks.environments.contract import (
    DONE,
    LIMITS,
    NOT_FINITE,
    RAISED,
    TOO_LONG,
    WRONG_TYPE,
    EnvironmentTurn,
    PolicyTurn,
)
from mrl.tasks.environments.shared_loop import SharedLoop
from mrl.tasks.environments.user_class import BadReturn

CONNECT_S = 30.0
SAID_KEYS = ("message", "text", "content", "prompt", "messages", "output", "result")
"""Keys of an observation that may hold the text for the policy; the first that is there counts. Without any, the
whole observation is shown as JSON."""
LIST_TOOLS, CALL_TOOL = {"type": "list_tools"}, "call_tool"


class OpenEnvEnvironment:
    """One episode on a server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        asked = parse_qs(parts.query)
        self._text_key = asked.get("text", ["message"])[0]
        self._is_deterministic = asked.get("deterministic", ["no"])[0] == "yes"
        path = parts.path if parts.path.strip("/") else "/ws"
        self._url = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
        self._http: aiohttp.ClientSession | None = None
        self._socket: AttentiveSocket | None = None
        self._tools: tuple[ToolSpec, ...] = ()
        self._sum = 0.0

    def reset(self, seed: int, row: Mapping[str, Any]) -> EnvironmentTurn:
        """Return the server's first observation after the row's prompt, and its tools, where it has any."""
        SharedLoop.run(self._connect())
        options = {key: value for key, value in row.items() if key not in ("prompt", "seed")}
        observed = self._asked("reset", {"seed": seed, **options})
        self._tools = self._listed()
        said = _said(observed.get("observation"))
        prompt = row.get("prompt", "")
        text = "\n".join(part for part in (prompt if isinstance(prompt, str) else "", said) if part)
        if not text:
            raise BadReturn(WRONG_TYPE, "reset returned an observation without text, and the row has no prompt")
        return EnvironmentTurn((Message("user", text),), tools=self._tools, is_deterministic=self._is_deterministic)

    def step(self, turn: PolicyTurn) -> EnvironmentTurn:
        """Return the server's answer to the calls of a turn, or to its text where the server has no tools."""
        if not self._tools:
            observed = self._asked("step", {self._text_key: turn.text})
            messages = (Message("user", said),) if (said := _said(observed.get("observation"))) else ()
            return self._turn(messages, observed, 0)
        if not turn.tool_calls and not turn.broken:
            return self.finish(DONE, None)
        messages, errors, observed = (), len(turn.broken), {}
        for call in turn.tool_calls:
            observed = self._asked("step", {"type": CALL_TOOL, "tool_name": call.name, "arguments": call.values})
            text, is_error = _tool_text(observed.get("observation"))
            messages, errors = (*messages, Message("tool", text, name=call.name)), errors + is_error
            if observed.get("done") is True:
                break
        broken = tuple(Message("tool", f"error: {one.words}") for one in turn.broken)
        return self._turn((*messages, *broken), observed, errors)

    def finish(self, reason: str, turn: PolicyTurn | None) -> EnvironmentTurn:
        """Return the sum of the rewards so far; a cut turn has none."""
        return EnvironmentTurn(done=True, reward=self._sum, reason=reason)

    def close(self) -> None:
        """End the connection, and with it the server's session."""
        if self._http is not None:
            SharedLoop.run(self._disconnect())

    def _turn(self, messages: tuple[Message, ...], observed: Mapping[str, Any], errors: int) -> EnvironmentTurn:
        if observed.get("done") is True:
            return EnvironmentTurn(messages, done=True, reward=self._sum, reason=DONE, tool_errors=errors)
        if not messages:
            raise BadReturn(WRONG_TYPE, "step returned an observation without text, but the episode is not over")
        return EnvironmentTurn(messages, tool_errors=errors)

    def _asked(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the `data` of the server's answer, and add its reward. Raises BadReturn for an error of the server."""
        answer = SharedLoop.run(self._exchange({"type": kind, "data": data}))
        found = answer.get("data")
        if answer.get("type") == "error":
            words = found.get("message", "") if isinstance(found, Mapping) else found
            raise BadReturn(RAISED, f"the server reported an error: {words}")
        if answer.get("type") != "observation" or not isinstance(found, Mapping):
            raise BadReturn(WRONG_TYPE, f"the server answered {answer.get('type')!r:.40}; wanted an observation")
        reward = found.get("reward")
        if isinstance(reward, int | float):
            self._sum += reward
            if not abs(self._sum) <= LIMITS.reward:
                raise BadReturn(
                    NOT_FINITE,
                    f"the sum of rewards is {self._sum} after a reward of {reward}; at most {LIMITS.reward:,.0f}",
                )
        return found

    def _listed(self) -> tuple[ToolSpec, ...]:
        """Return the MCP tools of the server; none where it takes no such action."""
        answer = SharedLoop.run(self._exchange({"type": "step", "data": LIST_TOOLS}))
        data = answer.get("data")
        found = data.get("observation", {}).get("tools") if isinstance(data, Mapping) else None
        if answer.get("type") != "observation" or not isinstance(found, list):
            return ()
        return tuple(
            ToolSpec(
                str(one.get("name")),
                str(one.get("description") or ""),
                canonical_json(one.get("input_schema") or one.get("inputSchema") or {"type": "object"}),
            )
            for one in found
        )

    async def _connect(self) -> None:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CONNECT_S))
        self._socket = AttentiveSocket(
            await self._http.ws_connect(self._url, max_msg_size=4 * LIMITS.turn_bytes, heartbeat=CONNECT_S)
        )

    async def _exchange(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._socket is not None
        await self._socket.socket.send_str(json.dumps(message))
        answer = await self._socket.receive()
        if answer.type is not aiohttp.WSMsgType.TEXT:
            too_long = self._socket.socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
            kind = TOO_LONG if too_long else RAISED
            words = f"the connection to the server ended ({answer.type.name}, {self._socket.socket.close_code})"
            raise BadReturn(kind, words)
        found = json.loads(answer.data)
        if not isinstance(found, Mapping):
            raise BadReturn(WRONG_TYPE, f"the server answered {answer.data!r:.80}; wanted a JSON object")
        return found

    async def _disconnect(self) -> None:
        assert self._http is not None
        if self._socket is not None:
            if not self._socket.socket.closed:
                await self._socket.socket.send_str(json.dumps({"type": "close"}))
            await self._socket.close()
        await self._http.close()


def _said(observation: object) -> str:
    """Return the text of an observation for the policy."""
    if not isinstance(observation, Mapping):
        return ""
    for key in SAID_KEYS:
        value = observation.get(key)
        if isinstance(value, str) and value:
            return value
    shown = {key: value for key, value in observation.items() if key not in ("metadata", "reward", "done")}
    return canonical_json(shown) if shown else ""


def _tool_text(observation: object) -> tuple[str, bool]:
    """Return the text of a tool's answer, and whether it is an error."""
    if not isinstance(observation, Mapping):
        return "", False
    if (error := observation.get("error")) is not None:
        words = error.get("message") if isinstance(error, Mapping) else error
        return f"error: {words}", True
    result = observation.get("result")
    if isinstance(result, Mapping):  # as MCP has it: content, and data where it is structured
        result = result.get("data", result.get("structured_content")) or _contents(result)
    return (result if isinstance(result, str) else canonical_json(result)), False


def _contents(result: Mapping[str, Any]) -> str:
    parts = result.get("content")
    texts = (
        [str(part.get("text", "")) for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
    )
    return "\n".join(texts)
