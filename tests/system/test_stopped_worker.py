"""A worker that is stopped for longer than its lease, while another policy gets its slots."""

import json
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.system
SHORT_LEASES = ["--allocation.ttl_s=4", "--run.max_minutes=10"]
SHORT_LEASES += ["--allocation.objective=static"]  # else a learner that is fast enough already would not get more
LOST = "lease expired while this process was not running"


class Slots(NamedTuple):
    """A worker's word: what it is leased from then on, and how many it may have in use at most."""

    at: str
    leased: int
    at_most: int


def said_in(log: Path) -> list[str | Slots]:
    """Its words on slots, and `LOST` wherever it says so, in their order."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{") and line.endswith("}")]
    return [
        LOST if line["event"] == LOST else Slots(line["timestamp"], line["leased"], line["at_most"])
        for line in lines
        if line["event"] in {LOST, "slots changed"}
    ]


def slots_in(log: Path) -> list[Slots]:
    return [said for said in said_in(log) if isinstance(said, Slots)]


def around_new_lease(log: Path) -> tuple[Slots, Slots]:
    """The words before and at the first lease that follows a loss."""
    said = said_in(log)
    slots_before = [word for word in said[: said.index(LOST)] if isinstance(word, Slots)]
    slots_after = [word for word in said[said.index(LOST) :] if isinstance(word, Slots)]
    words = [slots_before[-1], *slots_after]
    return next((before, word) for before, word in pairwise(words) if word.leased)


def test_a_worker_that_lost_its_slots_ends_what_runs_before_it_gets_others(make_run):
    """By the workers' own words; and its policy trains on."""
    run = make_run(steps=100_000)
    run.start(*SHORT_LEASES)
    run.until(lambda: min(run.step("llama"), run.step("qwen")) >= 2, "two steps of both")
    pid = run.titles()["worker/llama/0"]
    llama, qwen = (run.folder / "logs" / "latest" / f"worker-{name}-0.log" for name in ("llama", "qwen"))
    while LOST not in llama.read_text():  # a worker that waits for its learner, with nothing in flight, loses nothing
        run.until(lambda: slots_in(llama)[-1].leased and slots_in(qwen)[-1].leased < 128, "slots for both")
        num_told = len(said_in(llama))
        os.kill(pid, signal.SIGSTOP)
        run.until(lambda: slots_in(qwen)[-1].leased == 128, "all slots for qwen")
        os.kill(pid, signal.SIGCONT)
        run.until(lambda told=num_told: len(said_in(llama)) > told, "word of what it has now")
    before = run.step("llama")
    run.until(lambda: run.step("llama") > before + 1, "steps with a new lease")

    ended, again = around_new_lease(llama)
    left = next(word for word in reversed(slots_in(qwen)) if word.at < again.at)
    assert ended.at_most == 0, "ended before it asked"
    assert again.at_most <= 128 - left.at_most, "given back before"
