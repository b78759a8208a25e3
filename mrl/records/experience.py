"""Experience: the records that cross between policies through the exchange (SEE in the paper, arXiv 2605.07244).

A record names its source (policy, version, tokenizer fingerprint), its prompt, and its time. Text travels as bytes.
Token ids cross only inside a trace, beside the fingerprint of the tokenizer that they belong to.
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
"""Most scores of one group: one per answer, or one per turn of the policy in its episodes."""
MAX_DIGEST_BYTES = 16
MAX_LIKELIEST = 20
"""Most units of one place: vLLM by default returns no more log-probabilities."""
MAX_UNITS = 1 << 20
"""Most distinct units of one answer."""
Choice = Annotated[str, msgspec.Meta(max_length=16)]
"""Digest of the result read out of an answer: equal for answers with equal results, empty where no result was found."""
TokenBytes = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_COMPLETION_BYTES)]
UnitBytes = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_COMPLETION_BYTES * MAX_LIKELIEST)]
Reward = Annotated[float, msgspec.Meta(ge=-1e7, le=1e7)]
"""Bounds of a reward and of an advantage. They are wider than the bounds of a verifier's rewards, since an advantage
may be as large as the difference of two rewards."""


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
    """How a tokenizer cut a completion of T tokens, EOS included, and the log-probability of each token.

    Bytes and nats mean the same to every tokenizer; `token_ids` mean something only under equal fingerprints, and a
    receiver with another fingerprint ignores them. About 13 bytes per token on the wire.
    """

    byte_lengths: TokenBytes
    """[T] int32 bytes of each token; 0 for specials and EOS."""
    logprobs: TokenBytes
    """[T] float32 log-probabilities under the policy that sampled or scored the tokens, in nats."""
    special: TokenBytes
    """[T] one byte each: 1 for specials and EOS, 0 for other tokens."""
    noncanonical: bool = False
    """Whether the source's tokenizer gives the text other ids than the sampled ones."""
    token_ids: TokenBytes | None = None
    """[T] int32 ids under the source's tokenizer."""
    written: Annotated[bytes, msgspec.Meta(max_length=MAX_DIGEST_BYTES)] = b""
    """Digest of the text of an episode's turn, where the text holds more than the turn's content, such as tool calls. A
    receiver that writes the turn alike finds the same digest. The text itself does not cross, since it means nothing
    to others."""


class OutcomeRecord(Experience, frozen=True, kw_only=True, gc=False, tag="outcome"):
    """A verified success: the text of one answer that the task's verifier accepted. Read by SGT.

    Example: prompt "Spell this word backward (example: sun -> nus): hay", completion b"reverse: yah", reward 1.0. About
    350 bytes on the wire for a short answer with its trace.
    """

    completion: Annotated[bytes, msgspec.Meta(max_length=MAX_COMPLETION_BYTES)]
    finish_reason: FinishReason
    verifier: Name
    reward: Reward
    trace: TokenTrace | None = None
    """The source's tokens, from which a receiver measures the cost of sharing; training does not need them."""

    @property
    def finished(self) -> bool:
        """Whether the policy ended the answer itself."""
        return self.finish_reason is FinishReason.STOP


class SharedTurn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One segment of a shared episode: a turn of the policy, or the messages that the environment gave."""

    is_sampled: bool
    """Whether the policy sampled the segment."""
    messages: Messages


class EpisodeRecord(Experience, frozen=True, kw_only=True, gc=False, tag="episode"):
    """A verified success in several turns, from the start state that is its prompt. Read by SGT and `prefix`.

    Messages and tool calls cross as structure, without tokens: each receiver renders them by its own template.
    """

    turns: Annotated[list[SharedTurn], msgspec.Meta(min_length=1, max_length=MAX_SEGMENTS)]
    verifier: Name
    reward: Reward


class TracedTurn(SharedTurn, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A segment of an episode in a shared group; a turn of the policy has a trace."""

    trace: TokenTrace | None = None
    """Trace of all tokens sampled in a turn of the policy: its content, then its tool calls, then its end. None when
    the sampled ids do not begin with the content's bytes."""


class SharedAnswer(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One answer of a shared group, or one episode."""

    completion: Annotated[bytes, msgspec.Meta(max_length=MAX_COMPLETION_BYTES)]
    """Bytes of the answer; empty for an episode."""
    finish_reason: FinishReason
    """How the answer ended, or the last turn of an episode."""
    reward: Reward
    advantage: Reward
    """Advantage within the source's own group."""
    trace: TokenTrace | None = None
    """None for an episode, and when the sampled ids do not spell the completion's bytes."""
    turns: Annotated[list[TracedTurn], msgspec.Meta(max_length=MAX_SEGMENTS)] = []
    """Segments of an episode, up to the policy's last turn. Empty, and without a byte, for an answer of one turn."""

    @property
    def finished(self) -> bool:
        """Whether the policy ended the answer itself."""
        return self.finish_reason is FinishReason.STOP


class RolloutRecord(Experience, frozen=True, kw_only=True, gc=False, tag="rollout"):
    """All answers of one group: text or turns, tokens, log-probs, rewards. Read by PRP, HACPO and GRAFT.

    A group is one record because every reader needs the whole group for its baseline.
    """

    answers: Annotated[list[SharedAnswer], msgspec.Meta(min_length=1, max_length=MAX_GROUP)]


class ValueRecord(Experience, frozen=True, kw_only=True, gc=False, tag="value"):
    """The rewards of one group and nothing else. Read by XGRPO. No text and no tokens: 9 bytes per answer."""

    rewards: Annotated[list[Reward], msgspec.Meta(min_length=1, max_length=MAX_GROUP)]


class VoteRecord(Experience, frozen=True, kw_only=True, gc=False, tag="vote"):
    """The results of the answers of one group, as digests. Read where a task's verifier is the collective.

    A receiver computes the source's consistency from the digests; the source cannot claim it. 17 bytes per answer.
    """

    choices: Annotated[list[Choice], msgspec.Meta(min_length=1, max_length=MAX_GROUP)]
    """One digest per answer."""


class GivenAnswer(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A text to be scored, or an episode."""

    completion: Annotated[bytes, msgspec.Meta(max_length=MAX_COMPLETION_BYTES)]
    """Bytes of the text; empty for an episode."""
    finish_reason: FinishReason
    """How the text ended, or the last turn of an episode."""
    turns: Annotated[list[SharedTurn], msgspec.Meta(max_length=MAX_SEGMENTS)] = []
    """Segments of an episode, up to the policy's last turn; empty for an episode that its author withholds."""

    @property
    def num_scores(self) -> int:
        """Scores that the answer gets: one, or one per turn of the policy."""
        return sum(turn.is_sampled for turn in self.turns) or 1

    @property
    def finished(self) -> bool:
        """Whether the policy ended the answer itself."""
        return self.finish_reason is FinishReason.STOP


class LikeliestUnits(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The units that a policy finds likeliest in the place of each of T tokens of a text, K units per place.

    A unit is the bytes of a token, which mean the same to every tokenizer; the unit of an end token is empty. 8 bytes
    per token and unit on the wire.
    """

    units: Annotated[list[TokenBytes], msgspec.Meta(max_length=MAX_UNITS)]
    """Distinct units."""
    places: UnitBytes
    """[T, K] int32 index of the unit in `units`; -1 for no unit."""
    logprobs: UnitBytes
    """[T, K] float32 log-probabilities in nats."""


class ScoreRequestRecord(Experience, frozen=True, kw_only=True, gc=False, tag="score_request"):
    """A request to the engine of policy `scorer` for log-probabilities of these answers to the prompt (RLAD, CoPD)."""

    scorer: Name
    answers: Annotated[list[GivenAnswer], msgspec.Meta(min_length=1, max_length=MAX_GROUP)]
    opening: Opening | msgspec.UnsetType = msgspec.UNSET
    """First messages and tools of the episodes. Unset where the answers are of one turn: the prompt's task then gives
    the text."""
    num_units: Annotated[int, msgspec.Meta(ge=1, le=MAX_LIKELIEST)] | msgspec.UnsetType = msgspec.UNSET
    """Units that the scorer returns per place. Unset where none are wanted."""


class ScoreRecord(Experience, frozen=True, kw_only=True, gc=False, tag="score"):
    """The source's log-probabilities of the answers of one request, in its own tokens."""

    request_id: Name
    """`record_id` of the request."""
    receiver: Name
    """The policy that asked."""
    scores: Annotated[list[TokenTrace | None], msgspec.Meta(min_length=1, max_length=MAX_SCORES)]
    """One score per answer of the request, or per turn of the policy in an episode. None for a text that the source
    cannot express in its tokens."""
    units: Annotated[list[LikeliestUnits | None], msgspec.Meta(max_length=MAX_SCORES)] | msgspec.UnsetType = (
        msgspec.UNSET
    )
    """Likeliest units of each score. Unset where the request wanted none."""


ExperienceRecord = (
    OutcomeRecord | EpisodeRecord | RolloutRecord | ValueRecord | VoteRecord | ScoreRequestRecord | ScoreRecord
)
"""Union of record types. A new type is added here, and its kind below."""

RecordKind = Literal["outcome", "episode", "rollout", "value", "vote", "score_request", "score"]


def kind_of(record: ExperienceRecord) -> RecordKind:
    """Return the type tag that the record carries on the wire."""
    kind: RecordKind = record.__struct_config__.tag  # type: ignore[assignment]
    return kind


experience_decoder: msgspec.msgpack.Decoder[ExperienceRecord] = decoder(ExperienceRecord)


class Received(msgspec.Struct, frozen=True, gc=False):
    """A peer record as the learner received it, with its age at that moment in versions of its source."""

    record: ExperienceRecord
    age_versions: int
