"""A whole run feeds a tracker, which its own reader reads back."""

import pytest

pytestmark = pytest.mark.system
TRACKED = """
[[trackers]]
kind = "tensorboard"
samples = 2
samples_every = 1
"""


def test_tensorboard_has_what_a_run_measured(make_run):
    """Every value of every learner's step that is a finite number, at that step, and samples; nothing was lost."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = make_run(steps=2, name="tracked", more=TRACKED)
    run.start()
    assert run.finish() == 0, run.tail()

    events = EventAccumulator(
        str(run.folder / "trackers" / "tensorboard" / "tracked"), size_guidance={"scalars": 0, "tensors": 0}
    )
    events.Reload()
    found = {tag: {one.step: one.value for one in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    for policy in ("qwen", "llama"):
        records = run.metrics(f"learner/{policy}")
        assert [record["step"] for record in records] == [1, 2]
        for record in records:
            for name, value in record["values"].items():
                if value == value:
                    assert found[f"{policy}/{name}"][record["step"]] == pytest.approx(value, rel=1e-6), name
        shown = events.Tensors(f"{policy}/samples")
        assert [one.step for one in shown] == [1, 2]
        rows = shown[0].tensor_proto.string_val[0].decode().splitlines()
        assert len(rows) == 2 + 2
        assert rows[2].startswith(f"| {policy} | 1 | ")
    assert any(tag.startswith("qwen/worker_0/") for tag in found)
    assert any(tag.startswith("run/") for tag in found)
    last = [
        record["values"] for record in run.metrics("supervisor") if "tracker/points/tensorboard" in record["values"]
    ]
    assert last[-1]["tracker/lost_points/tensorboard"] == 0.0
    assert "tracker tensorboard: tensorboard --logdir" in run.tail()
