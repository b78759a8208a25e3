"""A policy skips what it always or never solves, where all policies may meet, and a resume goes on alike."""

import random
from typing import Any

import msgspec
import pytest

from mrl.config.rules.run_rules import check_rules
from mrl.errors import ConfigError
from mrl.learner.ledger import SamplingLimits, WorkLedger
from mrl.learner.prompts.curriculum import Curriculum, curriculum_of
from mrl.records.rollouts import ScoredGroup, WorkItem, WorkRequest
from mrl.records.version import Version
from tests.support.word_runs import word_run

POOL = 12
"""Prompts 0 to 2 are always solved, 3 to 5 never, and the others by half of the answers."""


def config(**pool: float) -> Any:
    return word_run({"a": {}}, run={"seed": 5}, pool=pool)


def curriculum(**pool: float) -> Curriculum:
    found = curriculum_of(config(**pool), POOL)
    assert found is not None
    return found


def of_prompt(group: ScoredGroup, prompt_id: str) -> ScoredGroup:
    return msgspec.structs.replace(group, prompt_id=prompt_id)


class Policy:
    """The books of a policy whose success on a prompt is known, in steps of four groups at no staleness."""

    def __init__(self, make_group: Any, seed: int = 0, *, state: Any = None, step: int = 0, **pool: float) -> None:
        self.make_group, self.random = make_group, random.Random(seed)
        pace = SamplingLimits(groups_per_step=4, group_size=2, max_staleness_versions=0, total_steps=50)
        self.books = WorkLedger(pace, lambda n: f"p{n % POOL}", Version(0, step), step=step)
        self.books.curriculum = curriculum_of(config(**pool), POOL)
        if state is not None:
            self.books.restore(msgspec.json.decode(msgspec.json.encode(state)), step)
        self.step = step

    def sampled(self) -> list[WorkItem]:
        """What the next step samples; groups come back in any order."""
        self.books.announced(Version(0, self.step))
        items = self.books.grant(WorkRequest(worker="w", max_groups=100, holding=[]), 0.0)
        groups = [self.group(item) for item in items]
        self.random.shuffle(groups)
        self.books.accept(groups, "w", 0.0)
        return items

    def group(self, item: WorkItem) -> Any:
        rewards = {0: (1.0, 1.0), 1: (0.0, 0.0)}.get((int(item.prompt_id[1:]) % POOL) // 3, (1.0, 0.0))
        return of_prompt(self.make_group(item.ticket, rewards, step=self.step), item.prompt_id)

    def train(self) -> list[int]:
        """One step; the positions that it sampled."""
        items = self.sampled()
        assert self.books.take_batch(self.step)
        self.step += 1
        return [item.position for item in items]

    def positions(self, steps: int) -> list[int]:
        return [position for _ in range(steps) for position in self.train()]


def test_without_shares_below_one_there_is_none() -> None:
    """Nothing is noted, and every position is sampled."""
    assert curriculum_of(config(), POOL) is None
    assert curriculum_of(config(keep_hopeless=0.5), POOL) is not None


def test_solved_and_hopeless_prompts_are_skipped_from_the_second_visit_on(make_group: Any) -> None:
    """Each kind by its own share; skipped visits cost no group, and are counted."""
    policy = Policy(make_group, keep_solved=0.0, keep_hopeless=0.0)
    assert policy.positions(3) == list(range(12))
    assert policy.positions(3) == [18, 19, 20, 21, 22, 23, 30, 31, 32, 33, 34, 35]
    assert policy.books.counts["skipped_prompts"] == 12
    assert policy.books.accepted == 24
    only_solved = Policy(make_group, keep_solved=0.0)
    assert only_solved.positions(5)[12:] == [15, 16, 17, 18, 19, 20, 21, 22]
    only_hopeless = Policy(make_group, keep_hopeless=0.0)
    assert only_hopeless.positions(5)[12:] == [12, 13, 14, 18, 19, 20, 21, 22]


def test_policies_keep_the_same_visits_of_those_that_they_may_skip() -> None:
    """One skips solved prompts, the other hopeless ones: what both keep of a kind, they keep at the same positions."""
    one, other = curriculum(keep_solved=0.25), curriculum(keep_hopeless=0.5)
    one.rates, other.rates = {"p": 1.0}, {"p": 0.0}
    first = {position for position in range(10_000) if one.takes(position, "p")}
    second = {position for position in range(10_000) if other.takes(position, "p")}
    assert first < second
    assert len(first) == pytest.approx(2500, rel=0.1)
    assert len(second) == pytest.approx(5000, rel=0.1)
    assert one.takes(1, "never seen")


def test_rates_and_their_bounds_decide() -> None:
    """At least `solved_rate` is solved, at most `hopeless_rate` is hopeless, and what lies between is taken."""
    found = curriculum(keep_solved=0.0, keep_hopeless=0.0, solved_rate=0.75, hopeless_rate=0.25)
    found.rates = {"a": 0.75, "b": 0.74, "c": 0.26, "d": 0.25}
    assert [found.takes(0, prompt_id) for prompt_id in "abcd"] == [False, True, True, False]
    assert found.values() == {"curriculum/solved_share": 1 / POOL, "curriculum/hopeless_share": 1 / POOL}
    with pytest.raises(
        ConfigError, match=r"pool\.hopeless_rate: .* at the same time; got 0\.5; wanted < pool\.solved_rate = 0\.5"
    ):
        check_rules(config(solved_rate=0.5, hopeless_rate=0.5), where="test")


def test_a_pool_that_is_all_solved_is_still_walked(make_group: Any) -> None:
    """One prompt is taken after as many skips as the pool has prompts."""
    policy = Policy(make_group, keep_solved=0.0, keep_hopeless=0.0)
    policy.books.curriculum.rates = {f"p{n}": 1.0 for n in range(POOL)}
    assert policy.train() == [12, 25, 38, 51]


def test_the_order_in_which_groups_come_changes_nothing(make_group: Any) -> None:
    """Nor do more groups of one prompt in a step: the later position decides."""
    shares = {"keep_solved": 0.3, "keep_hopeless": 0.3}
    runs = [Policy(make_group, seed, **shares) for seed in range(3)]
    assert len({tuple(policy.positions(12)) for policy in runs}) == 1
    assert len({msgspec.json.encode(policy.books.state()) for policy in runs}) == 1
    late, early = curriculum(keep_solved=0.0), curriculum(keep_solved=0.0)
    groups = [of_prompt(make_group("0.1", rewards), "p") for rewards in ((1.0, 1.0), (0.0, 1.0))]
    for found, order in ((late, (0, 1)), (early, (1, 0))):
        for place in order:
            found.note(place, groups[place])
        assert found.rates == {}
        found.formed()
    assert late.rates == early.rates == {"p": 0.5}


def test_a_resume_goes_on_with_the_same_positions(make_group: Any) -> None:
    """Also from a checkpoint that was made while groups of the next step were in."""
    shares = {"keep_solved": 0.3, "keep_hopeless": 0.3}
    whole, broken = Policy(make_group, **shares), Policy(make_group, **shares)
    expected = whole.positions(15)
    assert broken.positions(7) == expected[:28]
    between = broken.books.state()
    broken.sampled()
    during = broken.books.state()
    assert between["curriculum"] == during["curriculum"]
    for state in (between, during):
        resumed = Policy(make_group, seed=1, state=state, step=7, **shares)
        assert resumed.positions(8) == expected[28:]
        assert resumed.books.state()["curriculum"] == whole.books.state()["curriculum"]


def test_a_group_that_is_not_sampled_again_stays_noted(make_group: Any) -> None:
    """A uniform one that dynamic sampling dropped, in a checkpoint before the batch was formed."""
    found = curriculum(keep_solved=0.0)
    for position in (3, 4):
        found.note(position, of_prompt(make_group("0.1", (1.0, 1.0)), f"p{position}"))
    resumed = curriculum(keep_solved=0.0)
    resumed.restore(msgspec.json.decode(msgspec.json.encode(found.state([4]))))
    resumed.formed()
    assert resumed.rates == {"p3": 1.0}


def test_a_checkpoint_without_a_curriculum_begins_one(make_group: Any) -> None:
    """That of a run before there was any."""
    policy = Policy(make_group, state={"cursor": 12, "open": [], "dropped": 0}, step=3, keep_solved=0.0)
    assert policy.positions(1) == [12, 13, 14, 15]
