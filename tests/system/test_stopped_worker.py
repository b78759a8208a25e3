"""A worker that is stopped for longer than its lease, while another policy gets its slots."""

import json
import os
import signal
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]
SHORT_LEASES = ["--evaluation.every=0", "--pool.held_out_prompts=8", "--allocation.ttl_s=4", "--run.max_minutes=3"]
LOST = "the lease ran out while this process was stopped"


def slots_in(log: Path) -> list[tuple[str, int]]:
    """(time, slots that the worker may have in use from then on)."""
    said = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}") and '"slots"' in line]
    return [(line["timestamp"], line["at_most"]) for line in said if line["event"] == "slots"]


def test_a_worker_that_lost_its_slots_ends_what_runs_before_it_gets_others(make_run):
    """By the workers' own words; and its policy trains on."""
    run = make_run(steps=100_000)
    run.start(*SHORT_LEASES)
    run.until(lambda: min(run.step("llama"), run.step("qwen")) >= 2, "two steps of both")
    [pid] = [process.pid for process in run.children() if process.cmdline()[0] == "mrl::worker/llama/0"]
    llama, qwen = (run.folder / "logs" / "latest" / f"worker-{name}-0.log" for name in ("llama", "qwen"))
    num_said = len(slots_in(llama))
    os.kill(pid, signal.SIGSTOP)
    run.until(lambda: slots_in(qwen)[-1][1] == 128, "all slots for qwen", timeout_s=30.0)
    os.kill(pid, signal.SIGCONT)
    run.until(lambda: LOST in llama.read_text(), "word of the loss")
    before = run.step("llama")
    run.until(lambda: run.step("llama") > before + 1, "steps with a new lease")

    (_, at_first), (again_at, again) = slots_in(llama)[num_said : num_said + 2]
    left = next((at, slots) for at, slots in reversed(slots_in(qwen)) if at < again_at)
    assert at_first == 0, "ended before it asked"
    assert 0 < again <= 128 - left[1], "given back before"
