"""Requests outside of episodes: what the gateway hands to a rollout worker, and what comes back.

Nothing of them is trained on. Every request is for one answer. Messages are msgpack over a WebSocket of the worker's:

    worker ──▶ WorkerRoom, PlainPiece, PlainAnswer, PlainRefusal        gateway ──▶ PlainRequest, WithdrawnRequest

The same line carries how the turns of an episode grow, where an agent streams them (`TurnPiece`).
"""

from typing import Annotated

import msgspec

from mrl.records.episodes import Message, Text, ToolCall

LOST = "lost"
"""Code of a refusal that says nothing of the request: another worker may answer it."""
MAX_PLAIN_MESSAGES = 4096


class PlainRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="request"):
    """One answer, please, to a conversation, a text or token ids: to whichever of the three is there."""

    request_id: str
    messages: Annotated[tuple[Message, ...], msgspec.Meta(max_length=MAX_PLAIN_MESSAGES)] = ()
    tools: tuple[Text, ...] = ()
    """JSON of each, as chat templates take it."""
    text: str | None = None
    token_ids: tuple[int, ...] = ()
    """Of the policy's own tokenizer, or so whoever asks says."""
    temperature: float | None = None
    """None: the policy's own."""
    top_p: float = 1.0
    max_new_tokens: int | None = None
    """0 samples nothing. None: as many as the policy's own answers may have, as where it is more than that."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Of the policy's own EOS ids, all of which end an answer anyway, or so whoever asks says."""
    seed: int
    """Of 64 bits."""
    scores_given: bool = False
    """Whether the given tokens are scored, too."""
    streams: bool = False
    """Whether pieces of the answer are told before its end."""


class PlainToken(msgspec.Struct, frozen=True, array_like=True):
    """One token of a text that was given or sampled."""

    token_id: int
    spelled: bytes
    """Its bytes; those of its name for a special token."""
    logprob: float | None = None
    """In nats: of a sampled one in the distribution that it was sampled from, of a given one at temperature 1."""
    likeliest_spelled: bytes = b""
    """Of a given one: the token that is likeliest in its place."""
    likeliest_logprob: float | None = None


class PlainPiece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="piece"):
    """What an answer has more than at its last piece; the whole answer comes at the end all the same."""

    request_id: str
    version: int
    """The step of the weights that sampled its end."""
    text: str = ""
    """May lag behind its tokens: what a character, a stop text or a call may still be made of is not in it."""
    sampled: tuple[PlainToken, ...] = ()


class PlainAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="answer"):
    """What the policy said."""

    request_id: str
    version: int
    """The step of the weights that sampled its end, or scored."""
    given: tuple[PlainToken, ...] = ()
    """Of a request that wants them scored; the first one has no log-probability."""
    num_given_tokens: int
    text: str = ""
    """Before what ended it; with tools, before the first call that can be read."""
    tool_calls: tuple[ToolCall, ...] = ()
    sampled: tuple[PlainToken, ...] = ()
    """All of it, its end included."""
    is_cut: bool = False
    """Whether the limit ended it."""


class PlainRefusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Why there is no answer: a code in a word, and a line."""

    request_id: str
    code: str
    words: str


class TurnPiece(msgspec.Struct, frozen=True, kw_only=True, tag="turn_piece"):
    """What a turn of an episode says more than at its last piece; the turn itself goes to the seat, whole."""

    session: str
    num_turns: int
    """Turns of the policy before this one."""
    start: int
    """Characters of it that were told before."""
    text: str


class WorkerRoom(msgspec.Struct, frozen=True, tag="room"):
    """A worker of this policy takes so many requests at a time now, and answers them by this step's weights."""

    policy: str
    room: int
    version: int | None
    is_kept: bool = False
    """Whether that is an earlier step's, for whoever asks for it by its step."""


class WithdrawnRequest(msgspec.Struct, frozen=True, tag="withdrawn"):
    """Whoever asked is gone."""

    request_id: str


PlainReply = PlainPiece | PlainAnswer | PlainRefusal | WorkerRoom
FromWorker = PlainReply | TurnPiece
FromGateway = PlainRequest | WithdrawnRequest
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_from_gateway: msgspec.msgpack.Decoder[FromGateway] = msgspec.msgpack.Decoder(FromGateway)


def read_worker(body: bytes) -> FromWorker:
    """What a worker says. Raises msgspec.DecodeError."""
    return _from_worker.decode(body)


def read_gateway(body: bytes) -> FromGateway:
    """What the gateway says. Raises msgspec.DecodeError."""
    return _from_gateway.decode(body)


def plain_message(message: FromWorker | FromGateway) -> bytes:
    """As it is sent."""
    return msgspec.msgpack.encode(message)
