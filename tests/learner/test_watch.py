"""What a learner says of its batch and its engine: how stale the groups are, and when engine and learner disagree."""

import math
from types import SimpleNamespace

import msgspec
import pytest
from structlog.testing import capture_logs

from mrl.learner.batches import batch_values
from mrl.learner.ranks.learner_turn import LearnerTurn
from mrl.learner.references import CanaryReferences
from mrl.learner.training_loop import Learner, Milestones
from mrl.models.row_attention import use_row_attention
from mrl.records.episodes import EpisodeSegment
from mrl.records.finish import FinishReason
from mrl.records.rollouts import ScoredGroup
from mrl.records.version import Version
from mrl.weights.publish import Publisher
from tests.support.answers import made_answer


def group(*steps: int) -> ScoredGroup:
    """One answer with a token of each of these versions."""
    return ScoredGroup(ticket="t", prompt_id="p", task="t", prompt_token_ids=b"", answers=[made_answer(*steps)])


def test_staleness_is_told_as_a_distribution():
    """A group is as stale as its oldest token, whatever came after an update."""
    values = batch_values([group(5), group(3, 5), group(3), group(4)], step=5)

    shares = {name: value for name, value in values.items() if name.startswith("staleness/share/")}
    assert shares == {"staleness/share/0": 0.25, "staleness/share/1": 0.25, "staleness/share/2": 0.5}
    assert (values["staleness/mean_versions"], values["staleness/max_versions"]) == (1.25, 2.0)


@pytest.mark.parametrize(("ending", "share"), [("done", 0.0), ("max_turns", 0.0), ("cut", 0.5), ("max_tokens", 0.5)])
def test_episodes_that_a_limit_of_tokens_ended_are_told_as_truncated(ending, share):
    """One that took all its turns is not: a larger limit would not help it."""
    reason = FinishReason.STOP if ending == "done" else FinishReason.LENGTH
    turn = EpisodeSegment(num_tokens=1, is_sampled=True, messages=())
    played = msgspec.structs.replace(made_answer(0), segments=[turn], ending=ending, finish_reason=reason)
    groups = [group(0), msgspec.structs.replace(group(0), answers=[played])]
    assert batch_values(groups, step=0)["tokens/truncated_share"] == share


@pytest.fixture
def learner(tiny_model, tmp_path) -> Learner:
    """One whose alarm rings above 0.2 nats."""
    model = tiny_model()
    use_row_attention(model)
    milestones = Milestones(1, 0, mismatch_alarm_nats=0.2)
    trainer = SimpleNamespace(model=model, precision="float32", kernel="chunked", context=None)
    canary = CanaryReferences(trainer, [[3, 5, 9, 2, 7]])
    publisher = Publisher(tmp_path / "weights", "qwen")
    turn = LearnerTurn(None, None)
    return Learner(
        trainer, milestones, Version(0, 0), None, None, seed=1, canary=canary, publisher=publisher, turn=turn
    )


@pytest.mark.parametrize(("k3_nats", "alarms"), [(0.0, 0), (0.2, 0), (0.21, 1), (math.nan, 1)])
def test_engine_and_learner_that_disagree_ring_the_alarm(learner, k3_nats, alarms):
    """Above the bound, and where it is no number at all."""
    with capture_logs() as logs:
        learner._watch_mismatch({"mismatch/k3_nats": k3_nats, "mismatch/max_ratio": 9.0})

    assert [entry["event"] for entry in logs] == ["learner and engine log-probabilities differ"] * alarms
    assert learner._alarms == alarms
