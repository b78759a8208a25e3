"""The meeting place of a run's episodes and their agents: names of the environment and of gateway files."""

import json
from dataclasses import dataclass
from pathlib import Path

MARK = "agent:"
SEAT_KEY, AGENT_KEY, ENDPOINT = "gateway-seats.key", "gateway.key", "gateway"
"""Files of the run: the keys of seats and of agents in `keys`, the address in `endpoints`."""


def gateway_of(run_folder: Path) -> tuple[str, str]:
    """Return the address of the run's gateway, and the key of seats and workers.

    Raises OSError, ValueError and KeyError until the gateway has published its address.
    """
    address = json.loads((run_folder / "endpoints" / f"{ENDPOINT}.json").read_text())["address"]
    return address.replace("tcp://", "http://"), (run_folder / "keys" / SEAT_KEY).read_text().strip()


@dataclass(frozen=True, slots=True)
class GatewayLocation:
    """The meeting place of one policy's episodes and their agents."""

    run_folder: Path
    policy: str

    def name(self, task: str) -> str:
        """Return the name of a task's environment, as `open_environment` reads it."""
        return MARK + json.dumps([str(self.run_folder.absolute()), self.policy, task])
