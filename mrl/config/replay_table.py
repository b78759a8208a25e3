"""The table of a replayed run: whose records a run takes up when it begins."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from mrl.config.schema import PolicyName
from mrl.config.table import Table

REPLAY = "replay"
SEPARATOR = "."
"""Between prefix and policy. No policy's name has one, so no replayed source has the name of a policy of the run."""


class ReplayTable(Table):
    """The store of a run that ended, as one more source of peers' records."""

    run: Annotated[str, Field(min_length=1)]
    """Folder of the run that ended, this policy's own or anybody's."""
    policies: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    """Policies of that run whose records are taken. Empty: all that learned or acted there."""
    prefix: PolicyName = "replay"
    """What their names begin with here: records of qwen come from "replay.qwen"."""
    max_age_versions: int | None = Field(default=None, ge=0)
    """Records that were older than this when that run ended are left out. Left out: none is.

    In this run a replayed source stands still, and its records are of age 0.
    """

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of the records in this run, of the policies that are named."""
        return tuple(f"{self.prefix}{SEPARATOR}{policy}" for policy in self.policies)


def replay_of(sharing: Mapping[str, Any]) -> ReplayTable | None:
    """The replayed run of a checked `[sharing]` table; None where there is none."""
    return ReplayTable.model_validate(sharing[REPLAY]) if REPLAY in sharing else None


def is_replayed(source: str) -> bool:
    """Whether records of this name come from another run's store."""
    return SEPARATOR in source
