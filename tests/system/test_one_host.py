"""What strangers on the host can do to a run whose ports they reach."""

import contextlib
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.transport.endpoints import port_of, read_endpoint
from tests.system.conftest import Run

pytestmark = pytest.mark.system
CROWD = 1100
EVERYWHERE = """
[exchange]
host = "127.0.0.1"
"""


def test_a_crowd_at_every_port_does_not_end_a_run(make_run: Callable[..., Run], tmp_path: Path) -> None:
    """Eleven hundred connections to each, while no process of the run may have more than 1024 descriptors."""
    run = make_run(steps=30, more=EVERYWHERE)
    limited = 'ulimit -n 1024; exec "$@"'
    run.start(argv=("sh", "-c", limited, "sh", sys.executable, "-m", "mrl", "train", str(run.config)))
    run.until(lambda: least_step(run) >= 1, "both train")
    names = ("telemetry", "exchange", "allocator", "learner-qwen", "learner-llama")
    ports = [port_of(read_endpoint(run.folder / "endpoints", name)) for name in names]
    assert all(ports)
    with contextlib.ExitStack() as closing:
        for port in ports:
            for _ in range(CROWD):
                raw = closing.enter_context(socket.socket())
                raw.setblocking(False)
                raw.connect_ex(("127.0.0.1", port))
        before = least_step(run)
        run.until(lambda: least_step(run) >= before + 3, "both train on")
    assert run.finish() == 0
    assert run.metrics("supervisor")[-1]["values"]["process/restarts"] == 0


def least_step(run: Run) -> int:
    """Of the policy that is behind: the other one may be done long before."""
    return min(run.step("qwen"), run.step("llama"))
