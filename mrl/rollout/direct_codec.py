"""Requests outside of episodes as prompts of one policy, and its answers as text and calls: whole, or as they grow."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mrl.alignment.receiver import Receiver
from mrl.engines.engine import Decoding, StopStrings, before_stop
from mrl.errors import ModelFolderError
from mrl.models.turn_renderer import TurnRenderer
from mrl.records.canonical_json import parse_json
from mrl.records.direct_requests import DirectRequest
from mrl.records.episodes import ToolCall
from mrl.tasks.environments.tool_syntax import ToolSyntax, begun_at_end

MAX_TOKEN_BYTES = 16
"""Bytes of text for each token that a prompt may have; text has about four. Longer text is not tokenized: a tokenizer
takes seconds for a long word, and sampling waits for it."""

Int32s = npt.NDArray[np.int32]


def text_so_far(said: bytes, ends: Sequence[bytes], syntax: ToolSyntax | None) -> str:
    """Return the part of a growing text that later tokens cannot change, before any of `ends` and calls in `syntax`."""
    if (before := before_stop(said, ends)) == said:
        before = said[: len(said) - max((begun_at_end(said, end) for end in ends), default=0)]
    text = codecs.getincrementaldecoder("utf-8")(errors="replace").decode(before)  # without half a character
    return text if syntax is None else syntax.content_so_far(text)


def spelled_token(receiver: Receiver, renderer: TurnRenderer, token_id: int) -> bytes:
    """Return the bytes of a token; of a special token its name."""
    return receiver.table.join([token_id]) or renderer.name(token_id).encode(errors="replace")


@dataclass(frozen=True)
class DirectRequestCodec:
    """Encodes requests outside of episodes for one policy, and reads its answers."""

    policy: str
    receiver: Receiver
    renderer: TurnRenderer
    syntax: ToolSyntax | None
    """Syntax of its tool calls; None where its template shows none that can be read."""
    stop: tuple[bytes, ...]
    """Texts that end its answers, beside EOS."""
    temperature: float
    max_new_tokens: int
    row_tokens: int
    """Tokens that a prompt and its answer may have together."""
    max_prompt_tokens: int
    """Tokens that a prompt, or a text to score, may have: what the memory plan counted."""

    def prompt(self, request: DirectRequest) -> Int32s:
        """Return the ids to go on from, or to score, [P]. Raises ValueError with words for the client."""
        others = [one for one in request.stop_token_ids if one not in self.receiver.eos_ids]
        if others:
            wanted = ", ".join(map(str, self.receiver.eos_ids)) or "none"
            raise ValueError(
                f"stop_token_ids: {others[0]} is not an end token of {self.policy}; its end tokens: {wanted}"
            )
        most = min(self.max_prompt_tokens, self.row_tokens - self.limit(request))
        if (num_bytes := _num_bytes(request)) > MAX_TOKEN_BYTES * most:  # before anything is tokenized
            raise ValueError(f"prompt: {num_bytes:,} bytes; at most {most} tokens of {MAX_TOKEN_BYTES} bytes each")
        if request.messages:
            if request.tools and self.syntax is None:
                cure = f"set policies.{self.policy}.prompt.family, if the package renderers has it"
                raise ValueError(
                    f"tools: the chat template of {self.policy} shows no tool call format that mrl knows; {cure}"
                )
            try:
                found = self.renderer.opening(request.messages, [parse_json(tool) for tool in request.tools])
            except ModelFolderError as error:
                raise ValueError(f"messages: {error}") from None
        elif request.text is not None:
            found = self.renderer.plain(request.text)
        else:
            found = np.array(request.token_ids, dtype=np.int64)
            known = self.receiver.table.is_known(found)
            if not known.all():
                raise ValueError(f"prompt: {self.policy} has no token {int(found[~known][0])}")
        if not found.size:
            raise ValueError("prompt: empty (no token)")
        if found.size > most:
            why = "gateway.max_prompt_tokens" if most == self.max_prompt_tokens else "with this max_tokens"
            raise ValueError(f"prompt: {found.size} tokens; at most {most} ({why})")
        return found.astype(np.int32)

    def limit(self, request: DirectRequest) -> int:
        """Return the token limit of the request's answer."""
        wanted = request.max_new_tokens
        return self.max_new_tokens if wanted is None else min(wanted, self.max_new_tokens)

    def decoding(self, request: DirectRequest) -> Decoding:
        """Return the decoding of the request's answer."""
        texts = self._ends(request)
        stop = StopStrings(texts, self.receiver.completion_bytes, self.receiver.table.join) if texts else None
        temperature = self.temperature if request.temperature is None else request.temperature
        return Decoding(temperature, request.top_p, self.limit(request), stop)

    def read(self, request: DirectRequest, sampled: Int32s, *, is_cut: bool) -> tuple[str, tuple[ToolCall, ...]]:
        """Return text and calls of an answer; a character that is cut in the middle becomes a replacement mark."""
        text = before_stop(self._said(request, sampled), self._ends(request)).decode(errors="replace")
        if not request.tools or self.syntax is None:
            return text, ()
        turn = self.syntax.read(text, is_cut=is_cut, tools=[parse_json(tool) for tool in request.tools])
        return (turn.text, ()) if turn.broken else (turn.content, turn.tool_calls)

    def read_so_far(self, request: DirectRequest, sampled: Int32s) -> str:
        """Return the part of a growing answer's text that later tokens cannot change."""
        syntax = self.syntax if request.tools else None
        return text_so_far(self._said(request, sampled), self._ends(request), syntax)

    def spelled(self, token_id: int) -> bytes:
        """Return the bytes of a token; of a special token its name."""
        return spelled_token(self.receiver, self.renderer, token_id)

    def _said(self, request: DirectRequest, sampled: Int32s) -> bytes:
        """Return the bytes of an answer; with tools, special tokens by name, since calls are written with them."""
        if not request.tools:
            return self.receiver.completion_bytes(sampled)
        table = self.receiver.table
        is_ended = bool(sampled.size) and int(sampled[-1]) in self.receiver.eos_ids
        ids = sampled[: sampled.size - is_ended]
        (places,) = np.nonzero(table.is_special(ids))
        parts = np.split(ids, places)
        named = [self.spelled(int(part[0])) + table.join(part[1:]) for part in parts[1:]]
        return self.receiver.completion_bytes(parts[0]) + b"".join(named)

    def _ends(self, request: DirectRequest) -> tuple[bytes, ...]:
        return (*self.stop, *(text.encode(errors="replace") for text in request.stop))


def _num_bytes(request: DirectRequest) -> int:
    """Return the bytes of text to be tokenized, without what a chat template adds."""
    texts = [request.text or "", *request.tools]
    for message in request.messages:
        texts += [message.content, *(call.arguments for call in message.tool_calls)]
    return sum(len(text.encode()) for text in texts)
