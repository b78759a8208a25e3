import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mrl.records.version import Version
from mrl.sharing.rescues import Failure, PendingRescues

PROMPTS = st.sampled_from("abcdef")


def failure(prompt_id: str, step: int, run_epoch: int = 0) -> Failure:
    return Failure(prompt_id, (1, 2), Version(run_epoch, step))


def test_the_least_recently_failed_makes_room():
    """On overflow the oldest entry expires; failing again makes an entry young."""
    pending = PendingRescues(max_pending=2, gate_age_versions=9)
    for prompt_id, step in [("a", 0), ("b", 1), ("a", 2), ("c", 3)]:
        pending.failed(failure(prompt_id, step))
    assert pending.prompt_ids == ["a", "c"]
    assert pending.take_forgotten() == ["b"]
    assert pending.take_counts()["sharing/expired_prompts"] == 1


def test_only_newer_or_equal_success_supersedes():
    """A success of an older version than the one that failed does not end the wait."""
    pending = PendingRescues(max_pending=9, gate_age_versions=3)
    pending.failed(failure("a", 5))
    pending.succeeded("a", Version(0, 4))
    assert "a" in pending
    pending.succeeded("a", Version(0, 5))
    assert "a" not in pending
    assert pending.take_counts()["regime/superseded_prompts"] == 1


def test_an_older_failure_does_not_make_an_entry_old():
    """Groups may arrive out of order; the newest failure counts."""
    pending = PendingRescues(max_pending=9, gate_age_versions=3)
    pending.failed(failure("a", 5))
    pending.failed(failure("a", 1))
    pending.expire(step=8)
    assert "a" in pending


def test_a_prompt_that_came_back_is_not_forgotten():
    """A prompt that left and failed again before the caller heard of it stays watched."""
    pending = PendingRescues(max_pending=9, gate_age_versions=3)
    pending.failed(failure("a", 5))
    pending.succeeded("a", Version(0, 5))
    pending.failed(failure("a", 6))
    assert pending.take_forgotten() == []


def test_hit_rates_divide_by_settled_prompts_only():
    """Hits and expiries settle a prompt; superseded and pending ones do not count."""
    pending = PendingRescues(max_pending=9, gate_age_versions=3)
    for prompt_id in "abcde":
        pending.failed(failure(prompt_id, 0))
    assert "sharing/hit_rate" not in pending.take_counts()
    pending.hit("a", "x")
    pending.hit("b", "x")
    pending.hit("c", "y")
    pending.succeeded("d", Version(0, 0))
    pending.expire(step=4)
    counts = pending.take_counts()
    assert counts["sharing/hit_rate"] == 3 / 4
    assert counts["sharing/hit_rate_from/x"] == 2 / 4
    assert counts["sharing/hit_rate_from/y"] == 1 / 4
    assert counts["sharing/asked_prompts"] == 0
    assert pending.take_counts()["sharing/hit_prompts"] == 0
    assert pending.take_counts()["sharing/hit_rate"] == 3 / 4


class PendingMachine(RuleBasedStateMachine):
    """Any sequence of events, with a checkpoint and a restore anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.pending = PendingRescues(max_pending=3, gate_age_versions=2)
        self.step = 0
        self.totals = {"asked": 0.0, "hit": 0.0, "expired": 0.0, "superseded": 0.0}
        self.watched: set[str] = set()

    @rule(prompt_id=PROMPTS, lag=st.integers(0, 2))
    def fail(self, prompt_id: str, lag: int) -> None:
        self.pending.failed(failure(prompt_id, max(0, self.step - lag)))
        self.watched.add(prompt_id)

    @rule(prompt_id=PROMPTS)
    def succeed(self, prompt_id: str) -> None:
        self.pending.succeeded(prompt_id, Version(0, self.step))

    @rule(prompt_id=PROMPTS)
    def hit(self, prompt_id: str) -> None:
        if prompt_id in self.pending:
            assert self.pending.hit(prompt_id, "peer").prompt_id == prompt_id

    @rule()
    def advance(self) -> None:
        self.step += 1
        self.pending.expire(step=self.step)
        self.watched -= set(self.pending.take_forgotten())
        counts = self.pending.take_counts()
        for name in ("asked", "hit", "expired"):
            self.totals[name] += counts[f"sharing/{name}_prompts"]
        self.totals["superseded"] += counts["regime/superseded_prompts"]
        left = self.totals["hit"] + self.totals["expired"] + self.totals["superseded"]
        assert self.totals["asked"] == left + len(self.pending)
        assert self.watched == set(self.pending.prompt_ids)

    @rule()
    def resume(self) -> None:
        state = json.loads(json.dumps(self.pending.state()))
        self.pending = PendingRescues(max_pending=3, gate_age_versions=2)
        self.pending.restore(state)
        assert self.pending.state() == state

    @invariant()
    def bounded(self) -> None:
        assert len(self.pending) <= 3


PendingMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
test_conservation_over_any_history = PendingMachine.TestCase
