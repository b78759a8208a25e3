"""What a term sees of the tokens of one component in one microbatch.

Shapes: T tokens of R whole rows.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TermInputs:
    """Log-probabilities in nats, advantages and rows of T tokens. Only `logprobs_T` carries gradient.

    A row is never cut: all its tokens are here, in any order.
    """

    logprobs_T: Tensor
    """Under the policy in training."""
    proximal_T: Tensor
    """Under the same policy at the start of the step."""
    behaviour_T: Tensor
    """Under the policy that sampled."""
    advantages_T: Tensor
    row_T: Tensor
    """int64 row of each token, 0..R-1."""
    teacher_T: Tensor
    """Under a policy that only scored; NaN where it said nothing."""
    update_index: int = 0
    """Optimizer updates already made in this step."""
