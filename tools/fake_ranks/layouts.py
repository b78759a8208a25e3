"""Models sharded over ranks of several hosts, and the memory plan of one of these ranks."""

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
    """A model by its name in `memory_tables`, its number of ranks, and how many of them share one copy of it."""

    shape: str
    ranks: int
    shards: int
    per_host: int = GPUS_PER_HOST
    is_rounded: bool = False
    """Whether parameters and moments have 16 bits."""

    @property
    def name(self) -> str:
        """Name in rows and tables."""
        return f"{self.shape}, {self.ranks} ranks, shards of {self.shards}" + ", 16 bits" * self.is_rounded

    @property
    def config(self) -> PreTrainedConfig:
        """Configuration of the model."""
        return SHAPES[self.shape]

    @property
    def size(self) -> ModelSize:
        """Sizes of the model."""
        return model_size(self.config)

    @property
    def table(self) -> LearnerTable:
        """Learner table of the policy."""
        hosts = max(1, self.ranks // self.per_host)
        ranks = {"processes": self.ranks, "hosts": hosts, "shard_size": self.shards, "attention_kernel": "rows"}
        given = self._memory.table.learner.model_dump(exclude_unset=True)
        rounded = SMALL | PARAMETERS if self.is_rounded else {}
        return LearnerTable.model_validate(given | LEAN | rounded | ranks | {"microbatch_tokens": TOKENS})

    def fullest_pass(self) -> tuple[Microbatch, int]:
        """Fullest pass by the plan, and number of passes of an update."""
        return self._memory.fullest_pass(self.table)

    def planned(self) -> Need:
        """Planned memory of the tensors of a rank on its GPU."""
        return self._memory.ranks(self.table)[-1][1]

    @property
    def _memory(self) -> PolicyMemory:
        """Memory plan of the policy. Prompts and answers are those of docs/learner.md: rows of half a microbatch."""
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
"""Layouts on hosts of eight GPUs. With few shards 70B is too large for 80 GB; larger GPUs need less of a network."""
