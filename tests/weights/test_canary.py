"""What a canary says of an engine's scores: rounding is believed, other weights and lost updates are not."""

import math

import msgspec
import numpy as np
import pytest
import torch

from mrl.models.scoring import score_tokens
from mrl.weights.canary import (
    FLOOR_NATS,
    NOISE_MULTIPLE,
    SURE_ERRORS,
    canary_sequences,
    excess,
    gap_nats,
    make_canary,
    reference_logprobs,
)
from mrl.weights.manifest import Canary

ROWS, TOKENS = 24, 40
TEXTS = canary_sequences(64, num_sequences=ROWS, num_tokens=TOKENS + 1)


def scores(values: np.ndarray) -> list[list[float]]:
    return values.reshape(ROWS, TOKENS).tolist()


def drawn(rng: np.random.Generator, *, tails: float, per_row: float) -> np.ndarray:
    """Noise as rounding makes it: some tokens far noisier than others, and something that a row has in common."""
    sizes = 0.03 * rng.lognormal(0.0, tails, (ROWS, TOKENS))
    return sizes * (rng.normal(size=(ROWS, TOKENS)) + per_row * rng.normal(size=(ROWS, 1)))


def canary_of(noise: np.ndarray, update: np.ndarray) -> Canary:
    reference = -np.abs(np.random.default_rng(9).normal(2.0, 1.0, noise.shape))
    return Canary(TEXTS, scores(reference), scores(reference + noise), scores(reference + update))


def engine_of(canary: Canary, off: np.ndarray) -> list[list[float]]:
    return scores(np.asarray(canary.logprobs) + off)


@pytest.mark.parametrize("update_nats", [1e-4, 3e-3, 0.03, 0.3])
@pytest.mark.parametrize(("tails", "per_row"), [(0.0, 0.0), (1.0, 0.0), (1.5, 0.5)])
def test_what_rounding_makes_of_the_right_version_is_never_refused(update_nats, tails, per_row):
    """However large the update; over hundreds of versions."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        canary = canary_of(drawn(rng, tails=tails, per_row=per_row), update_nats * rng.normal(size=(ROWS, TOKENS)))
        gap = gap_nats(canary, engine_of(canary, drawn(rng, tails=tails, per_row=per_row)))
        assert gap.problem == ""
        assert abs(gap.missing_share) < SURE_ERRORS * gap.missing_error


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_part_of_the_update_that_is_missing_is_found_below_the_noise_of_a_token(share):
    """Here the update is half of the noise. The share is told, too."""
    rng = np.random.default_rng(2)
    for _ in range(50):
        update = 0.02 * rng.normal(size=(ROWS, TOKENS))
        canary = canary_of(drawn(rng, tails=0.5, per_row=0.0), update)
        gap = gap_nats(canary, engine_of(canary, share * update + drawn(rng, tails=0.5, per_row=0.0)))
        assert gap.missing_share == pytest.approx(share, abs=5 * gap.missing_error)
        assert gap.missing_error < 0.12
        assert share < 1.0 or "of the last update" in gap.problem


@pytest.mark.parametrize("follows", [0.5, 0.0, -0.5, -2.0])
def test_an_engine_that_stayed_several_versions_behind_is_found_by_the_last_step(follows):
    """Whether the steps that it lacks before that one went the same way, another one, or back beyond it.

    What is compared with is the version before the newest, which this engine never served.
    """
    rng = np.random.default_rng(7)
    for _ in range(50):
        last = 0.03 * rng.normal(size=(ROWS, TOKENS))
        before = follows * last + 0.03 * rng.normal(size=(ROWS, TOKENS))
        canary = canary_of(drawn(rng, tails=0.5, per_row=0.0), last)
        gap = gap_nats(canary, engine_of(canary, last + before + drawn(rng, tails=0.5, per_row=0.0)))
        assert gap.missing_share == pytest.approx(1.0 + follows, abs=5 * gap.missing_error)
        assert not gap.tells_versions
        assert "the last update" in gap.problem


@pytest.mark.parametrize(
    ("lost", "kept", "off_by", "wanted"),
    [
        (0.6, 0.8, 0.6, "told"),  # as the learner's rounded pass
        (0.6, 0.8, 0.0, "told"),  # as the exact one
        (0.6, 0.8, 0.3, "untold"),  # between them
        (0.6, 0.8, 1.4, "refused"),  # stale, in 16 bits
        (0.6, 0.8, 1.0, "refused"),  # a half of what is kept
        (0.6, 0.3, 0.67, "refused"),  # a quarter of the little that is kept
        (0.6, 0.8, -0.5, "refused"),  # beyond the exact one
        (1.3, 0.0, 1.3, "untold"),  # 16 bits keep nothing of the step
        (1.3, 0.5, 1.8, "refused"),  # they do, and lose what came before
    ],
)
def test_adapters_are_held_to_what_16_bits_keep_of_a_step(lost, kept, off_by, wanted):
    """Shares of the update, by which the rounded pass of now is off, that of the version before it, and the engine."""
    rng = np.random.default_rng(8)
    for _ in range(20):
        update = 0.3 * rng.normal(size=(ROWS, TOKENS))
        plain = canary_of(lost * update + drawn(rng, tails=0.5, per_row=0.0), update)
        before = scores(np.asarray(plain.rounded) + kept * update + drawn(rng, tails=0.5, per_row=0.0))
        canary = msgspec.structs.replace(plain, previous_rounded=before)

        gap = gap_nats(canary, engine_of(canary, off_by * update + drawn(rng, tails=0.5, per_row=0.0)))

        found = "refused" if gap.problem else "told" if gap.tells_versions else "untold"
        assert found == wanted, gap


def test_an_update_that_drowns_in_the_noise_is_neither_found_nor_told():
    """The engine is believed, and it is said that it need not be right."""
    rng = np.random.default_rng(3)
    update = 1e-4 * rng.normal(size=(ROWS, TOKENS))
    canary = canary_of(drawn(rng, tails=0.5, per_row=0.0), update)

    gap = gap_nats(canary, engine_of(canary, update + drawn(rng, tails=0.5, per_row=0.0)))

    assert (gap.problem, gap.tells_versions) == ("", False)


def test_an_update_that_moved_nothing_tells_nothing():
    """As one that was skipped."""
    rng = np.random.default_rng(4)
    canary = canary_of(drawn(rng, tails=0.5, per_row=0.0), np.zeros((ROWS, TOKENS)))

    gap = gap_nats(canary, engine_of(canary, drawn(rng, tails=0.5, per_row=0.0)))

    assert (gap.problem, gap.tells_versions) == ("", False)
    assert math.isnan(gap.missing_share)


def test_the_share_is_that_of_least_squares():
    """Of what the engine is off by, on the update, the learner's noise, and a constant, all at once."""
    rng = np.random.default_rng(5)
    noise, update = drawn(rng, tails=0.5, per_row=0.2), 0.02 * rng.normal(size=(ROWS, TOKENS))
    off = 0.3 * update + 0.5 * noise + 0.01 + drawn(rng, tails=0.5, per_row=0.0)
    canary = canary_of(noise, update)

    gap = gap_nats(canary, engine_of(canary, off))

    regressors = np.stack([update.ravel(), noise.ravel(), np.ones(update.size)], axis=1)
    assert gap.missing_share == pytest.approx(np.linalg.lstsq(regressors, off.ravel())[0][0], abs=1e-9)


@pytest.mark.parametrize("scale", [0.0, 1.0, 2.0])
def test_differences_are_held_to_a_multiple_of_the_noise(scale):
    """In their mean and in their tail; one token may be as far off as it likes."""
    rng = np.random.default_rng(6)
    noise = drawn(rng, tails=0.5, per_row=0.0).ravel()
    off = scale * rng.permutation(noise)
    off[7] = 1.0

    assert excess(off, noise) == ""
    assert "the mean" in excess(off + 2 * NOISE_MULTIPLE * noise, noise)
    tail = off + np.where(np.arange(off.size) % 16 == 0, 5 * np.quantile(np.abs(noise), 0.95), 0.0)
    assert "quantile" in excess(tail, noise)


def test_where_there_is_no_noise_the_order_of_sums_is_allowed():
    """And no more."""
    nothing = np.zeros(50)

    assert excess(nothing + 0.9 * FLOOR_NATS, nothing) == ""
    assert "allowed 0.0001" in excess(nothing + 1.1 * FLOOR_NATS, nothing)


def test_scores_of_other_texts_are_no_scores():
    """As of a server that refuses a text."""
    canary = canary_of(np.zeros((ROWS, TOKENS)), np.zeros((ROWS, TOKENS)))

    with pytest.raises(ValueError, match="do not match the texts"):
        gap_nats(canary, [*canary.logprobs[:-1], []])


@pytest.mark.parametrize("number_format", ["float32", "bfloat16"])
def test_a_model_that_is_one_step_behind_is_found_out(tiny_model, number_format):
    """A change of 1e-4 in every weight; the model itself passes in either format."""
    model = tiny_model("llama", seed=1)
    previous = reference_logprobs(model, TEXTS, number_format)
    behind = score_tokens(model, TEXTS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-4 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)).sign()
    canary = make_canary(model, TEXTS, number_format, previous)

    assert not gap_nats(canary, score_tokens(model, TEXTS)).problem
    assert not gap_nats(canary, canary.rounded).problem
    assert gap_nats(canary, behind).problem
