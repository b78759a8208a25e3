"""How long an inference server may take for what it does."""

from dataclasses import dataclass
from pathlib import Path

from mrl.config.policy_tables import ServerTable
from mrl.models.tensor_header import files_of_weights


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
    return 60.0 + 20e-9 * sum(file.stat().st_size for file in files_of_weights(model_folder))


def bounds_of(server: ServerTable, model_folder: Path) -> Bounds:
    """What an engine of this model may take; the time for new weights by the size of the model unless it is given."""
    return Bounds(
        start_s=server.start_s,
        silence_s=server.silence_s,
        stall_s=server.stall_s,
        load_s=server.load_s or load_bound_s(model_folder),
    )
