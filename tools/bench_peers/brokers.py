"""Starts the broker of each system in a folder of its own, on a free port, and ends it by its pid."""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from bench_peers.part import Settings
from bench_peers.process import Child, await_listener, end, free_port
from mrl import parent_death


class Broker(NamedTuple):
    """A broker that listens."""

    pid: int
    settings: Settings
    """For its clients."""


@contextmanager
def exchange(folder: Path, durability: str, *, is_near: bool = False) -> Iterator[Broker]:
    """The daemon of mrl with its file in the folder; unless `is_near`, its clients behave as on another host."""
    settings: Settings = {"run": str(folder), "durability": durability, "is_near": is_near}
    with closing(Child("broker", "exchange", settings)) as child:
        yield Broker(child.pid, child.answer())


@contextmanager
def redis(folder: Path, fsync: str) -> Iterator[Broker]:
    """A Redis that logs every write (AOF), with `appendfsync` as given; it neither rewrites the log nor snapshots."""
    port = free_port()
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
    """What a peer lacks on this machine, and how to get it; "" when all is there."""
    if shutil.which(program) is None:
        return f"no {program} on PATH (apt-get install {program})"
    if importlib.util.find_spec(package) is None:
        return f"no Python package {distribution} (.venv/bin/pip install -c constraints.txt -e '.[bench]')"
    return ""


def redis_parses_slowly() -> str:
    """Why Redis' client would read answers in Python here, which flatters everybody else; "" when it does not."""
    from redis.utils import HIREDIS_AVAILABLE

    if HIREDIS_AVAILABLE:
        return ""
    return "Redis' client has no parser in C here: .venv/bin/pip install hiredis, or leave Redis out with --only"
