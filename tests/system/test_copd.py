"""Two live policies distil into each other: rewards in one step, each other's scores in the next."""

import json

import pytest

STEPS = 4
COPD = """
[sharing]
regime = "copd"
[sharing.copd]
rl_steps = 1
distil_steps = 1
top_units = 4
teaches = { llama = ["letter_counting"], qwen = ["trim"] }
"""


@pytest.mark.system
def test_both_policies_distil_on_the_other_s_task_in_every_second_step(make_run):
    """Every answer to a prompt of the peer's task is scored in its step, under its weights; the others are not sent."""
    run = make_run(steps=STEPS, more=COPD)
    run.start("--run.sync=true")

    assert run.finish() == 0, run.tail()
    config = json.loads((run.folder / "config.json").read_text())
    for policy, peer in (("qwen", "llama"), ("llama", "qwen")):
        group_size = config["policies"][policy]["rollout"]["group_size"]
        steps = {record["step"]: record["values"] for record in run.metrics(f"learner/{policy}")}
        assert sorted(steps) == [1, 2, 3, 4]
        assert [steps[step]["sharing/asked_rows"] > 0 for step in sorted(steps)] == [False, True, False, True]
        for step in (2, 4):
            values = steps[step]
            assert values["sharing/absent_rows"] == 0
            assert values["sharing/scored_rows"] + values["sharing/unscored_rows"] == values["sharing/asked_rows"]
            assert 0 < values[f"sharing/agreement/{peer}"] <= 1
            assert 0.5 < values["sharing/unit_tokens"] <= 1, "the two tokenizers cut most letters alike"
            assert 0.1 < values["sharing/unit_mass"] <= 1.001
            assert values[f"align/rows/{peer}"] == values["sharing/asked_rows"]
            assert values["sharing/asked_rows"] < 8 * group_size, "prompts of the own task are not sent"
    assert not run.left_over()
