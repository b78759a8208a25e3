"""The seat of an episode whose environment is an agent: it offers the episode to the gateway of the run, and waits.

One WebSocket per episode to `/seat` of the gateway, whose address and key lie in the run folder. Messages are msgpack;
each message of the seat is answered by one turn.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from mrl.tasks.environments.attentive_socket import AttentiveSocket
from mrl.tasks.environments.contract import GIVEN_UP, LIMITS, RAISED, EnvironmentTurn, PolicyTurn
from mrl.tasks.environments.gateway_location import MARK, gateway_of
from mrl.tasks.environments.shared_loop import SharedLoop
from mrl.tasks.environments.user_class import BadReturn

CONNECT_S = 30.0
AWAY_S, RETRY_S = 60.0, 0.5
"""Seconds for which an absent gateway is looked for, and seconds between two tries."""


class OfferSeat(msgspec.Struct, frozen=True, tag="offer"):
    """Asks for an agent for an episode of this policy; the row is the task's data for agents."""

    policy: str
    task: str
    row: dict[str, Any]


class StepSeat(msgspec.Struct, frozen=True, tag="step"):
    """Tells a turn of the policy and asks for the answer."""

    turn: PolicyTurn


class FinishSeat(msgspec.Struct, frozen=True, tag="finish"):
    """Asks for the reward: there are no further turns. `turn` is the last one where the agent has not seen it."""

    reason: str
    turn: PolicyTurn | None = None


SeatRequest = OfferSeat | StepSeat | FinishSeat
_request = msgspec.msgpack.Decoder(SeatRequest)
_reply = msgspec.msgpack.Decoder(EnvironmentTurn)


def read_seat(body: bytes) -> SeatRequest:
    """Decode a seat's message. Raises msgspec.DecodeError."""
    return _request.decode(body)


def seat_reply(turn: EnvironmentTurn) -> bytes:
    """Encode the answer to a seat."""
    return msgspec.msgpack.encode(turn)


class AgentSeat:
    """One episode whose environment is an agent."""

    def __init__(self, name: str) -> None:
        folder, self._policy, self._task = json.loads(name.removeprefix(MARK))
        self._folder = Path(folder)
        self._http: aiohttp.ClientSession | None = None
        self._socket: AttentiveSocket | None = None

    def reset(self, seed: int, row: Mapping[str, Any]) -> EnvironmentTurn:
        """Return the first messages of the agent that takes the episode, with its tools."""
        SharedLoop.run(self._connect())
        return self._asked(OfferSeat(self._policy, self._task, {"seed": seed, **row}))

    def step(self, turn: PolicyTurn) -> EnvironmentTurn:
        """Return the agent's next messages, or its reward."""
        return self._asked(StepSeat(turn))

    def finish(self, reason: str, turn: PolicyTurn | None = None) -> EnvironmentTurn:
        """Return the agent's reward."""
        return self._asked(FinishSeat(reason, turn))

    def close(self) -> None:
        """Close the connection."""
        if self._http is not None:
            SharedLoop.run(self._disconnect())

    def _asked(self, request: SeatRequest) -> EnvironmentTurn:
        body = SharedLoop.run(self._exchange(msgspec.msgpack.encode(request)))
        if body is None:  # the gateway was killed, or ends with the run: neither agent nor policy is at fault
            return EnvironmentTurn(done=True, reason=GIVEN_UP, words="the gateway closed the connection")
        return _reply.decode(body)

    async def _connect(self) -> None:
        """Connect to the gateway, which may be about to start or to start again. Raises BadReturn."""
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CONNECT_S))
        deadline_s, reason = time.monotonic() + AWAY_S, ""
        while time.monotonic() < deadline_s:
            try:
                url, key = gateway_of(self._folder)
                socket = await self._http.ws_connect(
                    f"{url}/seat",
                    max_msg_size=4 * LIMITS.turn_bytes,
                    heartbeat=CONNECT_S,
                    headers={"Authorization": f"Bearer {key}"},
                )
                self._socket = AttentiveSocket(socket)
                return
            except (OSError, ValueError, KeyError):
                reason = "it has not published its address"
            except aiohttp.WSServerHandshakeError as error:
                reason = f"it refused the connection with HTTP status {error.status}"
                break
            except (aiohttp.ClientError, TimeoutError) as error:
                reason = str(error)
            await asyncio.sleep(RETRY_S)
        await self._http.close()
        raise BadReturn(RAISED, f"the gateway of the run cannot be reached: {reason}")

    async def _exchange(self, body: bytes) -> bytes | None:
        """Send a message and return the gateway's answer; None where the gateway closed the connection."""
        assert self._socket is not None
        try:
            await self._socket.socket.send_bytes(body)
        except ConnectionError:
            return None
        answer = await self._socket.receive()
        return answer.data if answer.type is aiohttp.WSMsgType.BINARY else None

    async def _disconnect(self) -> None:
        assert self._http is not None
        if self._socket is not None:
            await self._socket.close()
        await self._http.close()
