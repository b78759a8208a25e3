"""Lengths of answers. An answer is a chain of thinking tokens, then `<answer>`, a digit, `</answer>` and EOS."""

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

CLOSING_TOKENS = 4
"""Number of tokens after the chain: tag, digit, tag, EOS."""
SIGMA = 0.8
"""Standard deviation of the logarithm of a long-tailed length."""
MEDIAN_TOKENS = 55.7
"""Median of a long-tailed length; with SIGMA and a limit of 192 tokens the mean is 71 tokens."""

Float64s: TypeAlias = npt.NDArray[np.float64]


def fixed_stops(num_tokens: int) -> Float64s:
    """[num_tokens] chance that the chain stops after its i-th token, so that every answer has `num_tokens` tokens."""
    stops = np.zeros(num_tokens)
    stops[num_tokens - CLOSING_TOKENS - 1 :] = 1.0
    return stops


def long_tailed_stops(limit_tokens: int, median_tokens: float = MEDIAN_TOKENS, sigma: float = SIGMA) -> Float64s:
    """[limit_tokens] chance that the chain stops after its i-th token, so that whole answers have log-normal lengths.

    The shortest answer has one thinking token. An answer that would be longer than the limit is cut there.
    """
    edges = np.arange(1, limit_tokens + 1) + CLOSING_TOKENS + 0.5
    shorter = np.array([_normal_cdf(math.log(edge / median_tokens) / sigma) for edge in edges])
    chances = np.diff(shorter, prepend=0.0)
    going_on = 1.0 - np.concatenate([[0.0], shorter[:-1]])
    stops: Float64s = chances / going_on
    return stops


def mean_tokens(stops: Float64s, limit_tokens: int) -> float:
    """Mean length in tokens of answers that end by these chances or are cut at the limit."""
    going_on = np.concatenate([[1.0], np.cumprod(1.0 - stops)])
    ends = going_on[:-1] * stops
    lengths = np.minimum(np.arange(1, len(stops) + 1) + CLOSING_TOKENS, limit_tokens)
    return float(ends @ lengths + going_on[-1] * limit_tokens)


def _normal_cdf(z: float) -> float:
    return 0.5 * (1.0 + math.erf(z / math.sqrt(2.0)))
