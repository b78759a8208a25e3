"""Messages between a policy and an environment: texts, tool calls, tools, and the turns of either side.

Every value is checked when it is made, also when it comes from another process: every existing value keeps the limits
of `LIMITS`. No value holds what is trained on; the sampler keeps its tokens beside the text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mrl.errors import RecordError
from mrl.records.direct_requests import TokenLogprob
from mrl.records.episodes import (
    CUT,
    MAX_TOKENS,
    MAX_TOOLS,
    MAX_TURN_BYTES,
    MAX_TURN_CALLS,
    MAX_TURN_MESSAGES,
    Message,
    ToolCall,
    ToolSpec,
    bytes_of,
)
from mrl.tasks.rewards import MAX_REWARD


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of one turn of either side."""

    turn_bytes: int = MAX_TURN_BYTES
    """Bytes of UTF-8 text of all messages of a turn, tool calls included."""
    messages: int = MAX_TURN_MESSAGES
    row_bytes: int = 2 * MAX_TURN_BYTES
    """Bytes of a whole conversation that begins a row: more than models read at once."""
    row_messages: int = 16 * MAX_TURN_MESSAGES
    sampled: int = 1 << 16
    """Tokens of a turn that are given one by one."""
    bare_tokens: int = 1 << 19
    """Ids of a text without roles."""
    calls: int = MAX_TURN_CALLS
    tools: int = MAX_TOOLS
    tools_bytes: int = MAX_TURN_BYTES
    reward: float = MAX_REWARD


LIMITS = EpisodeLimits()

DONE, MAX_TURNS, GIVEN_UP = "done", "max_turns", "given_up"
RAISED, TIMEOUT, EXITED, MEMORY = "raised", "timeout", "exited", "memory"
TOO_LONG, NOT_TEXT, NOT_FINITE, WRONG_TYPE = "too_long", "not_text", "not_finite", "wrong_type"
LOST, UNEQUAL, UNSAID = "lost", "unequal", "unsaid"
ENDS = {
    DONE: "the environment ended the episode, or the policy answered without a tool call",
    MAX_TURNS: "the task's limit of turns was reached",
    MAX_TOKENS: "the task's limit of tokens was reached",
    CUT: "the policy's last turn was cut at its token limit",
    GIVEN_UP: "the agent stopped responding, the engine was lost, or the run is ending",
}
"""Reason for the end of an episode -> its meaning. Episodes with any of these reasons but the last count."""
FAILURES = {
    RAISED: "the environment raised an exception",
    TIMEOUT: "the environment exceeded its time limit",
    EXITED: "the environment's process ended",
    MEMORY: "the environment exceeded the memory limit of its process",
    TOO_LONG: "the environment returned more text, messages or tools than a turn may hold",
    NOT_TEXT: "the environment returned text that is not UTF-8",
    NOT_FINITE: "the environment returned a reward that is NaN, infinite or out of bounds",
    WRONG_TYPE: "the environment returned a value of the wrong type",
    LOST: "the process that the episode shared with others was lost, and replaying the episode failed",
    UNEQUAL: "the environment did not answer a peer's replayed turns as it had answered the peer",
    UNSAID: "the policy's tokens, template and tool-call syntax cannot express a peer's turn exactly",
}
"""Reason for the end of an episode whose environment failed -> its meaning. The reward is the task's
`failed_reward`."""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A tool call that could not be read, or exceeds the calls of a turn."""

    words: str
    """One line for the policy about the mistake."""


@dataclass(frozen=True, slots=True)
class PolicyTurn:
    """One turn of a policy: the whole `text`, as sampled, and the calls that were read from it.

    `content` is the text before the calls, or the whole text without calls. The environment answers the `broken` calls
    too. `is_cut`: the turn ended at the token limit. `sampled` are its tokens, its end included, where the environment
    has asked for them and they are within the limit.
    """

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    broken: tuple[MalformedCall, ...] = ()
    is_cut: bool = False
    content: str = ""
    sampled: tuple[TokenLogprob, ...] = ()

    def __post_init__(self) -> None:
        if len(self.sampled) > LIMITS.sampled:
            raise RecordError(f"{len(self.sampled):,} sampled tokens; at most {LIMITS.sampled:,}")
        if len(self.tool_calls) + len(self.broken) > LIMITS.calls:
            raise RecordError(f"{len(self.tool_calls) + len(self.broken)} tool calls; at most {LIMITS.calls}")
        if (size := bytes_of(self.text)) > LIMITS.turn_bytes:
            raise RecordError(f"text of {size:,} bytes; at most {LIMITS.turn_bytes:,}")


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """The whole row that the policy continues, without roles and without a template: a text, or ids.

    The ids are of the policy's own tokenizer, as the agent claims. They count only where `text` is None.
    """

    text: str | None = None
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if (size := self.num_bytes) > LIMITS.row_bytes:
            raise RecordError(f"a prompt of {size:,} bytes; at most {LIMITS.row_bytes:,}")
        if len(self.token_ids) > LIMITS.bare_tokens:
            raise RecordError(f"a prompt of {len(self.token_ids):,} token ids; at most {LIMITS.bare_tokens:,}")
        if not (self.text or self.token_ids):
            raise RecordError("the prompt has neither text nor token ids")

    @property
    def num_bytes(self) -> int:
        """Bytes of the text as UTF-8."""
        return bytes_of(self.text or "")


@dataclass(frozen=True, slots=True)
class EnvironmentTurn:
    """One turn of an environment: messages to continue with, and at the end the reward.

    `reason` is "" while the episode goes on, else a key of `ENDS` or `FAILURES`; `words` describe a failure in one
    line. The first turn of an episode carries the `tools`; a turn that begins a row carries those available from there
    on.
    """

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float | None = None
    reason: str = ""
    words: str = ""
    tools: tuple[ToolSpec, ...] = ()
    tool_errors: int = 0
    """Calls of the policy's turn that raised, did not fit the tool, or could not be read."""
    stream: str = ""
    """Name under which an agent receives the policy's next turn as it grows; "" where it waits for the whole turn."""
    wants_tokens: bool = False
    """Whether the agent receives the tokens of that turn with their log-probabilities."""
    is_deterministic: bool = True
    """Whether the environment answers equal turns of the policy equally. Read in the first turn of an episode."""
    begins_row: bool = False
    """Whether `messages` are a whole conversation, to be rendered anew in place of the earlier one. Only an agent's
    seat sets it."""
    bare: RawPrompt | None = None
    """Text or ids that an agent gives in place of messages. Only an agent's seat sets it."""

    def __post_init__(self) -> None:
        if self.bare is not None and (self.messages or self.tools or self.done):
            raise RecordError("text without roles cannot be combined with messages, tools or the end of the episode")
        if bool(self.reason) != self.done or self.reason not in ("", *ENDS, *FAILURES):
            raise RecordError(f"done = {self.done} and reason {self.reason!r:.40} do not match")
        if self.reward is not None and not abs(self.reward) <= LIMITS.reward:  # NaN is neither
            raise RecordError(
                f"reward {self.reward}; wanted a finite number, at most {LIMITS.reward:,.0f} in absolute value"
            )
        if self.begins_row and not self.messages:
            raise RecordError("a new row has no message")
        most = LIMITS.row_messages if self.begins_row else LIMITS.messages
        if len(self.messages) > most or len(self.tools) > LIMITS.tools:
            told = f"{len(self.messages):,} messages and {len(self.tools)} tools"
            raise RecordError(f"{told}; at most {most:,} messages and {LIMITS.tools} tools")
        most = LIMITS.row_bytes if self.begins_row else LIMITS.turn_bytes
        if (size := total_bytes(self.messages)) > most:
            raise RecordError(f"messages of {size:,} bytes; at most {most:,}")
        if (size := sum(tool.num_bytes for tool in self.tools)) > LIMITS.tools_bytes:
            raise RecordError(f"tools of {size:,} bytes; at most {LIMITS.tools_bytes:,}")

    @property
    def has_failed(self) -> bool:
        """Whether the environment failed, so that its own reward does not count."""
        return self.reason in FAILURES

    @classmethod
    def failed(cls, reason: str, words: str) -> "EnvironmentTurn":
        """Return the end of an episode by a failure, described in one line."""
        told = " ".join(words.split())[:500].encode(errors="replace").decode()
        return cls(done=True, reason=reason, words=told)


class Environment(Protocol):
    """One episode of an environment. It lives in one thread of a process of its own, and may raise anything."""

    def reset(self, seed: int, row: Mapping[str, Any]) -> EnvironmentTurn:
        """Return the first messages, and the tools."""
        ...

    def step(self, turn: PolicyTurn) -> EnvironmentTurn:
        """Return the answer to a turn of the policy."""
        ...

    def finish(self, reason: str, turn: PolicyTurn | None) -> EnvironmentTurn:
        """Return the reward of an episode that ends from outside, for a reason of `ENDS`.

        `turn` is the policy's last turn where it was cut; the environment does not answer it.
        """
        ...

    def close(self) -> None:
        """Release everything; no further request comes."""
        ...


def total_bytes(messages: Sequence[Message]) -> int:
    """Return the bytes of all their text."""
    return sum(message.num_bytes for message in messages)
