"""Numbers of parameters and shapes of a policy and of its passes, for the memory plan; no tensor in it."""

import math
from dataclasses import astuple, dataclass


def equal_parts(num_heads: int, num_cached: int) -> list[int]:
    """Return the numbers of equal parts into which attention heads can be split; a head of keys and values may be in
    several parts.
    """
    return [
        parts
        for parts in range(1, num_heads + 1)
        if not num_heads % parts and (not num_cached % parts or not parts % num_cached)
    ]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Parameters and shapes of a model, as numbers of elements, not bytes."""

    parameters: int
    """All parameters; tied ones count once."""
    trained: int
    """Parameters that training changes: all, or the adapters, which `parameters` then counts too."""
    block: int
    """Parameters of one transformer block."""
    num_blocks: int
    vocab_size: int
    cached_per_token: int
    """Elements of the keys and values that one token leaves in the cache, over all blocks."""
    query_heads_per_cached: int
    """Attention heads that share one head of keys and values."""
    has_experts: bool = False
    """Whether some parameter holds several matrices of a block, as experts do."""
    head: int = 0
    """Parameters of a trained head that shares none with the embedding; else 0."""

    @property
    def outer(self) -> int:
        """Parameters outside the blocks: embedding, head and last norm."""
        return self.parameters - self.num_blocks * self.block

    @property
    def trained_block(self) -> int:
        """Parameters of one block that training changes."""
        return self.block if self.trained == self.parameters else self.trained // self.num_blocks


@dataclass(frozen=True, slots=True)
class PassPeaks:
    """Largest memory in bytes that a forward and backward pass needs at once, beyond parameters and their gradients.

    The phases of the pass are in their order in time. Activations kept for the backward count in every phase until they
    are used up.
    """

    forward: int
    head: int
    """Backward of the log-probabilities."""
    blocks: int
    """Backward of all blocks but the first; most is needed at its beginning, in the last block."""
    bottom: int
    """Backward of the first block and the embedding."""
    offloaded: int = 0
    """Activations of all blocks that are kept on the host instead of the GPU."""

    def extrapolated(self, other: "PassPeaks", more: int) -> "PassPeaks":
        """Return the peaks of a model that has `more` blocks than `other`, by linear extrapolation; `other` has one
        block more than this model.
        """
        pairs = zip(astuple(self), astuple(other), strict=True)
        return PassPeaks(*(two + more * (two - one) for one, two in pairs))


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A forward pass over rows of equal length; rows of one prompt share its places (`mrl.learner.packing`)."""

    rows: int
    rows_per_prompt: int
    prompt_tokens: int
    answer_tokens: int

    @property
    def row_tokens(self) -> int:
        """Places of a row that shares no prompt; the last token predicts nothing."""
        return self.prompt_tokens + self.answer_tokens - 1

    @property
    def places(self) -> int:
        """Places of all rows together, every shared prompt once."""
        prompts = math.ceil(self.rows / self.rows_per_prompt)
        return prompts * self.prompt_tokens + self.rows * (self.answer_tokens - 1)
