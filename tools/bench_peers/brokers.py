"""Brokers of the benchmark, each in a folder of its own and on a free port, ended by its pid."""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from bench_peers.part import Settings
from bench_peers.process import Child, await_listener, end
from mrl import parent_death
from mrl.engines.server_process import free_port


class Broker(NamedTuple):
    """A broker that is running."""

    pid: int
    settings: Settings
    """Settings with which its clients are made."""


@contextmanager
def exchange(folder: Path, durability: str, *, is_near: bool = False) -> Iterator[Broker]:
    """Run mrl's exchange daemon with its file in the folder. Unless `is_near`, clients use TCP as from another host."""
    settings: Settings = {"run": str(folder), "durability": durability, "is_near": is_near}
    with closing(Child("broker", "exchange", settings)) as child:
        yield Broker(child.pid, child.answer())


@contextmanager
def redis(folder: Path, fsync: str) -> Iterator[Broker]:
    """Run a Redis that logs every write (AOF) with this `appendfsync`. It neither rewrites the log nor snapshots."""
    port = free_port("127.0.0.1")
    options = {
        "--bind": "127.0.0.1",
        "--port": str(port),
        "--dir": str(folder),
        "--save": "",
        "--appendonly": "yes",
        "--appendfsync": fsync,
        "--auto-aof-rewrite-percentage": "0",
        "--logfile": str(folder / "redis.log"),
    }
    with _server(("redis-server", *(word for option in options.items() for word in option)), port) as broker:
        yield broker


@contextmanager
def _server(argv: tuple[str, ...], port: int) -> Iterator[Broker]:
    process = subprocess.Popen(parent_death.command(os.getpid(), argv), stdout=subprocess.DEVNULL)
    try:
        await_listener(port, argv[0], process)
        yield Broker(process.pid, {"port": port})
    finally:
        end(process)


def missing(program: str, package: str, distribution: str) -> str:
    """Reason why a system cannot be measured on this machine, with its cure; "" when program and package are there."""
    if shutil.which(program) is None:
        return f"no {program} on PATH (apt-get install {program})"
    if importlib.util.find_spec(package) is None:
        return f"no Python package {distribution} (.venv/bin/pip install -c constraints.txt -e '.[bench]')"
    return ""


def redis_parses_slowly() -> str:
    """Reason why Redis' client would be slow here, which would flatter the others; "" when it has its parser in C."""
    from redis.utils import HIREDIS_AVAILABLE

    if HIREDIS_AVAILABLE:
        return ""
    return "Redis' client has no parser in C here: .venv/bin/pip install hiredis, or leave Redis out with --only"
