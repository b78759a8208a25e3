"""Experience: what crosses between policies through the exchange (SEE in the paper, arXiv 2605.07244).

A record says who made it (source policy, version, tokenizer fingerprint), about which prompt, and when.
Text travels as bytes. Token ids never cross (the ids of one tokenizer mean nothing to another).
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec

from mrl.records.codec import SCHEMA, decoder
from mrl.records.version import Name, Version

MAX_COMPLETION_BYTES = 256 * 1024
TokenBytes = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_COMPLETION_BYTES)]


class Experience(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
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


class TokenTrace(msgspec.Struct, frozen=True, kw_only=True):
    """How the source's tokenizer cut a completion of T tokens, EOS included, and what each token was worth to it.

    Numbers of bytes and nats only: they mean the same to every tokenizer. About 9 bytes per token on the wire.
    """

    byte_lengths: TokenBytes
    """[T] int32 bytes of every token; 0 for specials and EOS."""
    logprobs: TokenBytes
    """[T] float32 under the policy that sampled them."""
    special: TokenBytes
    """[T] one byte each, 1 for specials and EOS."""
    noncanonical: bool = False
    """Whether the source's tokenizer gives the text other ids than were sampled."""


class OutcomeRecord(Experience, frozen=True, kw_only=True, tag="outcome"):
    """A verified success: the text of one answer that the task's verifier accepted. Read by SGT.

    Example: prompt "Spell this word backward (example: sun -> nus): hay", completion b"reverse: yah", reward 1.0.
    About 350 bytes on the wire for a short answer, and its trace.
    """

    completion: Annotated[bytes, msgspec.Meta(max_length=MAX_COMPLETION_BYTES)]
    finished: bool
    """Whether the source ended the answer itself (EOS) rather than being cut off."""
    verifier: Name
    reward: Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
    trace: TokenTrace | None = None
    """From it a receiver measures what sharing costs; training does not need it."""


ExperienceRecord = OutcomeRecord
"""The union of record types; a new type is added here and nowhere else."""

experience_decoder: msgspec.msgpack.Decoder[ExperienceRecord] = decoder(ExperienceRecord)


@dataclass(frozen=True, slots=True)
class Received:
    """A peer record as the learner got it, with its age in versions of its source at that moment."""

    record: ExperienceRecord
    age_versions: int
