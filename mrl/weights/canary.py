"""The canary: texts that tell whether an engine serves the weights that the learner published.

Two signs give other weights away. First, scores that are off by several times the noise of rounding, on average or in
the tail: tensors were exchanged, or are another model's. Second, scores that are off in the direction of the version
before: an update was lost, as a whole or in part. The second sign finds steps that are far smaller than rounding, since
rounding has no reason to point in that direction, or, with adapters, points there in the learner's own pass as well.
Where the sign cannot be told from chance, that is said and nothing is refused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from torch import nn

from mrl.models.compiled_blocks import as_written
from mrl.models.number_formats import EmulatedPrecision, NumberFormat
from mrl.models.row_attention import attention_of_transformers
from mrl.models.scoring import score_tokens
from mrl.weights.manifest import Canary

NOISE_MULTIPLE = 3.0
"""Allowed multiple of the learner's noise: healthy engines are off by 0.8 to 1.4 times the noise, exchanged tensors by
10 times and more."""
QUANTILE = 0.95
FLOOR_NATS = 1e-4
"""Least value of either bound: in float32 the learner's own noise may be zero, that of another order of sums not."""
SURE_ERRORS = 6.0
"""Standard errors at which a share of the update counts as missing: chance does that once in a billion."""
MIN_MISSING_SHARE = 0.1
"""Least share of an update whose absence is looked for."""
TELLING_SHARE, TELLING_ERRORS = 0.2, 3.0
"""A canary tells versions apart where the missing share of the update, with the second number of standard errors added,
is at most the first."""

Floats = npt.NDArray[np.float64]


def canary_sequences(vocab_size: int, *, num_sequences: int = 4, num_tokens: int = 16) -> list[list[int]]:
    """Return random ids, for models without texts: [num_sequences][num_tokens], the same for the same arguments."""
    ids = np.random.default_rng(0).integers(0, vocab_size, size=(num_sequences, num_tokens))
    return [[int(token) for token in row] for row in ids]


def make_canary(
    model: nn.Module,
    token_ids: Sequence[Sequence[int]],
    number_format: NumberFormat = "float32",
    previous: Sequence[Sequence[float]] = (),
    previous_rounded: Sequence[Sequence[float]] = (),
) -> Canary:
    """Return the canary for the manifest, for an engine that computes in `number_format`.

    `previous` are the `reference_logprobs` of the same texts under the version that was published before, and
    `previous_rounded` its `rounded_logprobs`. Where the model is sharded, all ranks have to call it.
    """
    return Canary(
        [list(row) for row in token_ids],
        reference_logprobs(model, token_ids, number_format),
        rounded_logprobs(model, token_ids, number_format),
        [list(row) for row in previous],
        [list(row) for row in previous_rounded],
    )


def reference_logprobs(
    model: nn.Module, token_ids: Sequence[Sequence[int]], number_format: NumberFormat
) -> list[list[float]]:
    """Return scores under weights in the format that the engine gets, by arithmetic in float32."""
    weights: NumberFormat = "float32" if number_format == "tf32" else number_format
    with as_written(), EmulatedPrecision("float32", weights=weights):
        return score_tokens(model, token_ids)


def rounded_logprobs(
    model: nn.Module, token_ids: Sequence[Sequence[int]], number_format: NumberFormat
) -> list[list[float]]:
    """Return scores by arithmetic in the engine's format, transformers' own attention, and half of the rows at once."""
    half = (len(token_ids) + 1) // 2
    with as_written(), attention_of_transformers(model), EmulatedPrecision(number_format, weights=number_format):
        return [row for part in (token_ids[:half], token_ids[half:]) if part for row in score_tokens(model, part)]


@dataclass(frozen=True, slots=True)
class CanaryGap:
    """How an engine's log-probabilities differ from the learner's, in nats; NaN counts as infinite."""

    mean_nats: float
    max_nats: float
    noise_nats: float
    """Mean difference that rounding alone makes, as the learner measured it."""
    missing_share: float = math.nan
    """Share of the last update that the engine seems to lack: 0 for an engine with the new version, 1 for one with the
    version before, any other number when steps before that are missing too.

    Not a number where nothing can be compared.
    """
    missing_error: float = math.inf
    """Standard error of the missing share."""
    problem: str = ""
    """Why the engine serves other weights; empty when nothing shows that."""

    @property
    def tells_versions(self) -> bool:
        """Whether the canary shows that no considerable part of the last update is missing."""
        return abs(self.missing_share) + TELLING_ERRORS * self.missing_error <= TELLING_SHARE


def gap_nats(canary: Canary, scored: Sequence[Sequence[float]]) -> CanaryGap:
    """Return how far an engine's scores are from the reference. Raises ValueError when the shapes differ."""
    reference, rows = _flat(canary.logprobs), [len(row) for row in canary.logprobs]
    if [len(row) for row in scored] != rows:
        raise ValueError("the engine's scores do not match the texts of the canary in length")
    off, noise = _flat(scored) - reference, _flat(canary.rounded) - reference
    mean_noise = _mean(noise)
    if not np.isfinite(off).all():
        return CanaryGap(math.inf, math.inf, mean_noise, problem="log-probabilities are NaN or infinite")
    share, error = math.nan, math.inf
    if canary.previous_rounded:
        share, error = _missing_of_adapters(canary, off, noise, rows)
    elif canary.previous:
        share, error = _missing(off, [noise], _flat(canary.previous) - reference, rows)
    problem = excess(off, noise)
    if not problem and abs(share) > max(MIN_MISSING_SHARE, SURE_ERRORS * error):
        problem = f"{share:.0%} of the last update is missing, give or take {error:.0%}"
    return CanaryGap(_mean(off), float(np.abs(off).max()), mean_noise, share, error, problem)


def _missing_of_adapters(canary: Canary, off_T: Floats, noise_T: Floats, rows: Sequence[int]) -> tuple[float, float]:
    """Return the share that an engine lacks of the part of an update that 16 bits keep, and its standard error.

    Adapters add to sums that are rounded before, so that much of a small step is lost, and of the steps before it as
    well. The learner's rounded passes of both versions tell how much is kept; the engine is compared with the rounded
    pass of the new version. An engine that keeps more is compared with the exact reference, and where it keeps less
    than that, nothing can be told.
    """
    update = _flat(canary.previous) - _flat(canary.logprobs)
    kept, kept_error = _missing(_flat(canary.previous_rounded) - _flat(canary.rounded), [], update, rows)
    lacks, error = _missing(off_T - noise_T, [], update, rows)
    if not kept > SURE_ERRORS * kept_error:  # a stale engine would look the same
        return math.nan, math.inf
    if lacks < -SURE_ERRORS * error:
        lacks, error = _missing(off_T, [], update, rows)
        return (lacks, error) if lacks <= SURE_ERRORS * error else (math.nan, math.inf)
    return lacks / kept, math.hypot(error, kept_error * lacks / kept) / kept


def excess(off_T: npt.NDArray[np.floating], noise_T: npt.NDArray[np.floating]) -> str:
    """Return by what the differences `off_T`, in nats, exceed those of rounding, of which `noise_T` is a sample.

    Empty where they do not. Differences are judged by their mean and by a quantile, never by one token: rounding has
    tails.
    """
    tail, tail_noise = (float(np.quantile(np.abs(part), QUANTILE)) for part in (off_T, noise_T))
    judged = (("the mean", _mean(off_T), _mean(noise_T)), (f"the {QUANTILE:.0%} quantile", tail, tail_noise))
    for what, found, rounding in judged:
        allowed = max(FLOOR_NATS, NOISE_MULTIPLE * rounding)
        if not found <= allowed:
            return f"{what} of the differences is {found:.2g} nats, allowed {allowed:.2g}"
    return ""


def _missing(off_T: Floats, apart: Sequence[Floats], update_T: Floats, rows: Sequence[int]) -> tuple[float, float]:
    """Return the share of the update (old minus new) in an engine's differences, and its standard error.

    The share is by least squares. A shift of all tokens, and differences in the directions `apart`, [T] each, are taken
    out before. The error is the larger of two that hold for noise of any size (MacKinnon and White 1985, HC3): one for
    noise that differs from token to token, one for noise that tokens of a row have in common.
    """
    other = np.stack([np.ones_like(off_T), *apart], axis=1)
    off, update = (part - other @ np.linalg.lstsq(other, part)[0] for part in (off_T, update_T))
    size = float(update @ update)
    if size <= update.size * np.finfo(np.float32).eps ** 2:  # of float32 numbers of about one nat
        return math.nan, math.inf
    share = float(update @ off) / size
    leverage = np.minimum(update**2 / size, 0.5)
    pulls = update * (off - share * update) / (1.0 - leverage)
    of_rows = np.array([pulls[start:end].sum() for start, end in pairwise(np.cumsum([0, *rows]))])
    return share, math.sqrt(max(float(pulls @ pulls), float(of_rows @ of_rows))) / size


def _flat(rows: Sequence[Sequence[float]]) -> Floats:
    return np.concatenate([np.asarray(row, dtype=np.float64) for row in rows])


def _mean(values: npt.NDArray[np.floating]) -> float:
    return float(np.abs(values).mean())
