"""When a learner has its versions evaluated, what it tells of them, and how long it waits for the last."""

import json
from types import SimpleNamespace

import pytest

from mrl.learner.evaluations import EvaluationPlan, Evaluations
from mrl.learner.held_out_ledger import HeldOutLedger
from mrl.learner.worker_activity import WaitBounds
from mrl.metrics.telemetry import Telemetry
from mrl.records.rollouts import HeldOutAnswer, WorkRequest
from mrl.records.telemetry_messages import MetricsRecord, SampleRecord
from mrl.records.version import Version, VersionSpan
from mrl.tasks.pool import Prompt

PROMPTS = [Prompt(f"p{number}", "t", f"{number}?") for number in range(6)]


@pytest.mark.parametrize(
    ("every", "asked"),
    [(3, {0: 6, 3: 4, 6: 4, 8: 6}), (0, {0: 6, 8: 6})],
)
def test_which_steps_are_evaluated_on_how_many_prompts(every, asked):
    """The first and the last of eight on all, those in between on four."""
    plan = EvaluationPlan(PROMPTS, every, num_prompts=4, total_steps=8)
    assert {step: len(plan.prompts_at(step)) for step in range(9) if plan.prompts_at(step)} == asked
    assert len(EvaluationPlan(PROMPTS, 3, num_prompts=0, total_steps=8).prompts_at(3)) == 6


class Workers:
    """In place of the intake and the workers behind it: books without a socket, and a worker that answers."""

    def __init__(self, *, answers_at_once: int) -> None:
        self.books, self.answers_at_once = HeldOutLedger("a"), answers_at_once
        self.answered_s = float("-inf")
        self.asked: list[tuple[Version, int]] = []
        self.now_s, self.stopped = 0.0, False

    def evaluate(self, version, prompts):
        self.asked.append((version, len(prompts)))
        self.books.ask(version, prompts, self.now_s)

    def evaluated(self, timeout_s=0.0):
        if timeout_s:
            self.now_s += 1.0
            request = WorkRequest(
                worker="w", max_groups=0, holding=[], serving=Version(9, 9), max_held_out=self.answers_at_once
            )
            items = self.books.grant(request)
            found = [
                HeldOutAnswer(ticket=one.ticket, versions=[VersionSpan(1, one.version)], reward=1.0) for one in items
            ]
            self.answered_s = self.now_s if found else self.answered_s
            self.books.accept(found, self.now_s)
        return self.books.take_over()

    @property
    def is_evaluating(self):
        return self.books.is_open

    def given_up(self, bounds, began_s):
        return "" if self.now_s - max(began_s, self.answered_s) <= bounds.data_timeout_s else "no answer"

    def stop_evaluating(self):
        self.stopped = True
        self.books.give_up(self.now_s)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Evaluations of a learner of eight steps, asked about every third; a second goes by with every wait."""

    def make(answers_at_once: int = 2):
        workers, told = Workers(answers_at_once=answers_at_once), []
        clock = SimpleNamespace(monotonic=lambda: workers.now_s)
        monkeypatch.setattr("mrl.learner.evaluations.time", clock)
        telemetry = Telemetry("learner/a", "a", told.append)
        plan = EvaluationPlan(PROMPTS, 3, num_prompts=4, total_steps=8)
        made = Evaluations(workers, plan, tmp_path, telemetry, bounds=WaitBounds(10.0, 10.0, 10.0))  # type: ignore[arg-type]
        return SimpleNamespace(evaluations=made, workers=workers, told=told, telemetry=telemetry, folder=tmp_path)

    return make


def test_the_last_evaluation_is_awaited_and_told(site):
    """A file, metrics under the policy's name, and answers to read."""
    here = site()
    here.evaluations.ask_when_due(Version(1, 8))

    here.evaluations.await_last(lambda: False)

    result = json.loads((here.folder / "a-8.json").read_text())
    assert (result["accuracy"], result["missing"], result["version"]) == (1.0, 0, {"run_epoch": 1, "step": 8})
    (metrics,) = [record for record in here.told if isinstance(record, MetricsRecord)]
    assert (metrics.role, metrics.policy, metrics.step) == ("learner/a", "a", 8)
    assert metrics.values["eval/accuracy/t"] == metrics.values["eval/own_token_share"] == 1.0
    assert metrics.values["eval/time_s"] == 3.0
    samples = [record for record in here.told if isinstance(record, SampleRecord)]
    assert {(sample.kind, sample.policy, sample.step) for sample in samples} == {("evaluation", "a", 8)}


def test_a_step_that_is_not_due_or_has_its_result_is_not_asked_about(site):
    """A resumed learner asks again: its version is another one."""
    here = site()
    for version in (Version(0, 0), Version(0, 1), Version(0, 3)):
        here.evaluations.ask_when_due(version)
        here.evaluations.await_last(lambda: False)
    here.evaluations.ask_when_due(Version(0, 3))
    here.evaluations.ask_when_due(Version(1, 3))

    assert here.workers.asked == [(Version(0, 0), 6), (Version(0, 3), 4), (Version(1, 3), 4)]


def test_an_evaluation_whose_answers_stay_away_is_given_up(site, caplog):
    """Ten seconds behind the last answer, not behind the first; then with what came, or with nothing."""
    here = site(answers_at_once=1)
    here.evaluations.ask_when_due(Version(0, 8))
    turns = iter(range(10_000))

    def stopping() -> bool:
        here.workers.answers_at_once = int(next(turns) < 3)
        return False

    here.evaluations.await_last(stopping)

    assert here.workers.now_s == pytest.approx(14.0)
    assert json.loads((here.folder / "a-8.json").read_text())["missing"] == 3

    nobody = site(answers_at_once=0)
    (nobody.folder / "a-8.json").unlink()
    nobody.evaluations.ask_when_due(Version(0, 8))
    nobody.evaluations.await_last(lambda: False)
    assert not (nobody.folder / "a-8.json").exists()
    assert nobody.told == []


def test_a_learner_that_is_told_to_end_awaits_nothing_and_tells_no_half(site):
    """What came so far would pass for the result of the step."""
    here = site(answers_at_once=1)
    here.evaluations.ask_when_due(Version(0, 8))
    turns = iter([False, False, True])

    here.evaluations.await_last(lambda: next(turns, True))

    assert not here.workers.stopped
    assert list(here.folder.glob("*.json")) == []


def test_the_wait_says_for_whom_and_how_long(site):
    """In the heartbeat."""
    here, beats = site(), []
    here.evaluations.ask_when_due(Version(0, 8))

    here.evaluations.await_last(lambda: bool(beats.append(here.telemetry.beat())))

    assert (beats[0].doing, beats[0].awaiting, beats[0].whom, beats[0].bound_s) == (
        "evaluating", "evaluation", "worker/a", 10.0
    )  # fmt: skip


def test_a_disk_without_room_costs_the_result_alone(site, monkeypatch):
    """The learner goes on."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mrl.metrics.evaluation_results.replace_file", full)
    here = site()
    here.evaluations.ask_when_due(Version(0, 8))
    here.evaluations.await_last(lambda: False)
    assert any(isinstance(record, MetricsRecord) for record in here.told)
