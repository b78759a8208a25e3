"""Partition drill: the daemon runs in a network namespace of its own, whose packets are dropped for a while."""

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from exchange_drill.faults import AFTER_RESTART_BOUND_S, Settings
from exchange_drill.outcome import Outcome
from exchange_drill.rig import Rig, opened

TABLE = "table inet drill"
INPUT, OUTPUT = "chain in { type filter hook input priority 0; ", "chain out { type filter hook output priority 0; "
DROPS: Mapping[str, str] = {
    "all packets": f"{INPUT} drop; }}\n{OUTPUT} drop; }}",
    "packets to the daemon": f"{INPUT} drop; }}",
    "packets of the daemon": f"{OUTPUT} drop; }}",
    "every third packet": f"{INPUT} numgen random mod 3 == 0 drop; }}\n{OUTPUT} numgen random mod 3 == 0 drop; }}",
}


class Namespace:
    """A network namespace, joined to this one by a pair of virtual links. Needs root."""

    _numbers = itertools.count()  # the kernel frees the names of links some time after their namespace is deleted

    def __init__(self) -> None:
        tag = f"{os.getpid() % 1_000_000}n{next(self._numbers) % 1000}"
        self.name = f"drill{tag}"
        self.outer_link, self._inner_link = f"dro{tag}", f"dri{tag}"
        subnet = f"10.213.{os.getpid() % 254}"
        self.address = f"{subnet}.2"
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", self.outer_link, "type", "veth", "peer", "name", self._inner_link)
        run("ip", "link", "set", self._inner_link, "netns", self.name)
        run("ip", "addr", "add", f"{subnet}.1/30", "dev", self.outer_link)
        run("ip", "link", "set", self.outer_link, "up")
        self.inside("ip", "addr", "add", f"{self.address}/30", "dev", self._inner_link)
        self.inside("ip", "link", "set", self._inner_link, "up")
        self.inside("ip", "link", "set", "lo", "up")

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words before a command that has to run in the namespace."""
        return ("ip", "netns", "exec", self.name)

    def inside(self, *argv: str) -> None:
        """Run a command in the namespace."""
        run(*self.prefix, *argv)

    @contextmanager
    def dropping(self, rules: str) -> Iterator[None]:
        """Drop the packets that these nftables rules name, without an answer to their senders."""
        self.inside("nft", f"{TABLE} {{\n{rules}\n}}")
        try:
            yield
        finally:
            self.inside("nft", f"delete {TABLE}")

    @contextmanager
    def down(self) -> Iterator[None]:
        """Take the link down, so that it has no carrier."""
        run("ip", "link", "set", self.outer_link, "down")
        try:
            yield
        finally:
            run("ip", "link", "set", self.outer_link, "up")

    def close(self) -> None:
        """Delete the namespace and with it the links."""
        run("ip", "netns", "del", self.name)


def run(*argv: str) -> None:
    """Run a command. Raises RuntimeError with its standard error when it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


def partition(folder: Path, settings: Settings) -> Outcome:
    """Take the link down, then drop packets in both directions, in one, and every third, and mend it each time."""
    outcome = Outcome(f"partition for {settings.partition_s:g} s: link down, both ways, one way, every third packet")
    if os.geteuid() != 0 or not shutil.which("nft") or not shutil.which("ip"):
        outcome.failures.append("not tried: needs root, iproute2 and nftables")
        return outcome
    namespace = Namespace()
    try:
        cuts = [namespace.down, *(lambda rules=rules: namespace.dropping(rules) for rules in DROPS.values())]
        daemon = {"host": namespace.address}
        rig = Rig(folder, seed=settings.seed, daemon=daemon, prefix=namespace.prefix, over_tcp=True)
        with opened(rig):
            rig.start()
            outcome.recoveries_s = [_cut(rig, cut, settings.partition_s) for cut in cuts]
            outcome.tried = len(cuts)
            rig.finish(outcome)
    finally:
        namespace.close()
    outcome.recovery_bound_s = 2 * AFTER_RESTART_BOUND_S
    return outcome


def _cut(rig: Rig, cut: Callable[[], AbstractContextManager[None]], cut_s: float) -> float:
    """Cut the link for `cut_s`; return the seconds from the end of the cut until records flowed again."""
    with cut():
        rig.hold(cut_s)
    healed_s = time.monotonic()
    rig.await_progress("a partition")
    return rig.recoveries_s([(healed_s, healed_s)])[0]
