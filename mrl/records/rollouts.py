"""Own answers on their way from a rollout worker to the learner of the same policy.

The worker asks for work, the learner grants prompts within its staleness budget, the worker sends scored groups, the
learner acknowledges them. Unacknowledged groups are sent again; granted work of a lost worker is granted anew.
Held-out prompts go the same way, as a class of their own: they are granted first, and are never trained on.
Where weights are broadcast, the worker also asks when it is ready for them, and is told where to meet.

Shapes: G answers per group, T tokens of one answer, S of them sampled by the policy: all but those that an environment
gave in an episode.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from mrl.records.chosen_experts import ChosenExperts
from mrl.records.codec import decoder
from mrl.records.episodes import MAX_SEGMENTS, EpisodeSegment, Opening, Segments
from mrl.records.experience import Choice, Reward, SharedTurn
from mrl.records.finish import FinishReason
from mrl.records.told_turns import ToldTurn
from mrl.records.version import Count, Name, Version, VersionSpan

TokenBytes = Annotated[bytes, msgspec.Meta(max_length=4 * 1024 * 1024)]
MAX_TEXT_BYTES = 1024 * 1024
"""Of an answer; a longer text is cut, its tokens are not."""
TextBytes = Annotated[bytes, msgspec.Meta(max_length=MAX_TEXT_BYTES)]
MAX_GROUP_BYTES = 256 * 1024 * 1024
"""Of one message between a worker and its learner; a group is one."""
NamedRewards = Annotated[dict[Name, Reward], msgspec.Meta(max_length=16)]
Failure = Annotated[str, msgspec.Meta(max_length=1000)]
FIRST_CONTINUATION = -(1 << 40)
"""Place of the first continuation: all have places before the pass over the prompts."""
MAX_SHOWN_CHARS = 20_000
"""Of an episode that is sent for people to read: of its opening, and of its turns."""
ROUNDED_NATS = 0.01
"""What rounding may put a log-probability above 0."""


def sampled_places(segments: Sequence[EpisodeSegment]) -> npt.NDArray[np.bool_]:
    """[T] whether the policy sampled each token of a row of these segments."""
    return np.repeat(
        np.array([segment.is_sampled for segment in segments], dtype=bool),
        np.array([segment.num_tokens for segment in segments], dtype=np.int64),
    )


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sampled answer, or one episode. Its ids are the ids that the engine saw; they are never re-tokenized."""

    token_ids: TokenBytes
    """[T] int32, of a `finished` one up to its EOS, or to the token that completes a stop string."""
    logprobs: TokenBytes
    """[S] float32, of the sampling distribution (temperature applied)."""
    versions: Annotated[list[VersionSpan], msgspec.Meta(max_length=10_000)]
    """Run-length coded version of every sampled token; the lengths sum to S."""
    completion: TextBytes
    """The bytes of the answer without EOS; of an episode, what was said as people read it."""
    finish_reason: FinishReason
    reward: Reward
    rewards: NamedRewards = {}
    """Its parts by name, where the verifier gave several."""
    choice: Choice = ""
    """What it says, where the collective votes on that; its reward is the learner's to find then."""
    failure: Failure = ""
    """Kind of the verifier's failure on it and how it came, as "raised: KeyError: 'n' (judges.py:7 in judge)"."""
    segments: Segments = []
    """Of an episode: its turns, in their order; the last one with tokens is sampled. Empty where S is T."""
    ending: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Of an episode: how it ended."""
    experts: ChosenExperts | None = None
    """[S] rows: where the engine's routers sent what its sampled tokens were predicted from. None where the policy does
    not replay that, or the engine did not say it of all of them."""

    @property
    def finished(self) -> bool:
        """Whether the policy, or its environment, ended the answer."""
        return self.finish_reason is FinishReason.STOP

    @property
    def num_sampled_tokens(self) -> int:
        """S."""
        return len(self.logprobs) // 4

    @property
    def is_sampled(self) -> npt.NDArray[np.bool_] | None:
        """[T] whether the policy sampled each token; None where it sampled all."""
        return sampled_places(self.segments) if self.segments else None

    @property
    def row_starts(self) -> npt.NDArray[np.int32] | None:
        """[B] where the rows of its tokens behind the first one begin; None where all are one row."""
        starts_B = np.cumsum([0, *(segment.num_tokens for segment in self.segments)])[:-1]
        found_B = starts_B[[segment.begins_row for segment in self.segments]] if self.segments else starts_B
        return found_B.astype(np.int32) if found_B.size else None

    @property
    def is_rewritten(self) -> bool:
        """Whether an agent has rewritten the conversation: no single row of a peer's could say it."""
        return any(segment.is_rewritten for segment in self.segments)

    @property
    def is_bare(self) -> bool:
        """Whether an agent gave the policy text or ids without roles."""
        return any(segment.is_bare for segment in self.segments)

    @property
    def is_unsayable(self) -> bool:
        """Whether no peer could say its turns: each would need a single row of messages, which have roles."""
        return self.is_rewritten or self.is_bare

    @property
    def has_sound_rows(self) -> bool:
        """Whether each of its rows ends with a sampled token, and those behind the first one begin with a given one."""
        starts_B, is_sampled_T = self.row_starts, self.is_sampled
        if starts_B is None or is_sampled_T is None:
            return True
        bounds = np.array([0, *starts_B, is_sampled_T.size])
        is_whole = (np.diff(bounds) > 0).all() and is_sampled_T[bounds[1:] - 1].all()
        return bool(is_whole and not is_sampled_T[starts_B].any())


def are_logprobs(values: npt.ArrayLike) -> bool:
    """Whether all are log-probabilities: finite, above 0 by rounding at most."""
    found = np.asarray(values)
    return bool(((found > -np.inf) & (found <= ROUNDED_NATS)).all())


class Continuation(msgspec.Struct, frozen=True, kw_only=True):
    """A state to go on from: the start state of a prompt, and the first turns of a peer's episode from there."""

    prompt_id: Name
    source: Name
    """The peer."""
    turns: Annotated[list[SharedTurn], msgspec.Meta(min_length=2, max_length=MAX_SEGMENTS)]
    """Up to what the environment said to the last of the peer's turns."""
    num_left: Count
    """Turns in which the peer came from there to its success."""

    @property
    def num_given(self) -> int:
        """Turns of the peer that are given."""
        return sum(turn.is_sampled for turn in self.turns)

    @property
    def num_bytes(self) -> int:
        """Text of the turns."""
        return sum(message.num_bytes for turn in self.turns for message in turn.messages)


class ScoredGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The G verified answers that one policy gave to one prompt, or in one state to go on from."""

    ticket: Name
    """The grant that this group answers; stable over resends."""
    prompt_id: Name
    task: Name
    prompt_token_ids: TokenBytes
    """[P] int32 under the policy's own tokenizer; the given turns of a continuation are part of it."""
    answers: Annotated[list[Answer], msgspec.Meta(min_length=1, max_length=4096)]
    continuation: Continuation | None = None
    """Where its episodes begin, if not at the prompt's start state."""
    opening: Opening | None = None
    """Of episodes that a teacher may score: what `prompt_token_ids` spells, in the words of no family."""
    prompt_experts: ChosenExperts | None = None
    """[P - 1] rows of the prompt's tokens but the last one, whose row is that of an answer's first token."""

    @property
    def oldest(self) -> Version:
        """The oldest version among all tokens of the group."""
        return min(span.version for answer in self.answers for span in answer.versions)

    @property
    def newest(self) -> Version:
        """The newest version among all tokens of the group."""
        return max(span.version for answer in self.answers for span in answer.versions)

    @property
    def is_uniform(self) -> bool:
        """Whether all rewards are equal."""
        return len({answer.reward for answer in self.answers}) == 1


class WorkItem(msgspec.Struct, frozen=True, kw_only=True):
    """One group to sample: which prompt, how many answers, with which seed."""

    ticket: Name
    position: Annotated[int, msgspec.Meta(ge=FIRST_CONTINUATION)]
    """Place in the policy's seeded, endless pass over the prompt pool; below 0 that of a continuation among all of
    them. Part of the sampling seed."""
    prompt_id: Name
    group_size: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    step: Count
    """Learner step at which the grant was made; part of the sampling seed."""
    continuation: Continuation | None = None
    """Where its episodes begin, if not at the prompt's start state."""


class HeldOutItem(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to a held-out prompt to sample, for the evaluation of a version."""

    ticket: Name
    prompt_id: Name
    version: Version
    """Nothing older begins it; a newer one may, and may overtake it."""
    sample: Count = 0
    """Which of the answers to its prompt; part of the sampling seed."""

    @property
    def group_size(self) -> int:
        """Answers to sample."""
        return 1


class WeightsNotice(msgspec.Struct, frozen=True, kw_only=True):
    """Where the newest weights lie."""

    version: Version
    manifest_path: Annotated[str, msgspec.Meta(max_length=4096)]


class WorkRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="work_request"):
    """Worker -> learner: grant me up to `max_groups`; `holding` are the tickets that I still work on."""

    worker: Name
    max_groups: Count
    holding: Annotated[list[Name], msgspec.Meta(max_length=100_000)]
    serving: Version | None = None
    """What would sample them now; None before there are weights: those of the answer will."""
    max_held_out: Count = 0
    """Held-out prompts that may be granted too, in place of as many answers of groups."""
    max_held_out_alone: Count = 0
    """The same where there is no work but them."""
    progress: Count = 0
    """Another number whenever the worker has got on: tokens that it sampled, and answers that it judged."""
    is_loading: bool = False
    """Whether its engine starts or takes new weights: no token need come, and the worker itself bounds how long."""


class StaleGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that was given up: complete, it would be too stale to train on, or its environment did not begin."""

    ticket: Name
    num_tokens: Count
    """Of the answers that had ended."""
    unbegun: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Of one that was to go on from a peer's turns and did not begin: why, in a word to count."""


class HeldOutAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one held-out prompt."""

    ticket: Name
    failure: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    """Why there is no answer; empty where there is one."""
    versions: Annotated[list[VersionSpan], msgspec.Meta(max_length=10_000)] = []
    """Run-length coded version of every token."""
    completion: TextBytes = b""
    """The bytes of the answer without EOS."""
    reward: Reward = 0.0
    choice: Choice = ""
    """Of what was read out of it and judged."""
    opening: Annotated[str, msgspec.Meta(max_length=MAX_SHOWN_CHARS)] = ""
    """Of an episode: its first messages as the policy was shown them, special tokens included."""
    turns: Annotated[list[ToldTurn], msgspec.Meta(max_length=MAX_SEGMENTS)] = []
    """Of an episode: who said what behind them, for people to read."""


class HeldOutAnswers(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="held_out_answers"):
    """Worker -> learner: finished answers to held-out prompts; acknowledged as groups are."""

    worker: Name
    answers: Annotated[list[HeldOutAnswer], msgspec.Meta(max_length=4096)]


class Groups(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="groups"):
    """Worker -> learner: finished groups, and groups that will not be finished."""

    worker: Name
    groups: Annotated[list[ScoredGroup], msgspec.Meta(max_length=4096)]
    stale: Annotated[list[StaleGroup], msgspec.Meta(max_length=4096)] = []


class WorkGrant(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="work_grant"):
    """Learner -> worker: answers a request; an empty list says that the staleness budget is used up."""

    items: list[WorkItem]
    weights: WeightsNotice | None = None
    """None before the first version of the learner's life is whole."""
    held_out: list[HeldOutItem] = []
    held_out_waiting: Version | None = None
    """The version of which held-out prompts wait that nobody has been granted yet."""


class GroupsAck(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="groups_ack"):
    """Learner -> worker: these tickets are taken over; forget them."""

    tickets: list[Name]
    weights: WeightsNotice | None = None
    """As in WorkGrant."""


class WeightsRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="weights_request"):
    """Worker -> learner: give me these weights, by broadcast to so many ranks of mine, or, with none, in files."""

    worker: Name
    version: Version
    attempt: Count
    """The same in every repetition of one request, and no other's."""
    num_ranks: Annotated[int, msgspec.Meta(ge=0, le=1024)]
    gpu: Annotated[str, msgspec.Meta(max_length=100)] = ""
    """Unique id of the GPU that takes them in; empty where that is the processor's memory."""
    nccl: Annotated[str, msgspec.Meta(max_length=100)] = ""
    """Version of NCCL beside that GPU."""


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks of one broadcast meet. The learner is rank 0; the ranks of one worker follow each other."""

    host: Annotated[str, msgspec.Meta(max_length=300)]
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    """Of the store at `host`; 0 where `file` is the store."""
    name: Name
    backend: Literal["gloo", "nccl"]
    first_rank: Annotated[int, msgspec.Meta(ge=0)]
    world_size: Annotated[int, msgspec.Meta(ge=2)]
    file: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """Store of members of one host, in a folder of their user alone."""


class WeightsRoute(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="weights_route"):
    """Learner -> worker: how to come by the weights asked for; neither way is there once there are newer ones, or where
    no place can be had to meet at.
    """

    attempt: Count
    weights: WeightsNotice
    meeting: Meeting | None = None
    folder: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """Where they lie as files."""


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="goodbye"):
    """Learner -> worker: all steps are done, ask for nothing more. Worker -> learner: that was heard."""

    role: Name
    """Who says it."""


WorkerMessage = WorkRequest | Groups | HeldOutAnswers | WeightsRequest | Goodbye
LearnerMessage = WorkGrant | GroupsAck | WeightsRoute | Goodbye

worker_message_decoder: msgspec.msgpack.Decoder[WorkerMessage] = decoder(WorkerMessage)
learner_message_decoder: msgspec.msgpack.Decoder[LearnerMessage] = decoder(LearnerMessage)
