"""A client of a run's exchange beside the policies, which publishes records and remembers the acknowledged ones.

Afterwards a daemon started over the same log has to have all of these.
"""

import subprocess
import sys
import threading
import time
from pathlib import Path

from exchange_drill.part import connect

from mrl.config.run_folder import RunFolder
from mrl.exchange.client import ExchangeClient
from mrl.records.experience import OutcomeRecord
from mrl.records.finish import FinishReason
from mrl.records.version import Version
from mrl.transport.endpoints import nearest_endpoint

RECORDS_AT_ONCE = 20
FLUSH_S = 0.5
PAUSE_S = 0.2
ASK_S = 5.0
ANSWER_S = 60.0
NEVER_OLD = Version(2**40, 2**40)
"""Version later than any of a run: records of a long run's first steps go stale and are evicted."""


class Witness:
    """Publishes outcome records with the key of `source`'s workers; nobody asks for their prompts."""

    def __init__(self, run_folder: Path, source: str) -> None:
        self._folder, self._source = run_folder, source
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._publish, daemon=True)
        self.num_acknowledged = 0
        """Number of acknowledged records; the records have the numbers from 0 to below it."""

    def start(self) -> None:
        """Begin to publish, in a thread, until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """Stop publishing, and wait for the thread."""
        self._stop.set()
        self._thread.join()

    def num_lost(self, reader: str) -> int:
        """Number of acknowledged records that a daemon started over the run's log does not return to `reader`."""
        argv = [sys.executable, "-m", "mrl", "exchange", "--run-folder", str(self._folder)]
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as daemon:
            client = connect(self._folder, f"learner/{reader}")
            try:
                return self.num_acknowledged - self._num_found(client)
            finally:
                client.close(0.0)
                daemon.terminate()

    def _publish(self) -> None:
        while nearest_endpoint(RunFolder(self._folder).endpoints, "exchange") is None:
            if self._stop.wait(PAUSE_S):
                return
        client = connect(self._folder, f"worker/{self._source}/witness")
        while not self._stop.is_set():
            numbers = range(self.num_acknowledged, self.num_acknowledged + RECORDS_AT_ONCE)
            client.publish([_record(self._source, number) for number in numbers])
            while not client.flush(FLUSH_S):
                if self._stop.is_set():
                    break
            else:
                self.num_acknowledged = numbers[-1] + 1
            self._stop.wait(PAUSE_S)
        client.close(0.0)

    def _num_found(self, client: ExchangeClient) -> int:
        wanted = [_name(number) for number in range(self.num_acknowledged)]
        found: set[str] = set()
        end_s = time.monotonic() + ANSWER_S
        while len(found) < len(wanted) and time.monotonic() < end_s:
            missing = [name for name in wanted if name not in found]
            client.fetch_now(missing, kinds=["outcome"], limit=1, max_age_versions=None, timeout_s=ASK_S)
            found |= {item.record.record_id for item in client.take()}
        return len(found)


def _name(number: int) -> str:
    return f"witness:{number}"


def _record(source: str, number: int) -> OutcomeRecord:
    name = _name(number)
    return OutcomeRecord(
        record_id=name,
        source=source,
        oldest=NEVER_OLD,
        newest=NEVER_OLD,
        fingerprint="witness",
        prompt_id=name,
        task="witness",
        created_unix_s=time.time(),
        completion=name.encode() * 20,
        finish_reason=FinishReason.STOP,
        verifier="witness",
        reward=1.0,
    )
