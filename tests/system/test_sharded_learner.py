"""A run whose learners share out their parameters, and that goes on with another number of ranks."""

import json

import pytest

pytestmark = pytest.mark.system
POLICIES = ("qwen", "llama")
SHARDED = [f"--policies.{policy}.learner.sharding=shard" for policy in POLICIES]


def test_a_run_in_shards_goes_on_with_another_number_of_ranks(make_run):
    """Engines serve what two ranks gather, canary included; one rank takes over what two have saved."""
    run = make_run(steps=4, processes=2)
    run.start(*SHARDED, "--policies.llama.learner.precision=bfloat16")
    assert run.finish() == 0, run.tail()
    assert [run.step(policy) for policy in POLICIES] == [4, 4]
    saved = run.folder / "checkpoints" / "qwen" / "step_4"
    assert [path.name for path in sorted(saved.glob("rank_*"))] == ["rank_00000.safetensors", "rank_00001.safetensors"]
    pieces = json.loads((saved / "manifest.json").read_text())["tensors"]["model/model.embed_tokens.weight"]
    assert sum(piece["held_shape"][0] for piece in pieces) == pieces[0]["shape"][0]

    alone = [f"--policies.{policy}.learner.processes=1" for policy in POLICIES]
    run.start(*alone, "--run.steps=6", "--resume")
    assert run.finish() == 0, run.tail()

    assert [run.step(policy) for policy in POLICIES] == [6, 6]
    for record in run.metrics("learner/"):
        assert record["values"]["optim/skipped"] == 0
        assert {"time/pack_s", "time/forward_s", "time/backward_s", "time/update_s", "time/form_s"} <= record[
            "values"
        ].keys()
    assert all(record["values"].get("weights/refused", 0) == 0 for record in run.metrics("worker/")), run.tail()
    assert not run.left_over()
