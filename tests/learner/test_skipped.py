"""Updates that were left out: their rows are kept, and too many in a row end the run."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from mrl.alignment.next_units import NextUnits
from mrl.errors import RoleFailed
from mrl.learner.ranks.learner_turn import LearnerTurn
from mrl.learner.references import CanaryReferences
from mrl.learner.step_order import StepOrder
from mrl.learner.training_dumps import dump_batch
from mrl.learner.training_loop import MAX_SKIPPED_UPDATES, Learner, Milestones
from mrl.models.row_attention import use_row_attention
from mrl.records.version import Version
from mrl.weights.publish import Publisher


def order(rows) -> StepOrder:
    return StepOrder(rows, {"own": 4.0, "rescue": 2.0})


def test_the_rows_of_a_skipped_update_can_be_read(make_rows, tmp_path):
    """One JSON line a row; what is no number is null."""
    rows = make_rows(4)
    rows[0].advantages[0] = float("nan")
    units = NextUnits(np.array([[7, 0]], np.int32), np.array([[-0.5, np.nan]], np.float32))
    rows[2] = replace(rows[2], teacher_units=units)

    path = dump_batch(tmp_path, "qwen", 7, order(rows))

    read = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["prompt_id"] for line in read] == [row.prompt_id for row in rows]
    assert read[0]["advantages"][0] is None
    assert read[1]["answer_token_ids"] == rows[1].answer_token_ids.tolist()
    assert read[1]["behaviour_logprobs"] == pytest.approx(rows[1].behaviour_logprobs.tolist())
    assert (read[1]["teacher_unit_ids"], read[2]["teacher_unit_ids"]) == (None, [[7, 0]])
    assert read[2]["teacher_unit_logprobs"] == [[-0.5, None]]
    assert (read[3]["component"], read[3]["denominator"], read[3]["behaviour_logprobs"]) == ("rescue", 2.0, None)


def test_the_newest_few_are_kept_of_every_policy(make_rows, tmp_path):
    """By their step, not by their name."""
    for step in (8, 9, 10, 100):
        dump_batch(tmp_path, "qwen", step, order(make_rows(1)))
    dump_batch(tmp_path, "llama", 1, order(make_rows(1)))

    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["skipped-llama-step_1.jsonl", *(f"skipped-qwen-step_{step}.jsonl" for step in (10, 100, 9))]


@pytest.fixture
def learner(tiny_model, tmp_path) -> Learner:
    """A first rank that keeps what it skips."""
    model = tiny_model()
    use_row_attention(model)
    trainer = SimpleNamespace(model=model, precision="float32", kernel="chunked", context=None)
    canary = CanaryReferences(trainer, [[3, 5, 9, 2, 7]])
    first = SimpleNamespace(crash_folder=tmp_path, policy="qwen")
    publisher = Publisher(tmp_path / "weights", "qwen")
    return Learner(
        trainer,
        Milestones(1, 0),
        Version(0, 0),
        first,
        None,
        seed=1,
        canary=canary,
        publisher=publisher,
        turn=LearnerTurn(None, None),
    )


def test_a_run_of_skipped_updates_ends_with_its_reason(learner, make_rows, tmp_path):
    """One that is not skipped lets the count begin anew; the last message names the file."""
    skipped, taken = {"optim/skipped": 0.5}, {"optim/skipped": 0.0}
    for values in [skipped] * (MAX_SKIPPED_UPDATES - 1) + [taken] + [skipped] * (MAX_SKIPPED_UPDATES - 1):
        learner._check_skipped(values, order(make_rows(2)))

    with pytest.raises(RoleFailed, match=rf"not finite in 5 steps in a row; .*{tmp_path}/skipped-qwen-step_0.jsonl"):
        learner._check_skipped(skipped, order(make_rows(2)))
