"""Evaluations under way: which worker may answer, and what becomes of one that the next one overtakes."""

import pytest

from mrl.learner.held_out_ledger import HeldOutLedger
from mrl.records.rollouts import HeldOutAnswer, HeldOutItem, WorkRequest
from mrl.records.version import Version, VersionSpan
from mrl.tasks.pool import Prompt

V40, V80 = Version(0, 40), Version(0, 80)
PROMPTS = [Prompt(f"p{number}", "t", f"{number}?") for number in range(6)]


@pytest.fixture
def books() -> HeldOutLedger:
    made = HeldOutLedger("a")
    made.ask(V40, PROMPTS, 0.0)
    return made


def ask(most: int, serving: Version | None = V40, *, alone: int = 0, worker: str = "w") -> WorkRequest:
    return WorkRequest(
        worker=worker, max_groups=0, holding=[], serving=serving, max_held_out=most, max_held_out_alone=alone
    )


def answers(items: list[HeldOutItem], version: Version = V40) -> list[HeldOutAnswer]:
    return [HeldOutAnswer(ticket=item.ticket, versions=[VersionSpan(2, version)], reward=1.0) for item in items]


@pytest.mark.parametrize(
    ("serving", "granted"),
    [(V40, 2), (V80, 2), (Version(0, 39), 0), (Version(1, 3), 2)],
    ids=["the version asked for", "a newer one", "an older one", "a newer one of a later life"],
)
def test_prompts_are_for_who_serves_the_version_or_a_newer_one(books, serving, granted):
    """An older one would not say what the version can."""
    assert len(books.grant(ask(2, serving))) == granted


def test_voided_weights_of_an_earlier_life_answer_nothing():
    """Their step is higher, and they are older."""
    books = HeldOutLedger("a")
    books.ask(Version(1, 40), PROMPTS, 0.0)
    assert books.grant(ask(2, Version(0, 45))) == []


def test_a_worker_that_has_no_weights_yet_gets_nothing_to_answer(books):
    """With what version it will begin nobody knows."""
    assert books.grant(ask(4, None)) == books.grant_alone(ask(4, None, alone=4), 0) == []
    assert books.waiting == V40


def test_an_evaluation_is_over_with_its_last_answer(books):
    """From two workers; the result is given once."""
    items = books.grant(ask(4)) + books.grant(ask(4, worker="other"))
    assert (len(items), books.waiting) == (6, None)
    books.accept(answers(items[:5]), 3.0)
    assert books.is_open
    books.accept(answers(items[5:]), 4.5)

    (one,) = books.take_over()

    assert one.result is not None
    assert (one.version, one.result.seconds, one.result.missing) == (V40, 4.5, 0)
    assert not books.is_open
    assert books.take_over() == []


def test_an_evaluation_that_the_next_one_overtakes_ends_with_what_was_begun(books):
    """Its prompts that wait are not begun any more; those of the newer version are; nothing is mixed up."""
    begun = books.grant(ask(2))

    books.ask(V80, PROMPTS, 9.0)
    fresh = books.grant(ask(100, V80))
    books.accept(answers(begun), 10.0)
    books.accept(answers(fresh, V80), 11.0)

    old, new = books.take_over()
    assert old.result is not None
    assert new.result is not None
    assert (old.version, old.result.missing, old.result.own_token_share) == (V40, 4, 1.0)
    assert (new.version, new.result.missing, new.result.own_token_share) == (V80, 0, 1.0)


def test_what_an_overtaken_evaluation_lost_is_not_begun_again(books):
    """It ends when nothing of it is in flight; without any answer there is no result."""
    books.grant(ask(2))
    books.ask(V80, PROMPTS, 9.0)

    assert books.lose("w", [], 10.0) == 2

    (old,) = books.take_over()
    assert (old.version, old.result) == (V40, None)
    assert {item.version for item in books.grant(ask(100, V80))} == {V80}


def test_what_a_lost_worker_had_goes_to_another(books):
    """Also of one that fell silent, and of one that was started again and holds nothing."""
    first = books.grant(ask(2))
    assert books.lose("w", [first[0].ticket], 1.0) == 1
    assert books.grant(ask(1, worker="other")) == first[1:]
    assert books.expire({"other"}, 2.0) == 1
    assert books.grant(ask(1)) == first[1:]


def test_nothing_is_awaited_once_it_is_given_up(books):
    """The evaluation is over with what has come."""
    items = books.grant(ask(3))
    books.accept(answers(items[:1]), 1.0)

    books.give_up(2.0)

    (one,) = books.take_over()
    assert one.result is not None
    assert one.result.missing == 5
    assert not books.is_open
