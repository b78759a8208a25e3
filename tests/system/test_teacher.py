"""A frozen policy has no learner: its worker scores what the others wrote, and it is evaluated once."""

import json

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
STEPS = 4
RLAD = """
[sharing]
regime = "rlad"
[sharing.rlad]
teacher = "llama"
peer_wait_s = 60
"""


def test_a_frozen_teacher_scores_every_answer_of_a_synchronous_run(make_run):
    """Every own answer that was asked about has the teacher's log-probs in its step; nobody learns llama."""
    run = make_run(steps=STEPS, more=RLAD)
    run.start("--policies.llama.frozen=true", "--run.sync=true")

    assert run.finish(200) == 0, run.tail()
    values = [record["values"] for record in run.metrics("learner/qwen")]
    asked = [one["sharing/asked_rows"] for one in values]
    assert len(asked) == STEPS
    assert sum(asked) > 0
    assert [one["sharing/scored_rows"] for one in values] == asked
    assert run.metrics("worker/llama/0")[-1]["values"]["scoring/requests"] > 0
    assert run.metrics("learner/llama") == []
    assert {record["policy"] for record in run.metrics("allocator")} == {"qwen"}
    result = json.loads((run.folder / "evaluation" / "llama-0.json").read_text())
    assert result["version"] == {"run_epoch": 0, "step": 0}
    assert not run.left_over()
