"""What a learner writes of the answers of a step."""

import errno
from types import SimpleNamespace

import msgspec
import pytest
from structlog.testing import capture_logs

from mrl.learner.batches import PreparedStep
from mrl.learner.step_order import StepOrder
from mrl.learner.training_dumps import sample_writer
from mrl.metrics.rollout_files import RolloutFiles, read_rollouts, rollout_files
from mrl.metrics.telemetry import Telemetry
from mrl.records.episodes import EpisodeSegment, Message
from mrl.records.experience import SharedTurn
from mrl.sharing.regime import Rescue

PROMPTS = {name: SimpleNamespace(task="add", text=f"prompt {name}") for name in ("p0", "p1")}


@pytest.fixture
def told():
    """What goes to the supervisor."""
    return []


@pytest.fixture
def write(tmp_path, told):
    """The writer of policy qwen in an empty folder, for a bound in MiB."""
    pool = SimpleNamespace(prompt=PROMPTS.__getitem__)
    return lambda max_mib: sample_writer(
        pool, Telemetry("learner/qwen", "qwen", told.append), tmp_path, max_mib=max_mib
    )


@pytest.fixture
def prepared(make_group):
    """Two groups, and a rescue."""
    groups = [make_group("g.0", (1.0, 0.0), step=4), make_group("g.1", (0.0, 0.0, 0.0), step=5)]
    rescue = Rescue("p1", "llama", b"\xffright", 1.0)
    return PreparedStep(StepOrder([], {}), {}, groups, [rescue], tokens=0)


def test_every_answer_is_kept_with_its_prompt_and_who_wrote_it(write, prepared, tmp_path):
    """Own answers group by group, then rescues; text that is no UTF-8 is readable all the same."""
    write(1)(6, prepared)

    [path] = rollout_files(tmp_path, "qwen")
    *own, rescue = read_rollouts(path)
    assert [(row["prompt"], row["reward"], row["tokens"]) for row in own] == [
        ("prompt p0", 1.0, 2), ("prompt p0", 0.0, 3),
        ("prompt p1", 0.0, 2), ("prompt p1", 0.0, 3), ("prompt p1", 0.0, 4),
    ]  # fmt: skip
    assert {(row["policy"], row["source"], row["kind"], row["step"]) for row in own} == {("qwen", "qwen", "rollout", 6)}
    assert [(row["oldest_step"], row["newest_step"]) for row in own[1:3]] == [(4, 4), (5, 5)]
    assert own[0]["logprob_mean"] == -1.0
    assert own[0]["finish_reason"] == "stop"
    assert (rescue["kind"], rescue["source"], rescue["prompt"]) == ("rescue", "llama", "prompt p1")
    assert rescue["completion"] == "�right"
    assert rescue["tokens"] is None


def test_episodes_are_kept_with_their_turns_and_what_they_began_with(tmp_path, told, make_group):
    """Own ones and rescues, in the files and in what the supervisor is told."""
    said, given = Message("assistant", "four"), Message("user", "higher")
    segments = [
        EpisodeSegment(num_tokens=2, is_sampled=True, messages=(said,)),
        EpisodeSegment(num_tokens=3, is_sampled=False, messages=(given,)),
        EpisodeSegment(num_tokens=1, is_sampled=True, messages=(said,)),
    ]
    group = make_group("g.0", (1.0,), step=4)
    group = msgspec.structs.replace(group, answers=[msgspec.structs.replace(group.answers[0], segments=segments)])
    shared = tuple(SharedTurn(is_sampled=one.is_sampled, messages=one.messages) for one in segments)
    rescue = Rescue("p1", "llama", b"text", 1.0, prompt_token_ids=(7, 8), turns=shared)
    renderer = SimpleNamespace(read=lambda token_ids: f"ids {list(token_ids)}")
    telemetry = Telemetry("learner/qwen", "qwen", told.append)
    write = sample_writer(SimpleNamespace(prompt=PROMPTS.__getitem__), telemetry, tmp_path, 1, renderer)

    write(6, PreparedStep(StepOrder([], {}), {}, [group], [rescue], tokens=0))

    rows = list(read_rollouts(rollout_files(tmp_path, "qwen")[0]))
    assert [row["opening"] for row in rows] == ["ids [3, 4]", "ids [7, 8]"] == [record.opening for record in told]
    shapes = [[(turn["is_sampled"], turn.get("tokens")) for turn in row["turns"]] for row in rows]
    assert shapes == [[(True, 2), (False, 3), (True, 1)], [(True, None), (False, None), (True, None)]]
    assert [[one.is_sampled for one in record.turns] for record in told] == [[True, False, True]] * 2
    assert rows[0]["turns"][1]["messages"] == [{"role": "user", "content": "higher"}]


def test_samples_are_told_with_and_without_files(write, prepared, told, tmp_path):
    """A bound of 0 keeps no answers; the samples of the report are of another kind."""
    write(0)(6, prepared)

    assert [record.kind for record in told] == ["rollout", "rescue"]
    assert rollout_files(tmp_path) == []


def test_a_full_disk_costs_the_answers_alone(write, prepared, told, monkeypatch):
    """The step goes on, and the log says so."""

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RolloutFiles, "write", full)
    with capture_logs() as lines:
        write(1)(6, prepared)

    assert lines == [
        {"event": "answers of a step not written", "log_level": "warning", "step": 6, "why": "No space left on device"}
    ]
    assert len(told) == 2
