"""A whole run whose verifiers, the user's own, take their time or hang: sampling goes on, and nothing is lost."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from mrl.metrics.timeline import FiledSpan, read_timeline

pytestmark = pytest.mark.system
POLICIES = ("qwen", "llama")
STEPS, PROMPTS_PER_STEP, GROUP_SIZE = 6, 8, 8
VERIFIERS = """
import time
import zlib

def slow(reference, answer):
    time.sleep(0.2)
    return float(answer == reference)

def hanging(reference, answer):
    fate = zlib.crc32(answer.encode()) % 16
    while fate == 0:
        pass
    if fate == 8:
        time.sleep(1000)
    return float(answer == reference)
"""


def seconds_sampling(spans: Sequence[FiledSpan], *, while_verifying: bool = False) -> float:
    """How long the engine sampled, in all or while any answer was at a verifier."""
    sampling = [span for span in spans if span.kind == "sampling"]
    if not while_verifying:
        return sum(span.duration_s for span in sampling)
    verifying = [span for span in spans if span.is_beside and span.kind == "verifying"]
    return sum(
        max(0.0, min(one.ended_unix_s, other.ended_unix_s) - max(one.began_unix_s, other.began_unix_s))
        for one in sampling
        for other in verifying
    )


def assert_every_group_was_trained_once(run, policy: str) -> None:
    """Every prompt that was granted is trained, dropped as stale, or open in the last checkpoint.

    The slower the machine, the more often a grant or a group is sent twice; neither counts twice.
    """
    records = [record["values"] for record in run.metrics(f"learner/{policy}")]
    counts = Counter()
    for values in records:
        counts.update({name: values[name] for name in ("groups/unsound", "staleness/dropped_groups")})
    assert len(records) == STEPS
    assert counts["groups/unsound"] == 0
    ledger = json.loads((run.folder / "checkpoints" / policy / f"step_{STEPS}" / "state.json").read_text())["ledger"]
    settled = STEPS * PROMPTS_PER_STEP + counts["staleness/dropped_groups"]
    assert ledger["cursor"] == settled + len(ledger["open"])


def test_slow_and_hanging_verifiers_cost_only_answers_that_hang(make_run, tmp_path, monkeypatch):
    """One task's takes 200 ms: groups pile up there, and the engine samples meanwhile. The other's hangs at times, in
    Python or asleep: those answers end at their limit and are counted, and every group comes through once."""
    (tmp_path / "users_own.py").write_text(VERIFIERS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]))
    run = make_run(steps=STEPS)
    run.start(
        "--tasks.trim.verifier=users_own:slow",
        "--tasks.trim.verifier_processes=12",
        "--tasks.letter_counting.verifier=users_own:hanging",
        "--tasks.letter_counting.verifier_processes=12",
        "--tasks.letter_counting.verifier_timeout_s=0.1",
    )
    run.until(lambda: run.children() and all(run.step(policy) >= 2 for policy in POLICIES), "two steps")
    run.children()

    assert run.finish() == 0, run.tail()
    for policy in POLICIES:
        spans = [span for span in read_timeline(run.folder / "timeline.jsonl") if span.role == f"worker/{policy}/0"]
        assert seconds_sampling(spans, while_verifying=True) > 0.25 * seconds_sampling(spans)
        reports = [record["values"] for record in run.metrics(f"worker/{policy}")]
        assert max(report["verify/pending"] for report in reports) > GROUP_SIZE
        totals = reports[-1]
        failures = {name: count for name, count in totals.items() if name.startswith("verify/failures/")}
        assert failures.keys() == {"verify/failures/timeout"}
        assert failures["verify/failures/timeout"] > 0
        assert totals["verify/answers"] >= totals["rollout/groups"] * GROUP_SIZE - sum(failures.values())
        assert_every_group_was_trained_once(run, policy)
    assert not run.left_over()
