"""Time limits of an inference server."""

from dataclasses import dataclass
from pathlib import Path

from mrl.config.policy_tables import ServerTable
from mrl.models.tensor_header import files_of_weights


@dataclass(frozen=True, slots=True)
class ServerTimeouts:
    """Time limits of a server, in seconds."""

    start_s: float = 300.0
    """From the server's start until it takes requests."""
    silence_s: float = 20.0
    """Silence towards the watchdog."""
    stall_s: float = 120.0
    """Time without a new token while answers are in flight."""
    load_s: float = 600.0
    """For taking new weights, during which the server need not answer the watchdog."""


USUAL = ServerTimeouts()


def load_timeout_s(model_folder: Path) -> float:
    """Generous time for new weights of a model: a minute, and 20 s for each GB of its files."""
    return 60.0 + 20e-9 * sum(file.stat().st_size for file in files_of_weights(model_folder))


def timeouts_of(server: ServerTable, model_folder: Path) -> ServerTimeouts:
    """Time limits of a model's server, from its table; `load_s` by the size of the model where the table gives none."""
    return ServerTimeouts(
        start_s=server.start_s,
        silence_s=server.silence_s,
        stall_s=server.stall_s,
        load_s=server.load_s or load_timeout_s(model_folder),
    )
