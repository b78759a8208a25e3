"""Experience: what crosses between policies through the exchange (SEE in the paper, arXiv 2605.07244).

A record says who made it (source policy, version, tokenizer fingerprint), about which prompt, and when.
Text travels as bytes. Token ids cross only inside a trace, beside the fingerprint of the tokenizer that they belong to.
"""

from typing import Annotated, Literal

import msgspec

from mrl.records.codec import SCHEMA, decoder
from mrl.records.episodes import MAX_SEGMENTS, Messages, Opening
from mrl.records.finish import FinishReason
from mrl.records.version import Name, Version

MAX_COMPLETION_BYTES = 256 * 1024
MAX_GROUP = 1024
MAX_SCORES = 64 * 1024
"""Turns of all answers of one group that are scored."""
MAX_DIGEST_BYTES = 16
MAX_LIKELIEST = 20
"""Units of a place: vLLM tells no more without being told to."""
MAX_UNITS = 1 << 20
"""Distinct ones of an answer."""
Choice = Annotated[str, msgspec.Meta(max_length=16)]
"""Digest of what was read out of an answer: equal where two answers say the same, empty where nothing was read."""
TokenBytes = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_COMPLETION_BYTES)]
UnitBytes = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_COMPLETION_BYTES * MAX_LIKELIEST)]
Reward = Annotated[float, msgspec.Meta(ge=-1e7, le=1e7)]
"""Also of an advantage: wider than what a verifier may give, by which rewards of one group can differ."""


class Experience(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="type"):
    """Fields that every record carries. `created_unix_s` is for display: no decision depends on a foreign clock."""

    record_id: Name
    source: Name
    oldest: Version
    newest: Version
    fingerprint: Annotated[str, msgspec.Meta(max_length=128)]
    prompt_id: Name
    task: Name
    created_unix_s: float
    schema: Annotated[int, msgspec.Meta(ge=SCHEMA, le=SCHEMA)] = SCHEMA


class TokenTrace(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """How a tokenizer cut a completion of T tokens, EOS included, and what each token was worth to its policy.

    Bytes and nats mean the same to every tokenizer; `token_ids` mean something under equal fingerprints only, and are
    read by nobody else. About 13 bytes per token on the wire.
    """

    byte_lengths: TokenBytes
    """[T] int32 bytes of every token; 0 for specials and EOS."""
    logprobs: TokenBytes
    """[T] float32 under the policy that sampled or scored them."""
    special: TokenBytes
    """[T] one byte each, 1 for specials and EOS."""
    noncanonical: bool = False
    """Whether the source's tokenizer gives the text other ids than were sampled."""
    token_ids: TokenBytes | None = None
    """[T] int32 under the source's tokenizer."""
    written: Annotated[bytes, msgspec.Meta(max_length=MAX_DIGEST_BYTES)] = b""
    """Of a turn of an episode: digest of the text, where that is more than the turn's content. Who writes calls alike,
    knows it by that; the text itself means nothing to others, and does not cross."""


class OutcomeRecord(Experience, frozen=True, kw_only=True, gc=False, tag="outcome"):
    """A verified success: the text of one answer that the task's verifier accepted. Read by SGT.

    Example: prompt "Spell this word backward (example: sun -> nus): hay", completion b"reverse: yah", reward 1.0.
    About 350 bytes on the wire for a short answer, and its trace.
    """

    completion: Annotated[bytes, msgspec.Meta(max_length=MAX_COMPLETION_BYTES)]
    finish_reason: FinishReason
    verifier: Name
    reward: Reward
    trace: TokenTrace | None = None
    """From it a receiver measures what sharing costs; training does not need it."""

    @property
    def finished(self) -> bool:
        """Whether the policy ended the answer itself."""
        return self.finish_reason is FinishReason.STOP


class SharedTurn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A stretch of a shared episode: one turn of the policy, or what the environment says to it."""

    is_sampled: bool
    """Whether the policy said it."""
    messages: Messages


class EpisodeRecord(Experience, frozen=True, kw_only=True, gc=False, tag="episode"):
    """A verified success in several turns, from the start state that is its prompt. Read by SGT and `prefix`.

    Messages and tool calls cross as structure, without a token: each receiver spells them by its own template.
    """

    turns: Annotated[list[SharedTurn], msgspec.Meta(min_length=1, max_length=MAX_SEGMENTS)]
    verifier: Name
    reward: Reward


class TracedTurn(SharedTurn, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A turn of an episode in a shared group; one that the policy said comes with how its tokenizer cut it."""

    trace: TokenTrace | None = None
    """Of all that was sampled in a turn of the policy: its content, then what calls tools, then its end. None when the
    sampled ids do not begin with the content's bytes."""


class SharedAnswer(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One answer of a shared group, or one episode."""

    completion: Annotated[bytes, msgspec.Meta(max_length=MAX_COMPLETION_BYTES)]
    """Empty of an episode."""
    finish_reason: FinishReason
    """Of an episode: how its last turn ended."""
    reward: Reward
    advantage: Reward
    """Within the source's own group."""
    trace: TokenTrace | None = None
    """None when the sampled ids do not stand for the completion's bytes, and of an episode."""
    turns: Annotated[list[TracedTurn], msgspec.Meta(max_length=MAX_SEGMENTS)] = []
    """Of an episode: its turns, up to the policy's last. Empty of an answer of one turn, which costs no byte for it."""

    @property
    def finished(self) -> bool:
        """Whether the policy ended the answer itself."""
        return self.finish_reason is FinishReason.STOP


class RolloutRecord(Experience, frozen=True, kw_only=True, gc=False, tag="rollout"):
    """All answers of one group: text or turns, how it was cut, log-probs, rewards. Read by PRP, HACPO and GRAFT.

    A group is one record because every reader needs it whole: its baseline is that of the group.
    """

    answers: Annotated[list[SharedAnswer], msgspec.Meta(min_length=1, max_length=MAX_GROUP)]


class ValueRecord(Experience, frozen=True, kw_only=True, gc=False, tag="value"):
    """The rewards of one group and nothing else. Read by XGRPO. No text and no tokens: 9 bytes per answer."""

    rewards: Annotated[list[Reward], msgspec.Meta(min_length=1, max_length=MAX_GROUP)]


class VoteRecord(Experience, frozen=True, kw_only=True, gc=False, tag="vote"):
    """What the answers of one group say, as digests. Read where a task's verifier is the collective.

    How consistent the source is follows from them, and is not its to claim. 17 bytes per answer.
    """

    choices: Annotated[list[Choice], msgspec.Meta(min_length=1, max_length=MAX_GROUP)]
    """One per answer."""


class GivenAnswer(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A text to be scored, or an episode."""

    completion: Annotated[bytes, msgspec.Meta(max_length=MAX_COMPLETION_BYTES)]
    """Empty of an episode."""
    finish_reason: FinishReason
    """Of an episode: how its last turn ended."""
    turns: Annotated[list[SharedTurn], msgspec.Meta(max_length=MAX_SEGMENTS)] = []
    """Of an episode: its turns, up to the policy's last; empty of one that its author withholds."""

    @property
    def num_scores(self) -> int:
        """Scores that it gets: one, or one for each turn of the policy."""
        return sum(turn.is_sampled for turn in self.turns) or 1

    @property
    def finished(self) -> bool:
        """Whether the policy ended the answer itself."""
        return self.finish_reason is FinishReason.STOP


class ToldUnits(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a policy finds likeliest in the place of each of T tokens of a text, K units in each.

    A unit is bytes, and means the same to every tokenizer; an end has none. 8 bytes per token and unit on the wire.
    """

    units: Annotated[list[TokenBytes], msgspec.Meta(max_length=MAX_UNITS)]
    """Each once."""
    places: UnitBytes
    """[T, K] int32 place of the unit in `units`; -1 for none."""
    logprobs: UnitBytes
    """[T, K] float32 in nats."""


class ScoreRequestRecord(Experience, frozen=True, kw_only=True, gc=False, tag="score_request"):
    """Asks the engine of policy `scorer` what it thinks of these answers to the prompt (RLAD, CoPD)."""

    scorer: Name
    answers: Annotated[list[GivenAnswer], msgspec.Meta(min_length=1, max_length=MAX_GROUP)]
    opening: Opening | msgspec.UnsetType = msgspec.UNSET
    """What the episodes begin with. Not there where the answers are of one turn: the prompt's task says it."""
    num_units: Annotated[int, msgspec.Meta(ge=1, le=MAX_LIKELIEST)] | msgspec.UnsetType = msgspec.UNSET
    """Units that the scorer shall tell of each place. Not there where none are wanted."""


class ScoreRecord(Experience, frozen=True, kw_only=True, gc=False, tag="score"):
    """What the source thinks of the answers of one request, in its own tokens."""

    request_id: Name
    """`record_id` of the request."""
    receiver: Name
    """The policy that asked."""
    scores: Annotated[list[TokenTrace | None], msgspec.Meta(min_length=1, max_length=MAX_SCORES)]
    """One per answer of the request, of an episode one per turn of the policy. None for a text that the source cannot
    express in its tokens."""
    units: Annotated[list[ToldUnits | None], msgspec.Meta(max_length=MAX_SCORES)] | msgspec.UnsetType = msgspec.UNSET
    """Of each score. Not there where none were asked for."""


ExperienceRecord = (
    OutcomeRecord | EpisodeRecord | RolloutRecord | ValueRecord | VoteRecord | ScoreRequestRecord | ScoreRecord
)
"""The union of record types; a new type is added here, and its kind below."""

RecordKind = Literal["outcome", "episode", "rollout", "value", "vote", "score_request", "score"]


def kind_of(record: ExperienceRecord) -> RecordKind:
    """The type tag that the record carries on the wire."""
    kind: RecordKind = record.__struct_config__.tag  # type: ignore[assignment]
    return kind


experience_decoder: msgspec.msgpack.Decoder[ExperienceRecord] = decoder(ExperienceRecord)


class Received(msgspec.Struct, frozen=True, gc=False):
    """A peer record as the learner got it, with its age in versions of its source at that moment."""

    record: ExperienceRecord
    age_versions: int
