"""What `mrl check` predicts of a small run, against what its processes really needed."""

import check_memory_plan
import pytest

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_run_needs_what_was_predicted(tmp_path):
    """Learner and worker, within 15 %; passes and update are a good part of it."""
    rows = {row["name"]: row for row in check_memory_plan.compare(tmp_path, ["lora"])}
    assert rows.keys() == {"learner/lora", "worker/lora/0"}
    for row in rows.values():
        assert row["ok"], row
        assert 1 / 1.15 <= row["predicted_mib"] / row["value"] <= 1.15
    assert rows["learner/lora"]["value"] > 900
