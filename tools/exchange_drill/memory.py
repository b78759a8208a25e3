"""Drills on the daemon's memory: attacks by clients with a valid key, no consumer, and a message of endless frames."""

import time
from pathlib import Path

from exchange_drill.faults import AFTER_RESTART_BOUND_S, Settings
from exchange_drill.outcome import Outcome
from exchange_drill.process import Process, module_argv, wait_until
from exchange_drill.rig import MIB, Rig, opened

ALLOWED_BYTES = 150_000_000
"""Memory beside the budget that a load of mrl's clients may take."""
HARD_LIMIT_BYTES = 512 * MIB
"""Memory beside the budget that clients with a key may take at most, whatever they do: there the role ends."""
BUDGET_BYTES = 32 * MIB
LAST_RESORT_BYTES = 3072 * MIB
"""Hard limit of the daemon's data, so that a drill which fails does not take the machine with it."""
BOMB_LIMIT_BYTES = 512 * MIB
BOMB_S = 60.0
BOMBS = ("bomb_of_4_MB", "bomb_of_8_KB")
DAEMON = {"budget_bytes": BUDGET_BYTES, "data_bytes": LAST_RESORT_BYTES}
TITLES = {
    "flood": "rollouts as fast as they go",
    "large_records": "records of 8 MB",
    "prompt_ids": "a million prompt ids",
    "slow_readers": "readers that never read",
    "deaf_fetchers": "fetches, answers unread",
    "counts": "longest lists and names",
    "requests": "requests that nobody serves",
    "connections": "connections under new names",
}


def attack(folder: Path, settings: Settings, *, name: str) -> Outcome:
    """Attack the daemon by a hostile client with a valid key, beside the load; afterwards records flow as before."""
    outcome = Outcome(f"memory: {TITLES[name]}", tried=1)
    outcome.peak_bound_bytes = BUDGET_BYTES + HARD_LIMIT_BYTES
    with opened(Rig(folder, seed=settings.seed, daemon=DAEMON)) as rig:
        rig.start()
        hostile = Process(module_argv("hostile", name, str(folder)), folder / "hostile.log")
        try:
            hostile.start()
            _watch(rig, outcome, settings.attack_s)
            if hostile.exit_code is not None:
                raise RuntimeError(f"the hostile client ended: {hostile.last_words()}")
        finally:
            hostile.kill()
        ended_s = time.monotonic()
        rig.await_progress("the attack")
        _add_up(rig, outcome)
        outcome.recoveries_s = rig.recoveries_s([(ended_s, ended_s)])
    return outcome


def no_consumer(folder: Path, settings: Settings) -> Outcome:
    """Let producers publish at full speed without a consumer; then start the consumer."""
    outcome = Outcome("memory: no consumer", tried=1)
    outcome.peak_bound_bytes = BUDGET_BYTES + ALLOWED_BYTES
    rig = Rig(folder, seed=settings.seed, daemon=DAEMON, num_producers=4, pause_s=0.0)
    with opened(rig):
        rig.start(consumer=False)
        _watch(rig, outcome, settings.attack_s)
        rig.consumer.start()
        began_s = time.monotonic()
        rig.await_progress("the consumer came")
        _add_up(rig, outcome)
        outcome.recoveries_s = rig.recoveries_s([(began_s, began_s)])
    return outcome


def _watch(rig: Rig, outcome: Outcome, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        rig.hold(0.2)
        outcome.peak_bytes = max(outcome.peak_bytes, rig.daemon.status_bytes("VmHWM"))


def _add_up(rig: Rig, outcome: Outcome) -> None:
    def watch() -> None:
        outcome.peak_bytes = max(outcome.peak_bytes, rig.daemon.status_bytes("VmHWM"))

    rig.finish(outcome, watch=watch)


def bomb(folder: Path, settings: Settings) -> Outcome:
    """Send messages of very many frames, against a hard limit of the daemon's memory."""
    outcome = Outcome(f"bomb of many frames, hard limit {BOMB_LIMIT_BYTES / MIB:.0f} MiB")
    endings: list[str] = []
    faults: list[tuple[float, float]] = []
    rig = Rig(folder, seed=settings.seed, daemon={**DAEMON, "data_bytes": BOMB_LIMIT_BYTES})
    with opened(rig):
        rig.start()
        for number in range(settings.rounds):
            ended_s = _explode(rig, outcome, BOMBS[number % len(BOMBS)])
            outcome.tried += 1
            if rig.daemon.exit_code is not None:
                endings.append(f"ended with {rig.daemon.exit_code}: {rig.daemon.last_words()}")
                rig.start_daemon()
            faults.append((ended_s, time.monotonic()))
            rig.await_progress("a bomb")
        rig.finish(outcome)
        outcome.recoveries_s = rig.recoveries_s(faults)
    outcome.recovery_bound_s = AFTER_RESTART_BOUND_S
    outcome.notes.append(f"{outcome.tried - len(endings)} survived" + "".join(f", {ending}" for ending in endings))
    return outcome


def _explode(rig: Rig, outcome: Outcome, name: str) -> float:
    """Send the bomb until the daemon ends or has survived it; return that time."""

    def is_over() -> bool:
        outcome.peak_bytes = max(outcome.peak_bytes, rig.daemon.status_bytes("VmHWM"))
        return rig.daemon.exit_code is not None or hostile.exit_code is not None

    hostile = Process(module_argv("hostile", name, str(rig.run)), rig.run / "hostile.log")
    hostile.start()
    try:
        wait_until(is_over, "the end of a bomb", BOMB_S)
        return time.monotonic()
    finally:
        hostile.kill()
