"""Versions of a policy's weights: the tag of an engine and of every sampled token."""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class Version(msgspec.Struct, frozen=True, order=True, gc=False):
    """The pair (run_epoch, step) of one policy; pairs compare like tuples.

    A resume starts a new `run_epoch`, and voids the steps of the old epoch after the resumed step.
    """

    run_epoch: Count
    step: Count

    def __str__(self) -> str:
        return f"{self.run_epoch}.{self.step}"


class VersionSpan(msgspec.Struct, frozen=True):
    """`num_tokens` consecutive tokens of one answer, all sampled by `version`."""

    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
    version: Version


def append_span(versions: list[VersionSpan], num_tokens: int, version: Version) -> list[VersionSpan]:
    """Return `versions` with `num_tokens` more tokens of `version`; equal neighbours become one span."""
    if not num_tokens:
        return versions
    if versions and versions[-1].version == version:
        return [*versions[:-1], VersionSpan(versions[-1].num_tokens + num_tokens, version)]
    return [*versions, VersionSpan(num_tokens, version)]


def age_versions(newest: Version, oldest: Version) -> int:
    """Return the steps by which `oldest` lies behind `newest`.

    Across a resume only the step counts: the steps of a voided epoch that lie above `newest` have age 0 here and are
    recognised by `is_void`.
    """
    return max(0, newest.step - oldest.step)


def is_void(version: Version, resumed_at: Version) -> bool:
    """Whether a resume at `resumed_at` voided `version`: an older epoch with a later step."""
    return version.run_epoch < resumed_at.run_epoch and version.step > resumed_at.step
