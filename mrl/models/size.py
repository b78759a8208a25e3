"""The numbers of a policy and of its passes that the memory plan needs; no tensor in it."""

import math
from dataclasses import astuple, dataclass


def equal_parts(num_heads: int, num_cached: int) -> list[int]:
    """Into how many equal parts attention heads come apart; a head of keys and values may be in several of them."""
    return [
        parts
        for parts in range(1, num_heads + 1)
        if not num_heads % parts and (not num_cached % parts or not parts % num_cached)
    ]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Parameters and shapes of a model. Numbers of elements, not bytes."""

    parameters: int
    """All of them, tied ones once."""
    trained: int
    """Those that training changes: all, or the adapters, which `parameters` then counts too."""
    block: int
    """Parameters of one transformer block."""
    num_blocks: int
    vocab_size: int
    cached_per_token: int
    """Keys and values that one token leaves in the cache, over all blocks."""
    query_heads_per_cached: int
    """Attention heads that share one head of keys and values."""
    has_experts: bool = False
    """Whether a tensor holds several matrices of a block."""
    head: int = 0
    """Parameters of a head that is trained and shares none with the embedding."""

    @property
    def outer(self) -> int:
        """Parameters outside the blocks: embedding, head, last norm."""
        return self.parameters - self.num_blocks * self.block

    @property
    def trained_block(self) -> int:
        """Of one block, those that training changes."""
        return self.block if self.trained == self.parameters else self.trained // self.num_blocks


@dataclass(frozen=True, slots=True)
class PassPeaks:
    """Largest memory in bytes that a forward and backward pass needs at once, beyond parameters and their gradients.

    In the order in which they come; what a pass keeps for its backward counts in all of them until it is used up.
    """

    forward: int
    head: int
    """Backward of the log-probabilities."""
    blocks: int
    """Backward of all blocks but the first; it needs most at its beginning, with the last block."""
    bottom: int
    """Backward of the first block and the embedding."""
    offloaded: int = 0
    """What all blocks together keep on the host of a GPU in its stead."""

    def extrapolated(self, other: "PassPeaks", more: int) -> "PassPeaks":
        """The peaks of a model that has `more` blocks than `other`, which has one block more than this one."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return PassPeaks(*(two + more * (two - one) for one, two in pairs))


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A forward pass over rows of equal length, as many of a prompt together as there are (`mrl.learner.packing`)."""

    rows: int
    rows_per_prompt: int
    prompt_tokens: int
    answer_tokens: int

    @property
    def row_tokens(self) -> int:
        """Places of a row that shares nothing."""
        return self.prompt_tokens + self.answer_tokens - 1

    @property
    def places(self) -> int:
        """Of all rows."""
        prompts = math.ceil(self.rows / self.rows_per_prompt)
        return prompts * self.prompt_tokens + self.rows * (self.answer_tokens - 1)
