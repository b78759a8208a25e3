"""Models that are shared out over ranks of several hosts, and what the memory plan says of a rank of theirs."""

from dataclasses import dataclass

from memory_tables import GPUS_PER_HOST, LEAN, PARAMETERS, SHAPES, SMALL, TOKENS, policy_memory
from transformers import PreTrainedConfig

from mrl.config.policy_tables import LearnerTable
from mrl.memory_plan.needs import Need
from mrl.memory_plan.policy_memory import PolicyMemory
from mrl.models.size import Microbatch, ModelSize
from mrl.models.skeleton import model_size


@dataclass(frozen=True, slots=True)
class Layout:
    """A model by its name in `memory_tables`, so many ranks, and how many of them share one copy of it."""

    shape: str
    ranks: int
    shards: int
    per_host: int = GPUS_PER_HOST
    is_rounded: bool = False
    """Whether parameters and moments have 16 bits."""

    @property
    def name(self) -> str:
        """For rows and tables."""
        return f"{self.shape}, {self.ranks} ranks, shards of {self.shards}" + ", 16 bits" * self.is_rounded

    @property
    def config(self) -> PreTrainedConfig:
        """Of the model."""
        return SHAPES[self.shape]

    @property
    def size(self) -> ModelSize:
        """Of the model."""
        return model_size(self.config)

    @property
    def table(self) -> LearnerTable:
        """What a policy says of its learner."""
        hosts = max(1, self.ranks // self.per_host)
        ranks = {"processes": self.ranks, "hosts": hosts, "shard_size": self.shards, "attention_kernel": "rows"}
        given = self._memory.table.learner.model_dump(exclude_unset=True)
        rounded = SMALL | PARAMETERS if self.is_rounded else {}
        return LearnerTable.model_validate(given | LEAN | rounded | ranks | {"microbatch_tokens": TOKENS})

    def fullest_pass(self) -> tuple[Microbatch, int]:
        """As the plan sees it, and how many make an update."""
        return self._memory.fullest_pass(self.table)

    def planned(self) -> Need:
        """Of the tensors of a rank on its GPU."""
        return self._memory.ranks(self.table)[-1][1]

    @property
    def _memory(self) -> PolicyMemory:
        """Prompts and answers are those of docs/learner.md: rows of half a microbatch."""
        return policy_memory(self.shape, TOKENS // 2)


LAYOUTS = (
    Layout("32B", 8, 8),
    Layout("32B", 8, 8, is_rounded=True),
    Layout("32B", 16, 8),
    Layout("32B", 64, 8),
    Layout("32B", 64, 64),
    Layout("70B", 8, 8, is_rounded=True),
    Layout("70B", 16, 16),
    Layout("70B", 64, 16),
    Layout("70B", 64, 64),
)
"""On hosts of eight GPUs. Where shards are few, 70B is too large for 80 GB; GPUs of more need less of a network."""
