"""What strangers on the host find of a run, and what they can do to it."""

import contextlib
import socket
import stat
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


def test_a_run_of_one_host_opens_no_port_and_no_file_to_others(finished: tuple[Run, list[str]]) -> None:
    """While it trains none of its processes listens at one; nothing that it leaves can be read by others."""
    run, listened = finished
    assert listened == []
    open_to_others = [path for path in (run.folder, *run.folder.rglob("*")) if is_open(path)]
    assert open_to_others == []
    assert list(run.temporary.iterdir()) == [], "a folder stayed behind"


def test_a_crowd_at_every_port_does_not_end_a_run(make_run: Callable[..., Run], tmp_path: Path) -> None:
    """Eleven hundred connections to each, while no process of the run may have more than 1024 descriptors."""
    run = make_run(steps=12, more=EVERYWHERE)
    limited = 'ulimit -n 1024; exec "$@"'
    run.start(argv=("sh", "-c", limited, "sh", sys.executable, "-m", "mrl", "train", str(run.config)))
    run.until(lambda: min(run.step("qwen"), run.step("llama")) >= 1, "both train")
    names = ("telemetry", "exchange", "allocator", "learner-qwen", "learner-llama")
    ports = [port_of(read_endpoint(run.folder / "endpoints", name)) for name in names]
    assert all(ports)
    with contextlib.ExitStack() as closing:
        for port in ports:
            for _ in range(CROWD):
                raw = closing.enter_context(socket.socket())
                raw.setblocking(False)
                raw.connect_ex(("127.0.0.1", port))
        before = run.step("qwen")
        run.until(lambda: run.step("qwen") >= before + 3, "it trains on")
    assert run.finish() == 0
    assert run.metrics("supervisor")[-1]["values"]["process/restarts"] == 0


def is_open(path: Path) -> bool:
    return not path.is_symlink() and bool(stat.S_IMODE(path.stat().st_mode) & 0o077)
