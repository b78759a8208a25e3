"""Which learners and engines are tried."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from mrl.models.number_formats import NumberFormat

LOGIT_STDS = (1.0, 2.0, 3.0, 4.0)
LAYERS = (4, 8, 16, 32)
LEARNING_RATES = (1e-5, 1e-6)
FORMATS: tuple[tuple[NumberFormat, NumberFormat], ...] = (
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("bfloat16", "bfloat16"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One learner and the number format of its engines."""

    precision: NumberFormat
    engine: NumberFormat
    num_layers: int
    logit_std: float
    lr: float
    is_released: bool = False
    """Its weights have 16 bits: most of them round back to where they were after a small step."""

    @property
    def is_small_step(self) -> bool:
        """Whether the step changes less than rounding does."""
        return (self.is_released or self.lr < LEARNING_RATES[0]) and self.engine != "float32"


def cases(*, quick: bool) -> Iterator[Case]:
    """All of them, or two."""
    if quick:
        yield Case("float32", "bfloat16", num_layers=4, logit_std=4.0, lr=1e-5)
        yield Case("bfloat16", "bfloat16", num_layers=4, logit_std=1.0, lr=1e-6)
        return
    for (precision, engine), layers, std, lr in product(FORMATS, LAYERS, LOGIT_STDS, LEARNING_RATES):
        yield Case(precision, engine, layers, std, lr)
    for std in LOGIT_STDS:
        yield Case("bfloat16", "bfloat16", 8, std, LEARNING_RATES[0], is_released=True)
