"""How long an inference server may take for what it does."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long a server may take, in seconds."""

    start_s: float = 300.0
    """From its start until it takes requests."""
    silence_s: float = 20.0
    """Without an answer to the watchdog."""
    stall_s: float = 120.0
    """With answers in flight and not one more token."""
    load_s: float = 600.0
    """For new weights, while which it may be deaf."""


USUAL = Bounds()


def load_bound_s(model_folder: Path) -> float:
    """A generous time for new weights of this model: a minute, and 20 s for each GB of its files."""
    return 60.0 + 20e-9 * sum(file.stat().st_size for file in model_folder.glob("*.safetensors"))
