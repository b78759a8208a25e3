"""The table of a replayed run, whose records a run takes up when it begins."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from mrl.config.schema import PolicyName
from mrl.config.table import Table

REPLAY = "replay"
SEPARATOR = "."
"""Stands between prefix and policy in the name of a replayed source. No policy's name has one, so no replayed source
has the name of a policy of the run."""


class ReplayTable(Table):
    """The store of a finished run, as one more source of peers' records."""

    run: Annotated[str, Field(min_length=1)]
    """Folder of the finished run, your own or someone else's."""
    policies: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    """Policies of the finished run whose records are used. Empty: all that learned or acted there."""
    prefix: PolicyName = "replay"
    """Prefix of the sources' names in this run: records of qwen come from "replay.qwen"."""
    max_age_versions: int | None = Field(default=None, ge=0)
    """Maximum age of a record, in versions, when that run ended; older records are not used. Left out: no limit.

    In this run a replayed source never advances, and its records have age 0.
    """

    @property
    def sources(self) -> tuple[str, ...]:
        """Names that the sources of the named policies have in this run."""
        return tuple(f"{self.prefix}{SEPARATOR}{policy}" for policy in self.policies)


def replay_of(sharing: Mapping[str, Any]) -> ReplayTable | None:
    """Return the replayed run of a checked `[sharing]` table; None where there is none."""
    return ReplayTable.model_validate(sharing[REPLAY]) if REPLAY in sharing else None


def is_replayed(source: str) -> bool:
    """Whether records of this source come from another run's store."""
    return SEPARATOR in source
