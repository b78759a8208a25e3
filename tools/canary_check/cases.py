"""Learners and engines with which the canary is tried."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from mrl.models.number_formats import NumberFormat

LOGIT_STDS = (1.0, 2.0, 3.0, 4.0)
LAYERS = (4, 8, 16, 32)
LR, SMALL_LR = 1e-5, 1e-6
ADAPTERS_LR, SMALL_ADAPTERS_LR = 1e-3, 1e-4
LEARNERS: tuple[tuple[NumberFormat, NumberFormat, float], ...] = (
    ("float32", "float32", SMALL_LR),
    ("float32", "bfloat16", LR),
    ("bfloat16", "bfloat16", LR),
    ("bfloat16", "bfloat16", SMALL_LR),
)
"""Triples: number format of the learner, number format of the engine, learning rate."""


@dataclass(frozen=True, slots=True)
class Case:
    """A learner and the number format of its engines."""

    precision: NumberFormat
    engine: NumberFormat
    num_layers: int
    logit_std: float
    lr: float
    is_released: bool = False
    """Whether the weights begin with 16 bits: most of them round back to where they were after a small step."""
    adapters: bool = False
    """Whether the learner trains adapters over 16-bit weights, and publishes them alone."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the faults that are not tried."""
        return ("q swapped", "gate / up") if self.adapters else ()

    @property
    def may_be_untold(self) -> tuple[str, ...]:
        """Names of the faults that may change log-probabilities less than can be told from rounding."""
        if self.adapters:
            return ("half", "late") if self.lr == ADAPTERS_LR else ("half", "late", "stale")
        if self.engine == "float32":
            return ()
        return ("half", "late", "stale") if self.is_released or self.lr < LR else ("half", "late")


def cases(*, quick: bool) -> Iterator[Case]:
    """All cases, or three with `quick`."""
    if quick:
        yield Case("float32", "bfloat16", num_layers=4, logit_std=4.0, lr=1e-5)
        yield Case("bfloat16", "bfloat16", num_layers=4, logit_std=1.0, lr=1e-6)
        yield Case("bfloat16", "bfloat16", 4, 2.0, SMALL_ADAPTERS_LR, is_released=True, adapters=True)
        return
    for layers, std, (precision, engine, lr) in product(LAYERS, LOGIT_STDS, LEARNERS):
        yield Case(precision, engine, layers, std, lr)
    for std in LOGIT_STDS:
        yield Case("bfloat16", "bfloat16", 8, std, LR, is_released=True)
    for layers, std, lr in product(LAYERS, LOGIT_STDS, (ADAPTERS_LR, SMALL_ADAPTERS_LR)):
        yield Case("bfloat16", "bfloat16", layers, std, lr, is_released=True, adapters=True)
