"""The place of one rank in its learner: its number among all ranks, and the hosts that they live on.

On every host an agent of torchrun numbers its own ranks from 0; every host has as many. The supervisor says which of
the learner's hosts this one is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

LEARNER_HOSTS = "MRL_LEARNER_HOSTS"
"""Environment variable: the hosts of a learner that lives on several, "a,b"; those of the first ranks come first."""
LEARNER_PLACE = "MRL_LEARNER_PLACE"
"""Environment variable: number of this host among the learner's hosts, from 0."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Place of one rank in its learner."""

    local_rank: int = 0
    """Number among the ranks of its host."""
    local_size: int = 1
    host: int = 0
    """Number of its host among the learner's hosts."""
    hosts: tuple[str, ...] = ("",)

    @property
    def rank(self) -> int:
        """Number among all ranks; neighbours share a host."""
        return self.host * self.local_size + self.local_rank

    @property
    def size(self) -> int:
        """Number of ranks of the learner."""
        return len(self.hosts) * self.local_size

    @property
    def is_spread(self) -> bool:
        """Whether the ranks live on several hosts."""
        return len(self.hosts) > 1

    def host_of(self, rank: int) -> str:
        """Return the name of the host that a rank lives on; empty where all live on one."""
        return self.hosts[rank // self.local_size]

    def told(self, rank: int) -> str:
        """Return the words by which people read of a rank."""
        return f"rank {rank} on host {self.host_of(rank)}" if self.is_spread else f"rank {rank}"


def rank_place(environ: Mapping[str, str]) -> RankPlace:
    """Return the place that torchrun and the supervisor describe; without them that of a process alone."""
    return RankPlace(
        local_rank=int(environ.get("RANK", "0")),
        local_size=int(environ.get("WORLD_SIZE", "1")),
        host=int(environ.get(LEARNER_PLACE, "0")),
        hosts=tuple(environ.get(LEARNER_HOSTS, "").split(",")),
    )
