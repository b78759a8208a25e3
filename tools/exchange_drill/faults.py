"""Drills with deaths, pauses and a full disk. Each takes a folder of its own and returns its outcome."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from exchange_drill.outcome import Outcome
from exchange_drill.process import Process
from exchange_drill.rig import MIB, PAUSE_S, Rig, opened

AFTER_RESTART_BOUND_S = 5.0
DIE_EVERY = 5
"""Batches per death: a consumer that has to die does so in one of this many."""


@dataclass(frozen=True)
class Settings:
    """Number, length and seed of the faults."""

    kills: int = 200
    deaths: int = 20
    """Number of deaths of consumers, and of producers."""
    stop_s: float = 30.0
    partition_s: float = 6.0
    attack_s: float = 15.0
    attacks: tuple[str, ...] = ()
    """Names of the attacks on the daemon's memory; empty: all."""
    rounds: int = 3
    """Number of rounds of the drills that take long."""
    seed: int = 0


Drill = Callable[[Path, Settings], Outcome]


def kill_daemon(folder: Path, settings: Settings, *, durability: str, kills: int) -> Outcome:
    """Kill the daemon at random points: under full load, as soon as it serves, and while it opens its file."""
    outcome = Outcome(f"kill -9 of the daemon, {durability}")
    rng = random.Random(f"{settings.seed} {durability}")
    limits = {"durability": durability}
    faults: list[tuple[float, float]] = []
    num_opening = 0
    with opened(Rig(folder, seed=settings.seed, daemon=limits)) as rig:
        rig.start()
        for _ in range(kills):
            rig.hold(rng.uniform(0.0, 0.6))
            killed_s = time.monotonic()
            rig.daemon.kill()
            outcome.tried += 1
            if rng.random() < 0.15:
                rig.daemon.start()
                rig.await_saying("drill: opening")
                time.sleep(rng.uniform(0.0, 0.03))
                rig.daemon.kill()
                outcome.tried += 1
                num_opening += 1
            faults.append((killed_s, rig.start_daemon()))
            if rng.random() < 0.85:
                rig.await_progress("a restart")
            if outcome.tried >= kills:
                break
        rig.await_progress("the last restart")
        rig.finish(outcome)
        outcome.recoveries_s = rig.recoveries_s(faults)
    outcome.recovery_bound_s = 3 * AFTER_RESTART_BOUND_S
    opening_s = f"opens its file within {median(rig.openings_s):.2f} s, at most {max(rig.openings_s):.2f} s"
    outcome.notes.append(f"{num_opening} while it opened its file; {opening_s}")
    return outcome


def kill_consumer(folder: Path, settings: Settings) -> Outcome:
    """Kill the consumer between receiving records and its checkpoint, and after the checkpoint."""
    outcome = Outcome("consumer killed around its checkpoint")
    for point in ("took", "checkpoint"):
        rig = Rig(folder / point, seed=settings.seed, consumer={"die_at": point, "die_every": DIE_EVERY})
        with opened(rig):
            rig.start()
            while rig.client_deaths < -(-settings.deaths // 2):
                rig.hold(0.05)
            rig.spare_consumer()
            rig.finish(outcome)
            outcome.tried += rig.client_deaths
    return outcome


def kill_producer(folder: Path, settings: Settings) -> Outcome:
    """Kill a producer with records unacknowledged; its successor publishes again what may not be stored.

    In a third of the deaths the daemon dies with it, so that the successor meets one that has just opened its file; in
    another third the consumer, whose successor asks for the records that its checkpoint awaits.
    """
    outcome = Outcome("producer killed, its successor resends")
    rng = random.Random(settings.seed)
    num_others = {"daemon": 0, "consumer": 0}
    with opened(Rig(folder, seed=settings.seed)) as rig:
        rig.start()
        for _ in range(settings.deaths):
            rig.hold(rng.uniform(0.0, 0.4))
            rng.choice(rig.producers).kill()
            outcome.tried += 1
            if rng.random() < 1 / 3:
                rig.daemon.kill()
                rig.start_daemon()
                num_others["daemon"] += 1
            elif rng.random() < 1 / 2:
                rig.consumer.kill()
                num_others["consumer"] += 1
            rig.await_progress("a producer's death")
        rig.finish(outcome)
    outcome.notes.append(", ".join(f"{number} times the {who} with it" for who, number in num_others.items()))
    return outcome


def stop(folder: Path, settings: Settings) -> Outcome:
    """Stop the daemon, then the consumer, then a producer for a long time with SIGSTOP."""
    outcome = Outcome(f"SIGSTOP for {settings.stop_s:g} s: daemon, consumer, producer")
    faults: list[tuple[float, float]] = []
    with opened(Rig(folder, seed=settings.seed)) as rig:
        rig.start()
        for stopped in (rig.daemon, rig.consumer, rig.producers[0]):
            _pause(rig, stopped, settings.stop_s)
            continued_s = time.monotonic()
            faults.append((continued_s, continued_s))
            outcome.tried += 1
            rig.await_progress("a pause")
        rig.finish(outcome)
        outcome.recoveries_s = rig.recoveries_s(faults)
    outcome.recovery_bound_s = AFTER_RESTART_BOUND_S
    return outcome


def _pause(rig: Rig, process: Process, pause_s: float) -> None:
    process.signal(signal.SIGSTOP)
    try:
        rig.hold(pause_s)
    finally:
        process.signal(signal.SIGCONT)


def full_disk(folder: Path, settings: Settings) -> Outcome:
    """Fill the small file system of the daemon's file, then free it; kill the daemon meanwhile every other time."""
    outcome = Outcome("disk full, then freed")
    if os.geteuid() != 0:
        outcome.failures.append("not tried: only root may mount a small file system")
        return outcome
    faults: list[tuple[float, float]] = []
    limits = {"budget_bytes": 16 * MIB}
    with (
        _small_disk(folder / "run" / "exchange", 80 * MIB) as disk,
        opened(Rig(folder / "run", daemon=limits, pause_s=4 * PAUSE_S)) as rig,
    ):
        rig.start()
        for number in range(settings.rounds):
            ballast = _fill(disk)
            rig.hold(2.0)
            if number % 2 == 0:
                rig.daemon.kill()
                rig.start_daemon()
                rig.hold(1.0)
            ballast.unlink()
            freed_s = time.monotonic()
            faults.append((freed_s, freed_s))
            outcome.tried += 1
            rig.await_progress("the disk has room")
        rig.finish(outcome)
        outcome.recoveries_s = rig.recoveries_s(faults)
    outcome.recovery_bound_s = AFTER_RESTART_BOUND_S
    return outcome


def _fill(disk: Path) -> Path:
    """Fill the disk with another file; return that file."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(64 * 1024))
        except OSError:
            return ballast


@contextmanager
def _small_disk(path: Path, size_bytes: int) -> Iterator[Path]:
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
