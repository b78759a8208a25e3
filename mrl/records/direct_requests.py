"""Requests outside of episodes: messages between the gateway and a rollout worker.

Nothing in them is trained on. Every request is for one answer. Messages are msgpack over a WebSocket of the worker:

    worker ──▶ WorkerRoom, DirectChunk, DirectAnswer, DirectRefusal        gateway ──▶ DirectRequest, WithdrawnRequest

The same connection carries the turns of an episode as they grow, where an agent streams them (`TurnChunk`).
"""

from typing import Annotated

import msgspec

from mrl.records.episodes import Message, Text, ToolCall

LOST = "lost"
"""Code of a refusal that is not about the request: another worker may answer it."""
MAX_DIRECT_MESSAGES = 4096


class DirectRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="request"):
    """A request for one answer to a conversation, a text or token ids; only one of the three is given."""

    request_id: str
    messages: Annotated[tuple[Message, ...], msgspec.Meta(max_length=MAX_DIRECT_MESSAGES)] = ()
    tools: tuple[Text, ...] = ()
    """JSON of each tool, as chat templates take it."""
    text: str | None = None
    token_ids: tuple[int, ...] = ()
    """Ids of the policy's own tokenizer, as the asker claims."""
    temperature: float | None = None
    """Sampling temperature; None for the policy's own."""
    top_p: float = 1.0
    max_new_tokens: int | None = None
    """Most tokens of the answer; 0 samples nothing. The policy's own limit holds where this is None or above it."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """EOS ids of the policy, as the asker claims; all EOS ids end an answer in any case."""
    seed: int
    """64-bit seed."""
    scores_given: bool = False
    """Whether the given tokens are scored, too."""
    streams: bool = False
    """Whether pieces of the answer are sent before its end."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token of a given or sampled text."""

    token_id: int
    spelled: bytes
    """Bytes of the token; for a special token, the bytes of its name."""
    logprob: float | None = None
    """In nats: of a sampled token under its sampling distribution, of a given token at temperature 1."""
    likeliest_spelled: bytes = b""
    """Bytes of the likeliest token in the place of a given token."""
    likeliest_logprob: float | None = None


class DirectChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="piece"):
    """The growth of an answer since its last piece. The whole answer comes at the end all the same."""

    request_id: str
    version: int
    """Step of the weights that sampled the last token."""
    text: str = ""
    """New text. It lags behind the tokens while they may be part of a character, a stop text or a tool call."""
    sampled: tuple[TokenLogprob, ...] = ()


class DirectAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="answer"):
    """The policy's whole answer."""

    request_id: str
    version: int
    """Step of the weights that sampled the last token, or scored the given ones."""
    given: tuple[TokenLogprob, ...] = ()
    """Scored given tokens, where the request wants scores; the first has no log-probability."""
    num_given_tokens: int
    text: str = ""
    """Text before the end token or stop text; with tools, before the first valid tool call."""
    tool_calls: tuple[ToolCall, ...] = ()
    sampled: tuple[TokenLogprob, ...] = ()
    """All sampled tokens, the end included."""
    is_cut: bool = False
    """Whether the token limit ended the answer."""


class DirectRefusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The reason for which there is no answer: a code of one word, and a line of text."""

    request_id: str
    code: str
    words: str


class TurnChunk(msgspec.Struct, frozen=True, kw_only=True, tag="turn_piece"):
    """The growth of an episode's turn since its last piece. The whole turn goes to the agent's seat at its end."""

    session: str
    num_turns: int
    """Turns of the policy before this one."""
    start: int
    """Characters of the turn that earlier pieces told."""
    text: str


class WorkerRoom(msgspec.Struct, frozen=True, tag="room"):
    """A worker of this policy takes at most `room` requests at once, and answers with the weights of step `version`."""

    policy: str
    room: int
    version: int | None
    is_kept: bool = False
    """Whether these are the weights of an earlier step, for requests that name that step."""


class WithdrawnRequest(msgspec.Struct, frozen=True, tag="withdrawn"):
    """The request was withdrawn: its asker is gone."""

    request_id: str


DirectReply = DirectChunk | DirectAnswer | DirectRefusal | WorkerRoom
FromWorker = DirectReply | TurnChunk
FromGateway = DirectRequest | WithdrawnRequest
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_from_gateway: msgspec.msgpack.Decoder[FromGateway] = msgspec.msgpack.Decoder(FromGateway)


def read_worker(body: bytes) -> FromWorker:
    """Decode a worker's message. Raises msgspec.DecodeError."""
    return _from_worker.decode(body)


def read_gateway(body: bytes) -> FromGateway:
    """Decode a message of the gateway. Raises msgspec.DecodeError."""
    return _from_gateway.decode(body)


def direct_message(message: FromWorker | FromGateway) -> bytes:
    """Encode a message for the wire."""
    return msgspec.msgpack.encode(message)
