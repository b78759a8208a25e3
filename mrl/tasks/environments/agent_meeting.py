"""Where the episodes of a run meet the agents that play them: names of the environment and of the gateway's files."""

import json
from dataclasses import dataclass
from pathlib import Path

MARK = "agent:"
SEAT_KEY, AGENT_KEY, ENDPOINT = "gateway-seats.key", "gateway.key", "gateway"
"""Files of the run: the key of seats and that of agents in `keys`, the address in `endpoints`."""


def gateway_of(run_folder: Path) -> tuple[str, str]:
    """Address of the run's gateway, and the key of seats and workers.

    Raises OSError, ValueError and KeyError while it has not said where it listens.
    """
    address = json.loads((run_folder / "endpoints" / f"{ENDPOINT}.json").read_text())["address"]
    return address.replace("tcp://", "http://"), (run_folder / "keys" / SEAT_KEY).read_text().strip()


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """Where the episodes of one policy of a run meet their agents."""

    run_folder: Path
    policy: str

    def name(self, task: str) -> str:
        """The environment of a task, as `open_door` reads it."""
        return MARK + json.dumps([str(self.run_folder.absolute()), self.policy, task])
