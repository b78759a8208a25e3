"""The fields of a record that the exchange reads. The exchange stores and passes on the rest unread, byte for byte."""

from typing import Annotated

import msgspec

from mrl.errors import RecordError
from mrl.records.codec import SCHEMA, decode, decoder
from mrl.records.experience import MAX_GROUP, RecordKind, Reward
from mrl.records.version import Name, Version

OptionalName = Annotated[str, msgspec.Meta(max_length=200)]


class _Answer(msgspec.Struct, frozen=True, gc=False):
    reward: Reward | None = None


class Tags(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The fields of `mrl.records.experience` that decide where a record goes, under the same names and bounds."""

    type: RecordKind
    record_id: Name
    source: Name
    oldest: Version
    newest: Version
    prompt_id: Name
    task: Name
    schema: Annotated[int, msgspec.Meta(ge=SCHEMA, le=SCHEMA)]
    scorer: OptionalName = ""
    """Policy that a score request asks; empty in other records."""
    request_id: OptionalName = ""
    """Id of the request that a score answers; empty in other records."""
    receiver: OptionalName = ""
    """Policy that asked for a score; empty in other records."""

    @property
    def is_complete(self) -> bool:
        """Whether the record carries the fields that its type needs."""
        match self.type:
            case "score_request":
                return bool(self.scorer)
            case "score":
                return bool(self.request_id and self.receiver)
            case _:
                return True

    @property
    def addressee(self) -> str:
        """The only policy that may have the record; "" when every policy may."""
        return self.scorer if self.type == "score_request" else self.receiver if self.type == "score" else ""

    def is_for(self, policy: str) -> bool:
        """Whether this policy may have the record."""
        return self.addressee in ("", policy)


class _Rewards(msgspec.Struct, frozen=True, gc=False):
    """The fields in which records of the several types keep their rewards."""

    reward: Reward | None = None
    rewards: Annotated[list[Reward], msgspec.Meta(max_length=MAX_GROUP)] = []
    answers: Annotated[list[_Answer], msgspec.Meta(max_length=MAX_GROUP)] = []


_tags_decoder: msgspec.msgpack.Decoder[Tags] = decoder(Tags)
_rewards_decoder: msgspec.msgpack.Decoder[_Rewards] = decoder(_Rewards)


def tags_of(body: bytes | memoryview) -> Tags | None:
    """Return the tags of an encoded record; None when tags are missing, out of bounds or of an unknown type."""
    try:
        tags = decode(body, _tags_decoder)
    except RecordError:
        return None
    return tags if tags.is_complete else None


def mean_reward_of(body: bytes) -> float | None:
    """Return the mean reward over all answers of an encoded record; None without rewards that can be read."""
    try:
        read = decode(body, _rewards_decoder)
    except RecordError:
        return None
    rewards = [read.reward, *read.rewards, *(answer.reward for answer in read.answers)]
    known = [reward for reward in rewards if reward is not None]
    return sum(known) / len(known) if known else None
