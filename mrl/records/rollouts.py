"""Own answers on their way from a rollout worker to the learner of the same policy.

The worker asks for work, the learner grants prompts within its staleness budget, the worker sends scored groups, the
learner acknowledges them. Unacknowledged groups are sent again; granted work of a lost worker is granted anew. Held-out
prompts go the same way as a class of their own: they are granted first, and are never trained on. Where weights are
broadcast, the worker also asks for them when it is ready, and learns where the ranks meet.

Shapes: G answers per group, T tokens of one answer, S tokens sampled by the policy: all tokens but those that an
environment gave in an episode.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from mrl.records.chosen_experts import ChosenExperts
from mrl.records.codec import decoder
from mrl.records.episodes import CUT, MAX_SEGMENTS, MAX_TOKENS, EpisodeSegment, Opening, Segments
from mrl.records.experience import Choice, Reward, SharedTurn
from mrl.records.finish import FinishReason
from mrl.records.readable_turns import ReadableTurn
from mrl.records.version import Count, Name, Version, VersionSpan

TokenBytes = Annotated[bytes, msgspec.Meta(max_length=4 * 1024 * 1024)]
MAX_TEXT_BYTES = 1024 * 1024
"""Most bytes of an answer's text; a longer text is cut, its tokens are not."""
TextBytes = Annotated[bytes, msgspec.Meta(max_length=MAX_TEXT_BYTES)]
MAX_GROUP_BYTES = 256 * 1024 * 1024
"""Most bytes of one message between a worker and its learner, such as a whole group."""
NamedRewards = Annotated[dict[Name, Reward], msgspec.Meta(max_length=16)]
Failure = Annotated[str, msgspec.Meta(max_length=1000)]
FIRST_CONTINUATION = -(1 << 40)
"""Position of the first continuation. Continuations have positions below 0, the pass over the prompts from 0 on."""
MAX_SHOWN_CHARS = 20_000
"""Most characters of the opening of an episode that is sent for people to read, and of its turns."""
ROUNDED_NATS = 0.01
"""Most nats by which rounding may put a log-probability above 0."""


def sampled_places(segments: Sequence[EpisodeSegment]) -> npt.NDArray[np.bool_]:
    """Return [T] whether the policy sampled each token of a row of these segments."""
    return np.repeat(
        np.array([segment.is_sampled for segment in segments], dtype=bool),
        np.array([segment.num_tokens for segment in segments], dtype=np.int64),
    )


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sampled answer, or one episode. Its ids are those that the engine saw; they are never re-tokenized."""

    token_ids: TokenBytes
    """[T] int32 ids. A `finished` answer goes up to its EOS, or to the token that completes a stop string."""
    logprobs: TokenBytes
    """[S] float32 log-probabilities under the sampling distribution (temperature applied), in nats."""
    versions: Annotated[list[VersionSpan], msgspec.Meta(max_length=10_000)]
    """Run-length coded version of every sampled token; the lengths sum to S."""
    completion: TextBytes
    """Bytes of the answer without EOS; of an episode, its transcript for people to read."""
    finish_reason: FinishReason
    reward: Reward
    rewards: NamedRewards = {}
    """Parts of the reward by name, where the verifier gave several."""
    choice: Choice = ""
    """Digest of the answer's result, where the collective votes on results; the learner then finds the reward."""
    failure: Failure = ""
    """Kind and cause of the verifier's failure on the answer, as "raised: KeyError: 'n' (judges.py:7 in judge)"."""
    segments: Segments = []
    """Segments of an episode; the last segment with tokens is sampled. Empty for an answer of one turn, where S = T."""
    ending: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """How the episode ended; empty for an answer of one turn."""
    experts: ChosenExperts | None = None
    """[S] rows of experts that the engine's routers chose at the places that predict the sampled tokens. None where the
    policy does not replay experts, or the engine did not return all of them."""

    @property
    def finished(self) -> bool:
        """Whether the policy, or its environment, ended the answer."""
        return self.finish_reason is FinishReason.STOP

    @property
    def is_cut(self) -> bool:
        """Whether a limit of tokens ended the answer."""
        if self.segments:  # an episode that took all its turns, or whose environment failed, is not finished either
            return self.ending in (CUT, MAX_TOKENS)
        return self.finish_reason is FinishReason.LENGTH

    @property
    def num_sampled_tokens(self) -> int:
        """S, the number of sampled tokens."""
        return len(self.logprobs) // 4

    @property
    def is_sampled(self) -> npt.NDArray[np.bool_] | None:
        """[T] whether the policy sampled each token; None where it sampled all."""
        return sampled_places(self.segments) if self.segments else None

    @property
    def row_starts(self) -> npt.NDArray[np.int32] | None:
        """[B] places of the tokens at which the rows after the first begin; None where all tokens are one row."""
        starts_B = np.cumsum([0, *(segment.num_tokens for segment in self.segments)])[:-1]
        found_B = starts_B[[segment.begins_row for segment in self.segments]] if self.segments else starts_B
        return found_B.astype(np.int32) if found_B.size else None

    @property
    def is_rewritten(self) -> bool:
        """Whether an agent rewrote the conversation: no single row of a peer could express it."""
        return any(segment.is_rewritten for segment in self.segments)

    @property
    def is_bare(self) -> bool:
        """Whether an agent gave the policy text or ids without roles."""
        return any(segment.is_bare for segment in self.segments)

    @property
    def is_unsayable(self) -> bool:
        """Whether no peer could express its turns, which would need a single row of messages with roles."""
        return self.is_rewritten or self.is_bare

    @property
    def has_sound_rows(self) -> bool:
        """Whether each row ends with a sampled token, and each row after the first begins with a given token."""
        starts_B, is_sampled_T = self.row_starts, self.is_sampled
        if starts_B is None or is_sampled_T is None:
            return True
        bounds = np.array([0, *starts_B, is_sampled_T.size])
        is_whole = (np.diff(bounds) > 0).all() and is_sampled_T[bounds[1:] - 1].all()
        return bool(is_whole and not is_sampled_T[starts_B].any())


def are_logprobs(values: npt.ArrayLike) -> bool:
    """Whether all values are log-probabilities: finite, and above 0 by rounding at most."""
    found = np.asarray(values)
    return bool(((found > -np.inf) & (found <= ROUNDED_NATS)).all())


class Continuation(msgspec.Struct, frozen=True, kw_only=True):
    """A state to continue from: the start state of a prompt, and the first turns of a peer's episode from there."""

    prompt_id: Name
    source: Name
    """The peer that played the turns."""
    turns: Annotated[list[SharedTurn], msgspec.Meta(min_length=2, max_length=MAX_SEGMENTS)]
    """Segments up to the environment's answer to the last given turn of the peer."""
    num_left: Count
    """Turns that the peer took from this state to its success."""

    @property
    def num_given(self) -> int:
        """Number of given turns of the peer."""
        return sum(turn.is_sampled for turn in self.turns)

    @property
    def num_bytes(self) -> int:
        """Bytes of text of the turns, tool calls included."""
        return sum(message.num_bytes for turn in self.turns for message in turn.messages)


class ScoredGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The G verified answers that one policy gave to one prompt, or from one state of a continuation."""

    ticket: Name
    """Ticket of the grant that this group answers; the same in every resend."""
    prompt_id: Name
    task: Name
    prompt_token_ids: TokenBytes
    """[P] int32 ids under the policy's own tokenizer, given turns of a continuation included."""
    answers: Annotated[list[Answer], msgspec.Meta(min_length=1, max_length=4096)]
    continuation: Continuation | None = None
    """State in which the episodes begin, if not at the prompt's start state."""
    opening: Opening | None = None
    """First messages and tools of the episodes, where a teacher may score them; `prompt_token_ids` renders the same."""
    prompt_experts: ChosenExperts | None = None
    """[P - 1] rows of the prompt's experts. The place of the prompt's last token predicts an answer's first token,
    whose row is part of the answer."""

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
    """One group to sample: prompt, number of answers, and the parts of the seed."""

    ticket: Name
    position: Annotated[int, msgspec.Meta(ge=FIRST_CONTINUATION)]
    """Place in the policy's seeded, endless pass over the prompt pool; below 0, place of a continuation among all
    continuations. Part of the sampling seed."""
    prompt_id: Name
    group_size: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    step: Count
    """Learner step at which the grant was made; part of the sampling seed."""
    continuation: Continuation | None = None
    """State in which the episodes begin, if not at the prompt's start state."""


class HeldOutItem(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to sample to a held-out prompt, for the evaluation of a version."""

    ticket: Name
    prompt_id: Name
    version: Version
    """Oldest version that may begin the answer; a newer version may begin it, or sample the rest of it."""
    sample: Count = 0
    """Number of this answer among those to its prompt; part of the sampling seed."""

    @property
    def group_size(self) -> int:
        """Answers to sample."""
        return 1


class WeightsNotice(msgspec.Struct, frozen=True, kw_only=True):
    """Version and place of the newest weights."""

    version: Version
    manifest_path: Annotated[str, msgspec.Meta(max_length=4096)]


class WorkRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="work_request"):
    """Worker -> learner: grant up to `max_groups`; `holding` are the tickets on which the worker still works."""

    worker: Name
    max_groups: Count
    holding: Annotated[list[Name], msgspec.Meta(max_length=100_000)]
    serving: Version | None = None
    """Version that would sample the groups now; None before the engine has weights. The weights in the grant then
    sample."""
    max_held_out: Count = 0
    """Most held-out prompts to grant beside groups, each in place of one answer of a group."""
    max_held_out_alone: Count = 0
    """Most held-out prompts to grant where there are no groups to sample."""
    progress: Count = 0
    """A number that changes whenever the worker has sampled tokens or judged answers."""
    is_loading: bool = False
    """Whether the engine starts or takes new weights: no token need come, and the worker itself bounds the time."""


class StaleGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that was given up: it would be too stale to train on when complete, or its environment did not begin."""

    ticket: Name
    num_tokens: Count
    """Tokens of the answers that had ended."""
    unbegun: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Reason in a word, to count, for which a continuation did not begin; empty for other groups."""


class HeldOutAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one held-out prompt, or the reason for its absence."""

    ticket: Name
    failure: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    """Reason for which there is no answer; empty where there is one."""
    versions: Annotated[list[VersionSpan], msgspec.Meta(max_length=10_000)] = []
    """Run-length coded version of every sampled token."""
    completion: TextBytes = b""
    """Bytes of the answer without EOS; of an episode, its transcript for people to read."""
    reward: Reward = 0.0
    choice: Choice = ""
    """Digest of the answer's result that was judged."""
    opening: Annotated[str, msgspec.Meta(max_length=MAX_SHOWN_CHARS)] = ""
    """First messages of an episode as the policy was shown them, special tokens included; empty for a plain answer."""
    turns: Annotated[list[ReadableTurn], msgspec.Meta(max_length=MAX_SEGMENTS)] = []
    """Turns of an episode after its opening, for people to read; empty for a plain answer."""


class HeldOutAnswers(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="held_out_answers"):
    """Worker -> learner: finished answers to held-out prompts; acknowledged as groups are."""

    worker: Name
    answers: Annotated[list[HeldOutAnswer], msgspec.Meta(max_length=4096)]


class Groups(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="groups"):
    """Worker -> learner: finished groups, and groups that will never be finished."""

    worker: Name
    groups: Annotated[list[ScoredGroup], msgspec.Meta(max_length=4096)]
    stale: Annotated[list[StaleGroup], msgspec.Meta(max_length=4096)] = []


class WorkGrant(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="work_grant"):
    """Learner -> worker: answers a request. Empty `items` mean that the staleness budget is used up."""

    items: list[WorkItem]
    weights: WeightsNotice | None = None
    """None until the first version of this life of the learner is complete."""
    held_out: list[HeldOutItem] = []
    held_out_waiting: Version | None = None
    """Version under evaluation whose held-out prompts are not all granted yet."""


class GroupsAck(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="groups_ack"):
    """Learner -> worker: the learner has these tickets; the worker forgets them."""

    tickets: list[Name]
    weights: WeightsNotice | None = None
    """The newest weights; see WorkGrant."""


class WeightsRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="weights_request"):
    """Worker -> learner: asks for weights, by broadcast to `num_ranks` ranks of the worker, or with 0 in files."""

    worker: Name
    version: Version
    attempt: Count
    """Number of the request: the same in every repetition, different in every other request."""
    num_ranks: Annotated[int, msgspec.Meta(ge=0, le=1024)]
    gpu: Annotated[str, msgspec.Meta(max_length=100)] = ""
    """Unique id of the GPU that receives the weights; empty where main memory does."""
    nccl: Annotated[str, msgspec.Meta(max_length=100)] = ""
    """Version of NCCL in the worker's process with that GPU."""


class BroadcastRendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """The meeting of the ranks of one broadcast. The learner is rank 0; the ranks of one worker are consecutive."""

    host: Annotated[str, msgspec.Meta(max_length=300)]
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    """Port of the store at `host`; 0 where `file` is the store."""
    name: Name
    backend: Literal["gloo", "nccl"]
    first_rank: Annotated[int, msgspec.Meta(ge=0)]
    world_size: Annotated[int, msgspec.Meta(ge=2)]
    file: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """Path of the store of members on one host, in a folder that only their user can read."""


class WeightsRoute(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="weights_route"):
    """Learner -> worker: how to get the weights asked for.

    Neither way is there once newer weights exist, or where no place for a meeting can be had.
    """

    attempt: Count
    weights: WeightsNotice
    meeting: BroadcastRendezvous | None = None
    folder: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """Path of the manifest beside which the weights lie as files; empty where they do not."""


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="goodbye"):
    """Learner -> worker: all steps are done, ask for nothing more. Worker -> learner: confirms."""

    role: Name
    """Role that sends the message."""


WorkerMessage = WorkRequest | Groups | HeldOutAnswers | WeightsRequest | Goodbye
LearnerMessage = WorkGrant | GroupsAck | WeightsRoute | Goodbye

worker_message_decoder: msgspec.msgpack.Decoder[WorkerMessage] = decoder(WorkerMessage)
learner_message_decoder: msgspec.msgpack.Decoder[LearnerMessage] = decoder(LearnerMessage)
