"""A frozen policy has no learner: its worker scores what the others wrote, and it is evaluated once."""

import pytest

STEPS = 4
RLAD = """
[sharing]
regime = "rlad"
[sharing.rlad]
teacher = "llama"
peer_wait_s = 60
"""


@pytest.mark.system
def test_a_frozen_teacher_scores_every_answer_of_a_synchronous_run(make_run):
    """Every own answer that was asked about has the teacher's log-probs in its step; nobody learns llama."""
    run = make_run(steps=STEPS, more=RLAD)
    run.start("--policies.llama.frozen=true", "--run.sync=true")

    assert run.finish() == 0, run.tail()
    values = [record["values"] for record in run.metrics("learner/qwen")]
    asked = [one["sharing/asked_rows"] for one in values]
    assert len(asked) == STEPS
    assert sum(asked) > 0
    assert [one["sharing/scored_rows"] for one in values] == asked
    scored = [record["values"].get("scoring/requests", 0) for record in run.metrics("worker/llama/0")]
    assert max(scored) > 0
    assert run.metrics("learner/llama") == []
    assert {record["policy"] for record in run.metrics("allocator")} == {"qwen"}
    result = run.result("llama", 0)
    assert result["version"] == {"run_epoch": 0, "step": 0}
    assert (result["missing"], result["own_token_share"]) == (0, 1.0)
    assert not run.left_over()


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_teacher_on_a_server_is_believed_only_with_the_weights_of_its_folder(make_run, engine):
    """It scores a run; with random weights instead of the folder's it ends another one, in a line that says why."""
    run = make_run(steps=2, more=RLAD.replace("peer_wait_s = 60", "peer_wait_s = 300"))
    served = ["--run.sync=true", "--policies.llama.frozen=true", "--policies.llama.make.num_heads=2"]
    served += [f"--policies.llama.rollout.engine={engine}", "--policies.llama.make.hidden_size=64"]

    run.start(*served)
    assert run.finish(400) == 0, run.tail()
    scored = [record["values"].get("scoring/requests", 0) for record in run.metrics("worker/llama/0")]
    assert max(scored) > 0
    assert "weights verified" in (run.folder / "logs" / "latest" / "worker-llama-0.log").read_text()
    run.start(*served, "--clean", '--policies.llama.rollout.server.options=["--load-format", "dummy"]')
    assert run.finish(400) == 2, run.tail()
    assert "policies.llama: the server does not serve the weights of the policy's model folder; got" in run.tail()
    assert "the engine's weights differ from version" in run.tail()
    assert not run.left_over()
