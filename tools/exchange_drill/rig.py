"""Rig of a drill: daemon, producers and consumer, restarted when they die, and the check that nothing is lost."""

import bisect
import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from exchange_drill.clients import stat_of
from exchange_drill.journals import entries
from exchange_drill.outcome import Outcome
from exchange_drill.part import connect
from exchange_drill.process import Process, module_argv, wait_until
from exchange_drill.workload import READER, SOURCE, record_id
from mrl.transport.grants import Grant
from mrl.transport.keys import create_keys

MIB = 1024 * 1024
READY = "drill: ready"
START_S = 60.0
DRAIN_S = 120.0
DRAIN_STILL_S = 8.0
"""Seconds without a checkpoint after which the consumer gets no more: records missing then were evicted or given up."""
DAEMON: dict[str, Any] = {"budget_bytes": 256 * MIB, "durability": "synced", "host": "127.0.0.1", "data_bytes": 0}
PAUSE_S = 0.08
"""Seconds that a producer rests after every chunk: records not trained on yet then have room for the longest fault."""


class Rig:
    """Run folder and processes of one drill."""

    def __init__(
        self,
        run: Path,
        *,
        seed: int = 0,
        daemon: Mapping[str, Any] | None = None,
        prefix: Sequence[str] = (),
        num_producers: int = 2,
        over_tcp: bool = False,
        pause_s: float = PAUSE_S,
        consumer: Mapping[str, Any] | None = None,
    ) -> None:
        """Make keys and commands. `prefix` precedes the daemon's command; `pause_s`: a producer's rest after chunks."""
        self.run = run
        grants = [Grant("worker", SOURCE), Grant("learner", READER), Grant("worker", READER), Grant("learner", SOURCE)]
        create_keys(run / "keys", grants)
        argv = (*prefix, *module_argv("serve", str(run), json.dumps({**DAEMON, **(daemon or {})})))
        self.daemon = Process(argv, run / "daemon.log")
        shared = {"seed": seed, "over_tcp": over_tcp, "pause_s": pause_s, "num_producers": num_producers}
        self.producers = [self._part("producer", shared | {"number": number}) for number in range(num_producers)]
        calm = shared | {"die_at": "", "die_every": 0}
        self._calm_consumer = self._part("consumer", calm)
        self.consumer = self._part("consumer", calm | dict(consumer or {}))
        self._over_tcp = over_tcp
        self.openings_s: list[float] = []
        """Seconds from opening the file to listening, for every start after which the daemon served."""
        self.client_deaths = 0
        """Number of producers and consumers that were killed and started again."""
        self.deaths: list[str] = []
        """Ends of the daemon that the drill did not cause, each with its last words."""

    def _part(self, kind: str, settings: dict[str, Any]) -> Process:
        name = f"{kind}-{settings['number']}" if "number" in settings else kind
        argv = module_argv("part", kind, str(self.run), json.dumps(settings))
        return Process(argv, self.run / f"{name}.log")

    @property
    def parts(self) -> list[Process]:
        """Producers and consumer."""
        return [*self.producers, self.consumer]

    def start(self, *, consumer: bool = True) -> None:
        """Start the processes, the daemon first, and wait for the first records."""
        self.start_daemon()
        for part in self.parts if consumer else self.producers:
            part.start()
        if self.producers:
            self.await_progress("the first records")

    def start_daemon(self) -> float:
        """Start the daemon and wait until it listens; return that time. Raises RuntimeError when it does not."""
        self.daemon.start()
        self.await_saying("drill: opening")
        opens_s = time.monotonic()
        self.await_saying("drill: serving")
        served_s = time.monotonic()
        self.openings_s.append(served_s - opens_s)
        return served_s

    def await_saying(self, words: str) -> None:
        """Wait until the daemon has printed these words. Raises RuntimeError when it ends or does not print them."""

        def has_said() -> bool:
            if self.daemon.exit_code is not None:
                raise RuntimeError(f"the daemon ended with {self.daemon.exit_code}: {self.daemon.last_words()}")
            return words in self.daemon.said()

        wait_until(has_said, f"the daemon says {words!r}", START_S)

    def revive(self) -> None:
        """Restart killed producers and consumers and an ended daemon, and count them.

        Raises RuntimeError when a producer or consumer ended with an error.
        """
        for part in self.parts:
            if part.exit_code not in (None, 0, -signal.SIGKILL):
                raise RuntimeError(f"a client ended with {part.exit_code}: {part.last_words()}")
        dead = [part for part in self.parts if part.exit_code == -signal.SIGKILL]
        for part in dead:
            part.start()
        if self.daemon.exit_code is not None:
            self.deaths.append(f"ended with {self.daemon.exit_code}: {self.daemon.last_words()}")
            self.start_daemon()
        self.client_deaths += len(dead)

    def journal_paths(self) -> list[Path]:
        """Journals of the producers, then of the consumer."""
        return [*(self.run / f"producer-{number}.jsonl" for number in range(len(self.producers))), self.trained_path]

    @property
    def trained_path(self) -> Path:
        """File with the consumer's checkpoints."""
        return self.run / "consumer.jsonl"

    def spare_consumer(self) -> None:
        """Let the consumer's next life not kill itself."""
        self.consumer.argv = self._calm_consumer.argv

    def await_progress(self, what: str, *, timeout_s: float = START_S) -> None:
        """Wait until some producer has new acknowledgements and the consumer, if there is one, a new checkpoint."""
        *produced, trained = self.journal_paths()
        watched = [produced, [trained]] if self.consumer.pid else [produced]
        before = [_size(paths) for paths in watched]

        def has_moved() -> bool:
            self.revive()
            return all(_size(paths) > size for paths, size in zip(watched, before, strict=True))

        wait_until(has_moved, f"progress after {what}", timeout_s)

    def hold(self, seconds: float) -> None:
        """Let the load go on for some seconds."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self.revive()
            time.sleep(min(0.05, left_s))

    def finish(self, outcome: Outcome, *, watch: Callable[[], None] = lambda: None) -> None:
        """Let the producers end and the consumer take all records, and add up the lost and doubled ones."""
        for producer in self.producers:
            wait_until(partial(_is_ready, producer), "a producer is ready", START_S)
            producer.signal(signal.SIGTERM)
        self._await_producers(watch)
        acknowledged = set(self.acknowledged_ids())
        self._drain(acknowledged, watch)
        wait_until(partial(_is_ready, self.consumer), "the consumer is ready", START_S)
        if (code := self.consumer.finish(DRAIN_S)) not in (0, -signal.SIGKILL):
            raise RuntimeError(f"the consumer ended with {code}: {self.consumer.last_words()}")
        outcome.deaths += len(self.deaths)
        outcome.failures += [f"the daemon {death}" for death in self.deaths]
        trained = Counter(self.trained_ids())
        gone = self._not_held(sorted(acknowledged - trained.keys()))
        policies = stat_of(self.run).policies
        evicted = sum(sum(policy_stat.evicted.values()) for policy_stat in policies if policy_stat.policy == SOURCE)
        add_up(outcome, acknowledged, trained, num_gone=len(gone), num_evicted=evicted)

    def _not_held(self, ids: list[str]) -> list[str]:
        """Return the records among `ids` that the daemon does not hand out any more."""
        client = connect(self.run, f"learner/{READER}/last", over_tcp=self._over_tcp)
        found: set[str] = set()
        try:
            if not client.fetch_now(ids, kinds=["outcome"], limit=1, max_age_versions=None, timeout_s=DRAIN_S):
                raise RuntimeError("the daemon does not say what it holds")
            found = {item.record.record_id for item in client.take()}
        finally:
            client.close(0.0)
        return [name for name in ids if name not in found]

    def _drain(self, acknowledged: set[str], watch: Callable[[], None]) -> None:
        size, moved_s = -1, time.monotonic()
        while not acknowledged.issubset(self.trained_ids()) and time.monotonic() - moved_s < DRAIN_STILL_S:
            watch()
            self.revive()
            if _size([self.trained_path]) != size:
                size, moved_s = _size([self.trained_path]), time.monotonic()
            time.sleep(0.3)

    def _await_producers(self, watch: Callable[[], None]) -> None:
        end_s = time.monotonic() + DRAIN_S
        while any(producer.exit_code is None for producer in self.producers):
            if time.monotonic() > end_s:
                raise RuntimeError(f"not everything is acknowledged within {DRAIN_S:g} s")
            watch()
            self.revive()
            time.sleep(0.05)
        self.revive()

    def acknowledged_ids(self) -> Iterator[str]:
        """Ids of all records that were acknowledged to a producer."""
        for number, path in enumerate(self.journal_paths()[:-1]):
            upto = max((entry["upto"] for entry in entries(path)), default=-1)
            yield from (record_id(number, place) for place in range(upto + 1))

    def trained_ids(self) -> Iterator[str]:
        """Ids in the consumer's checkpoints, repeated when trained on repeatedly."""
        for entry in entries(self.trained_path):
            yield from entry["ids"]

    def recoveries_s(self, faults: Iterable[tuple[float, float]]) -> list[float]:
        """Return the seconds from the begin of every fault until records flow end to end again.

        Each fault is (begin, time at which the daemon serves again). Records flow when, after that time, a chunk was
        acknowledged and a checkpoint was written.
        """
        *produced, trained = self.journal_paths()
        acknowledged_s = sorted(entry["at_s"] for path in produced for entry in entries(path))
        trained_s = [entry["at_s"] for entry in entries(trained)]
        found = []
        for begin_s, serves_s in faults:
            firsts = [_first_after(times_s, serves_s) for times_s in (acknowledged_s, trained_s)]
            after_s = [first_s for first_s in firsts if first_s is not None]
            found += [max(after_s) - begin_s] if len(after_s) == len(firsts) else []
        return found

    def close(self) -> None:
        """Kill all processes."""
        for process in (*self.parts, self.daemon):
            process.signal(signal.SIGCONT)
            process.kill()


def add_up(
    outcome: Outcome, acknowledged: Set[str], trained: Mapping[str, int], *, num_gone: int, num_evicted: int
) -> None:
    """Add up acknowledged records and how often each was trained on, into the outcome.

    `num_gone`: records acknowledged, never trained on, and held no longer; `num_evicted`: records that the daemon says
    it evicted.
    """
    outcome.acknowledged += len(acknowledged)
    outcome.evicted += min(num_gone, num_evicted)
    outcome.lost += max(0, num_gone - num_evicted)
    outcome.doubled += sum(count > 1 for count in trained.values())


@contextmanager
def opened(rig: Rig) -> Iterator[Rig]:
    """Use a rig, whose processes end in any case. Raises RuntimeError when one does not end in time."""
    try:
        yield rig
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"a process does not end: {error}") from error
    finally:
        rig.close()


def _first_after(times_s: Sequence[float], after_s: float) -> float | None:
    place = bisect.bisect_right(times_s, after_s)
    return times_s[place] if place < len(times_s) else None


def _is_ready(process: Process) -> bool:
    return READY in process.said()


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.exists())
