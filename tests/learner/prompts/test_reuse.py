"""Own groups that are trained on again: which, how often, how stale, and what a step says of them."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.config.policy_tables import LearnerTable
from mrl.config.schema import RunTable
from mrl.learner.asynchronous_batching import OwnGroups
from mrl.learner.batches import BatchMaker
from mrl.learner.ledger import SamplingLimits, WorkLedger
from mrl.learner.prompts.reuse import ReuseBuffer, reuse_of
from mrl.learner.verifier_limit import VerifierFailures
from mrl.records.codec import pack_array
from mrl.records.rollouts import ScoredGroup, WorkRequest
from mrl.records.version import Version
from mrl.sharing.regime import AbsorbResult
from tests.support.answers import made_answer


def group(ticket: str, step: int, reward: float = 1.0) -> ScoredGroup:
    """Two answers of one token, sampled by the version of `step`."""
    answers = [
        made_answer(step, reward=reward * place, token_ids=pack_array([place], "i4"), completion=b"\xff\x00x")
        for place in range(2)
    ]
    prompt_id = "p" + ticket.partition(".")[2]
    return ScoredGroup(ticket=ticket, prompt_id=prompt_id, task="t", prompt_token_ids=b"\1\0\0\0", answers=answers)


def tickets(groups: list[ScoredGroup]) -> list[str]:
    return [one.ticket for one in groups]


class SlowTwin:
    """All groups that ever came, and all draws: which may be drawn is counted anew in every step."""

    def __init__(self, groups_per_step: int, max_uses: int, max_staleness_versions: int) -> None:
        self.groups_per_step, self.max_uses, self.bound = groups_per_step, max_uses, max_staleness_versions
        self.came: list[ScoredGroup] = []
        self.drawn: list[str] = []

    def draw(self, step: int, rng: np.random.Generator) -> list[str]:
        able = []
        for one in self.came:
            sampled_at = min(span.version.step for answer in one.answers for span in answer.versions)
            if step - sampled_at <= self.bound and self.drawn.count(one.ticket) < self.max_uses:
                able.append(one.ticket)
        taken = []
        if able:
            taken = [able[place] for place in rng.permutation(len(able))[: self.groups_per_step]]
        self.drawn += taken
        return taken


STEPS = st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=12)
"""Of every step, how stale each group is that comes fresh in it."""


@given(STEPS, st.integers(1, 4), st.integers(1, 3), st.integers(0, 5))
def test_draws_keep_all_bounds(steps, groups_per_step, max_uses, bound):
    """Each group max_uses times at most, once a step, behind the step in which it was fresh, and none too stale."""
    buffer, rng = ReuseBuffer(groups_per_step, max_uses, bound), np.random.default_rng(3)
    came: dict[str, int] = {}
    uses: Counter[str] = Counter()
    for step, stale in enumerate(steps):
        able = [one for one in came if step - came[one] <= bound and uses[one] < max_uses]
        drawn = buffer.draw(step, rng)
        assert len(drawn) == len(set(tickets(drawn))) == min(groups_per_step, len(able))
        assert set(tickets(drawn)) <= set(able)
        assert tickets(drawn) == [one for one in came if one in tickets(drawn)], "in the order in which they came"
        uses.update(tickets(drawn))
        fresh = [group(f"{step}.{place}", max(0, step - versions)) for place, versions in enumerate(stale)]
        came |= {one.ticket: one.oldest.step for one in fresh}
        buffer.add(fresh)
    assert max(uses.values(), default=0) <= max_uses


@pytest.mark.parametrize(("max_uses", "bound"), [(1, 1), (1, 4), (2, 3), (3, 3)])
def test_draws_are_as_likely_as_those_of_the_slow_twin(max_uses, bound):
    """How often the group that came `age` steps ago is drawn in the seventh step, over 500 seeds of each."""
    counts: dict[str, Counter[int]] = {"buffer": Counter(), "twin": Counter()}
    for seed in range(500):
        for name, one in (("buffer", ReuseBuffer(2, max_uses, bound)), ("twin", SlowTwin(2, max_uses, bound))):
            rng = np.random.default_rng([seed, name == "twin"])
            for step in range(7):
                drawn = one.draw(step, rng)
                fresh = [group(f"{step}.{place}", step) for place in range(2)]
                one.add(fresh) if isinstance(one, ReuseBuffer) else one.came.extend(fresh)
            names = drawn if isinstance(one, SlowTwin) else tickets(drawn)
            counts[name].update(6 - int(ticket.partition(".")[0]) for ticket in names)
    for age in range(1, bound + 1):
        assert counts["buffer"][age] == pytest.approx(counts["twin"][age], abs=90), age  # 4 deviations of a difference
    assert counts["buffer"].total() == counts["twin"].total()


def test_every_group_that_may_be_drawn_is_equally_likely():
    """One of five, 5,000 times."""
    counts: Counter[str] = Counter()
    rng = np.random.default_rng(0)
    for _ in range(5000):
        buffer = ReuseBuffer(1, 1, 9)
        buffer.add([group(f"0.{place}", place) for place in range(5)])
        counts.update(tickets(buffer.draw(6, rng)))
    assert len(counts) == 5
    assert all(abs(count - 1000) < 130 for count in counts.values())


def test_what_cannot_be_drawn_any_more_is_forgotten():
    """Memory is bounded by the staleness bound, and by uses."""
    buffer, rng = ReuseBuffer(4, 1, 2), np.random.default_rng(0)
    buffer.add([group("0.0", 0), group("0.1", 1)])
    assert len(buffer) == 2
    assert tickets(buffer.draw(3, rng)) == ["0.1"]
    assert len(buffer) == 0


def test_a_restored_buffer_goes_on_as_the_saved_one():
    """Uses and bytes of every group are those of the checkpoint, which is JSON."""
    whole, rng = ReuseBuffer(2, 2, 5), np.random.default_rng(0)
    whole.add([group("0.0", 0), group("0.1", 1), group("0.2", 1)])
    whole.draw(2, rng)
    resumed = ReuseBuffer(2, 2, 5)
    resumed.restore(json.loads(json.dumps(whole.state())))
    others = np.random.default_rng()
    others.bit_generator.state = rng.bit_generator.state

    for step in (3, 4, 5):
        assert resumed.draw(step, others) == whole.draw(step, rng)
    assert resumed.state() == whole.state()


def test_fewer_uses_after_a_resume_hold_for_what_was_kept():
    """A group that had more of them before is not drawn once more."""
    whole, rng = ReuseBuffer(1, 2, 5), np.random.default_rng(0)
    whole.add([group("0.0", 0), group("0.1", 0)])
    (used,) = tickets(whole.draw(1, rng))
    fewer = ReuseBuffer(2, 1, 5)
    fewer.restore(whole.state())
    assert tickets(fewer.draw(2, rng)) == [{"0.0": "0.1", "0.1": "0.0"}[used]]


@given(st.integers(0, 2), st.integers(1, 3), st.lists(st.integers(0, 40), min_size=20, max_size=40), st.data())
def test_every_step_behind_the_first_ones_is_complete(ahead, max_uses, rooms, data):
    """However far sampling runs ahead, admission leaves each group the versions in which it may be used again."""
    fresh = data.draw(st.integers(1, 4))
    reused, bound = data.draw(st.integers(1, max_uses * fresh)), max_uses + ahead
    pace = SamplingLimits(fresh, 2, bound, total_steps=1000, reserved_versions=max_uses)
    books = WorkLedger(pace, lambda place: f"p{place}", Version(0, 0))
    buffer, rng = ReuseBuffer(reused, max_uses, bound), np.random.default_rng(1)
    step = 0
    for room in rooms:
        request = WorkRequest(worker="w", max_groups=room, holding=[], serving=Version(0, step))
        items = books.grant(request, 0.0)
        books.accept([group(item.ticket, step) for item in items], "w", 0.0)
        assert books.accepted <= (step + ahead + 1) * fresh
        taken = books.take_batch(step)
        if taken is not None:
            drawn = buffer.draw(step, rng)
            assert len(drawn) == reused or step < max_uses
            buffer.add(taken)
            step += 1
    assert books.counts["stale_groups"] == 0


def test_a_pace_without_reuse_is_what_it_was():
    """Nothing is left over of the bound, and every group is fresh."""
    table = LearnerTable()
    assert (table.reused_groups, table.fresh_groups, table.reserved_versions) == (0, table.prompts_per_step, 0)
    assert reuse_of(table, {"reuse": [["saved when groups were reused", 1]]}) is None
    assert SamplingLimits(4, 2, 1, 10).reserved_versions == 0


def test_an_adaptive_pace_begins_at_what_admission_lets_in():
    """Without the versions that are left for reuse."""
    books = WorkLedger(
        SamplingLimits(4, 2, 3, 100, adaptive=True, reserved_versions=2), lambda place: "p", Version(0, 0)
    )
    assert books.window is not None
    assert books.window.groups == books.capacity() == 8


@pytest.mark.parametrize(("share", "reused"), [(0.5, 4), (0.3, 2), (0.35, 3)])
def test_a_share_of_the_batch_is_reused(share, reused):
    """To the nearest group; a checkpoint of a run without reuse begins with nothing."""
    table = LearnerTable(prompts_per_step=8, reuse_share=share, max_reuses=3, max_staleness_versions=4)
    assert (table.reused_groups, table.fresh_groups, table.reserved_versions) == (reused, 8 - reused, 3)
    buffer = reuse_of(table, {})
    assert (buffer.groups_per_step, buffer.max_uses, buffer.max_staleness_versions) == (reused, 3, 4)


def a_maker(batches: list[list[ScoredGroup]], reuse: ReuseBuffer | None):
    """What forms steps of these fresh groups, and what its regime was given."""
    absorbed: list[list[ScoredGroup]] = []
    intake = SimpleNamespace(
        take_failures=VerifierFailures, take_counts=dict, window_groups=None, curriculum_values={}, offer=list
    )

    def absorb(groups, *, step, rng):
        absorbed.append(groups)
        return AbsorbResult([], {"policy_gradient": 1.0})

    batching = SimpleNamespace(gather=lambda step, stopping: OwnGroups(batches[step], {}))
    regime = SimpleNamespace(absorb=absorb, components=(SimpleNamespace(name="policy_gradient"),))
    return BatchMaker(intake, regime, None, batching, RunTable(name="r", steps=1), reuse=reuse), absorbed


def test_a_step_is_completed_by_earlier_groups_and_tells_of_the_fresh_ones():
    """The regime has all; rewards, tokens and samples are of the fresh ones, staleness is of both."""
    batches = [[group("0.0", 0), group("0.1", 0)], [group("0.2", 1, 3.0)]]
    maker, absorbed = a_maker(batches, ReuseBuffer(2, 1, 2))
    rng = np.random.default_rng(0)

    first, second = (maker.prepare(step, rng, lambda: False) for step in (0, 1))

    assert [tickets(groups) for groups in absorbed] == [["0.0", "0.1"], ["0.2", "0.0", "0.1"]]
    assert (first.values["groups/reused"], second.values["groups/reused"]) == (0, 2)
    assert (tickets(second.groups), second.tokens, second.values["reward/mean"]) == (["0.2"], 2, 1.5)
    assert second.values["staleness/mean_versions"] == pytest.approx(2 / 3)
    assert second.values["staleness/share/1"] == pytest.approx(2 / 3)
    assert [uses for _, uses in maker.state()["reuse"]] == [0], "what was fresh in the second step alone"


def test_without_reuse_a_step_says_and_saves_nothing_of_it():
    """And draws nothing: there is no generator here."""
    maker, absorbed = a_maker([[group("0.0", 0)], [group("0.1", 1)]], None)

    values = [maker.prepare(step, None, lambda: False).values for step in (0, 1)]

    assert [tickets(groups) for groups in absorbed] == [["0.0"], ["0.1"]]
    assert not any("groups/reused" in told for told in values)
    assert maker.state() == {}
