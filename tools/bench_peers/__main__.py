"""A process of the benchmark: `python -m bench_peers PART SYSTEM SETTINGS`, then one line of JSON per question.

The parent tells a producer and a consumer a phase: kind, name, number of records, and for the producer its pace in
records per second (0: as fast as it goes). Each answers when its records are made, starts at the next line, and then
answers with its measurements.
"""

import gc
import importlib
import json
import sys
import time
from typing import Any

import numpy as np

from bench_peers.loads import Checklist, make_records
from bench_peers.part import PART_RECORDS, Consumer, Producer, Settings, Stamp, stamp

PACE_S = 0.0005
"""Seconds that a paced producer sleeps when no record is due."""


def main() -> None:
    part, system, settings = sys.argv[1], importlib.import_module(f"bench_peers.{sys.argv[2]}"), json.loads(sys.argv[3])
    if part == "broker":
        serve(system, settings)
    elif part == "producer":
        produce(system.Producer(settings))
    else:
        consume(system.Consumer(settings))


def serve(system: Any, settings: Settings) -> None:
    """Run the broker until the parent ends this process."""
    serving = system.serve(settings)
    tell(next(serving))
    for _ in serving:
        pass


def produce(producer: Producer) -> None:
    """Run one producer's phases until the parent has no more."""
    for line in sys.stdin:
        phase = json.loads(line)
        items = producer.prepare(make_records(phase["kind"], phase["name"], phase["count"]))
        first = start()
        if phase["rate"]:
            pace(producer, items, phase["rate"], first.at_s)
        else:
            flood(producer, items, PART_RECORDS[phase["kind"]])
        producer.finish()
        used_s = stamp().cpu_s - first.cpu_s
        latencies_s = latencies(producer.acknowledgements(), len(items), phase["rate"], first.at_s)
        tell({"first_s": first.at_s, "cpu_s": used_s, "latencies_s": latencies_s})
    producer.close()


def consume(consumer: Consumer) -> None:
    """Run one consumer's phases until the parent has no more."""
    for line in sys.stdin:
        phase = json.loads(line)
        checklist = Checklist(phase["name"], phase["count"])
        first = start()
        last = consumer.take_all(checklist)
        checklist.check()
        tell({"last_s": last.at_s, "cpu_s": last.cpu_s - first.cpu_s})
    consumer.close()


def flood(producer: Producer, items: Any, part_records: int) -> None:
    """Send all items as fast as the producer takes them."""
    for begin in range(0, len(items), part_records):
        producer.send(items[begin : begin + part_records], is_paced=False)


def pace(producer: Producer, items: Any, rate: float, first_s: float) -> None:
    """Send every item when it is due, together with items that became due during the last call."""
    sent = 0
    while sent < len(items):
        due = min(len(items), int((time.monotonic() - first_s) * rate) + 1)
        if due > sent:
            producer.send(items[sent:due], is_paced=True)
            sent = due
        else:
            time.sleep(PACE_S)


def latencies(acknowledged: list[tuple[int, float]], count: int, rate: float, first_s: float) -> list[float]:
    """Return (p50, p99) seconds from due time to acknowledgement of a record; [] without pace or acknowledgements."""
    if not rate or not acknowledged:
        return []
    totals, times_s = np.array([total for total, _ in acknowledged]), np.array([at_s for _, at_s in acknowledged])
    # The k-th record is acknowledged with the first total above k; totals rise, since acknowledgements keep the order.
    came_s = times_s[np.searchsorted(totals, np.arange(count), side="right")]
    waited_s = came_s - first_s - np.arange(count) / rate
    return [float(value) for value in np.quantile(waited_s, (0.5, 0.99))]


def start() -> Stamp:
    """Tell the parent that the records are made, wait for its start, and return the moment at which it came.

    The records are frozen first, so that the garbage collector does not go through them while the clock runs.
    """
    gc.collect()
    gc.freeze()
    tell("ready")
    if not sys.stdin.readline():
        sys.exit(1)
    return stamp()


def tell(message: object) -> None:
    """Write one line of JSON to the parent."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
