"""The books of one evaluation: every prompt is answered once, whatever is lost on the way, or counted as missing."""

import msgspec
import pytest

from mrl.records.episodes import Message
from mrl.records.evaluation_messages import EvaluationResult
from mrl.records.readable_turns import ReadableTurn
from mrl.records.rollouts import HeldOutAnswer, HeldOutItem
from mrl.records.version import Version, VersionSpan
from mrl.tasks.held_out import MAX_GRANTS, SHOWN_PER_TASK, HeldOutTally, Measure
from mrl.tasks.pool import Prompt

ASKED, NEWER = Version(1, 40), Version(1, 41)
PROMPTS = [Prompt(f"{task}:{number}", task, f"{task} {number}?") for number in range(5) for task in ("add", "spell")]


@pytest.fixture
def book() -> HeldOutTally:
    return HeldOutTally("a", ASKED, PROMPTS, began_s=100.0)


def answer(item: HeldOutItem, reward: float = 1.0, *, own_tokens: int = 3, newer_tokens: int = 0) -> HeldOutAnswer:
    counts = ((own_tokens, ASKED), (newer_tokens, NEWER))
    spans = [VersionSpan(number, version) for number, version in counts if number]
    return HeldOutAnswer(ticket=item.ticket, versions=spans, completion=item.prompt_id.encode(), reward=reward)


def test_the_result_is_the_share_of_right_answers_by_task(book):
    """Answers in any order; those that are shown are the first of every task."""
    items = book.grant("w", 100)
    assert [item.prompt_id for item in items] == [prompt.prompt_id for prompt in PROMPTS]
    for item in reversed(items):
        assert book.accept(answer(item, reward=float(item.prompt_id in ("add:0", "add:3", "spell:1"))))

    result = book.result(107.5)

    assert book.is_over
    assert result is not None
    assert (result.policy, result.version, result.step, result.accuracy) == ("a", ASKED, 40, 0.3)
    assert {task: (one.accuracy, one.prompts) for task, one in result.per_task.items()} == {
        "add": (0.4, 5), "spell": (0.2, 5)
    }  # fmt: skip
    assert [one.prompt for one in result.answers if one.task == "spell"] == [
        f"spell {number}?" for number in range(SHOWN_PER_TASK)
    ]
    assert (result.missing, result.seconds, result.own_token_share) == (0, 7.5, 1.0)


def test_what_is_shown_of_an_episode_has_its_opening_and_turns(book):
    """As the worker told them."""
    [item] = book.grant("w", 1)
    turns = [ReadableTurn(is_sampled=True, tokens=2, messages=(Message("assistant", "five"),))]
    book.accept(msgspec.structs.replace(answer(item), opening="<bos>Guess", turns=turns))

    result = book.result(101.0)

    assert result is not None
    assert [(one.opening, one.turns) for one in result.answers] == [("<bos>Guess", turns)]


def test_a_result_says_which_versions_sampled_it(book):
    """Two answers of six tokens that the asked version began, the second one ended by a newer version."""
    first, second = book.grant("w", 2)
    book.accept(answer(first, own_tokens=6))
    book.accept(answer(second, own_tokens=2, newer_tokens=4))

    result = book.result(101.0)

    assert result is not None
    assert (result.oldest, result.newest) == (ASKED, NEWER)
    assert result.own_token_share == pytest.approx(8 / 12)


def test_what_a_worker_lost_waits_again_in_front(book):
    """In the order of the prompts; what another worker holds stays its own."""
    items, others = book.grant("w", 2), book.grant("other", 2)

    assert book.lose(lambda worker, ticket: worker == "w") == 2

    assert book.grant("other", 3)[:2] == items
    assert book.accept(answer(others[0]))


def test_a_prompt_that_is_lost_again_and_again_costs_itself(book):
    """After a number of grants it is missing, and the evaluation is over without it."""
    (poison, *rest) = book.grant("w", 100)
    for one in rest:
        book.accept(answer(one))
    for grants in range(1, MAX_GRANTS + 1):
        assert not book.is_over
        book.lose(lambda worker, ticket: True)
        assert book.grant("w", 100) == ([poison] if grants < MAX_GRANTS else [])

    result = book.result(101.0)

    assert book.is_over
    assert result is not None
    assert (result.missing, result.accuracy) == (1, 1.0)


def test_refused_prompts_are_missing_and_told_why(book):
    """They count neither as right nor as wrong."""
    for number, item in enumerate(book.grant("w", 100)):
        refusal = HeldOutAnswer(ticket=item.ticket, failure="refused by the engine")
        book.accept(refusal if number < 4 else answer(item, reward=float(number == 4)))

    result = book.result(101.0)

    assert result is not None
    assert (result.missing, result.accuracy) == (4, pytest.approx(1 / 6))
    assert book.failures() == {"refused by the engine": 4}


def test_an_answer_counts_once_and_only_in_its_own_book(book):
    """Repeated, of another evaluation, of an earlier life, or of a prompt that was never granted."""
    (item,) = book.grant("w", 1)
    assert book.accept(answer(item))
    assert not book.accept(answer(item, reward=0.0))
    stranger = HeldOutTally("a", Version(0, 40), PROMPTS, began_s=0.0).grant("w", 2)[1]
    assert not book.accept(answer(stranger))
    for ticket in (item.ticket.replace(".0", ".7"), item.ticket + "9999", "0.3", "", f"{ASKED}.held-out.x"):
        assert not book.accept(HeldOutAnswer(ticket=ticket or "-", reward=1.0))


def test_an_answer_that_was_given_up_for_lost_is_taken_all_the_same(book):
    """Its prompt does not wait any more."""
    (item,) = book.grant("w", 1)
    book.lose(lambda worker, ticket: True)

    assert book.accept(answer(item))

    assert item not in book.grant("w", 100)


def test_an_answer_is_granted_once_whatever_was_lost_and_came(book):
    """Lost, answered, lost again: nobody begins an answer that came, and each that waits is begun once."""
    first, second = book.grant("w", 2)
    book.lose(lambda worker, ticket: True)
    assert book.accept(answer(second))
    num_waiting = book.num_waiting

    again = book.grant("w", 100)

    assert len({item.ticket for item in again}) == len(again) == num_waiting
    assert again[0].ticket == first.ticket
    assert second.ticket not in {item.ticket for item in again}
    assert book.num_waiting == 0
    assert book.num_missing == len(again)


def test_nothing_answered_is_no_result(book):
    """Nor is a book without prompts."""
    book.give_up(running=True)
    assert book.is_over
    assert book.result(101.0) is None
    assert HeldOutTally("a", ASKED, [], began_s=0.0).is_over


SEVERAL = Measure(samples=4, ks=(1, 2, 4))


def several_answers(rights: list[int], choices: dict[int, str], *, lost: tuple[int, ...] = ()) -> EvaluationResult:
    """Two prompts or more, four answers to each, so many of them right; `choices` of some, by their place."""
    book = HeldOutTally("a", ASKED, PROMPTS[: len(rights)], began_s=100.0, measure=SEVERAL)
    for place, item in enumerate(book.grant("w", 100)):
        if place in lost:
            book.accept(HeldOutAnswer(ticket=item.ticket, failure="refused by the engine"))
            continue
        is_right = item.sample < rights[place // 4]
        choice = choices.get(place, "right" if is_right else f"wrong {place}")
        book.accept(msgspec.structs.replace(answer(item, reward=float(is_right)), choice=choice))
    result = book.result(101.0)
    assert result is not None
    return result


def test_several_answers_to_a_prompt_are_begun_one_after_another():
    """Each has a ticket and a number of its own, and with them its seed."""
    book = HeldOutTally("a", ASKED, PROMPTS[:2], began_s=0.0, measure=SEVERAL)

    items = book.grant("w", 6)

    assert [(item.prompt_id, item.sample) for item in items] == [
        ("add:0", 0), ("add:0", 1), ("add:0", 2), ("add:0", 3), ("spell:0", 0), ("spell:0", 1)
    ]  # fmt: skip
    assert len({item.ticket for item in items}) == 6
    assert (book.num_waiting, book.num_missing) == (2, 8)


def test_several_answers_give_pass_at_k_and_a_majority():
    """Two of four right: pass@2 is 1 - 1/6. In the other prompt one wrong answer comes three times."""
    result = several_answers([2, 1], {5: "same", 6: "same", 7: "same"})

    assert {name: one.mean for name, one in result.estimates.items()} == {
        "pass@1": 0.375, "pass@2": pytest.approx((5 / 6 + 1 / 2) / 2), "pass@4": 1.0, "avg@4": 0.375, "maj@4": 0.5
    }  # fmt: skip
    assert (result.accuracy, result.samples, result.tied_majorities) == (0.375, 4, 0)
    assert [(one.prompt_id, one.answered, one.right) for one in result.prompts] == [("add:0", 4, 2), ("spell:0", 4, 1)]
    assert {task: (one.accuracy, one.prompts) for task, one in result.per_task.items()} == {
        "add": (0.5, 1), "spell": (0.25, 1)
    }  # fmt: skip


def test_a_prompt_without_all_of_its_answers_counts_where_it_has_enough():
    """One of the second prompt's answers did not come: it is in pass@1 and pass@2, and in no pass@4 and no majority."""
    result = several_answers([4, 0], {}, lost=(6,))

    assert {name: (one.mean, one.prompts) for name, one in result.estimates.items()} == {
        "pass@1": (0.5, 2), "pass@2": (0.5, 2), "pass@4": (1.0, 1), "avg@4": (0.5, 2), "maj@4": (1.0, 1)
    }  # fmt: skip
    assert (result.missing, result.prompts[1].answered) == (1, 3)


def test_tied_majorities_are_counted():
    """All four answers differ, one of them is right."""
    result = several_answers([1], {})

    assert (result.estimates["maj@4"].mean, result.tied_majorities) == (0.25, 1)


def test_a_lost_answer_waits_again_and_the_others_of_its_prompt_do_not():
    """The second of four; what comes then has the same number, and so the same seed."""
    book = HeldOutTally("a", ASKED, PROMPTS[:1], began_s=0.0, measure=SEVERAL)
    items = book.grant("w", 4)

    assert book.lose(lambda _, ticket: ticket == items[1].ticket) == 1
    assert [one.sample for one in book.grant("v", 4)] == [1]


def test_one_answer_to_a_prompt_is_told_as_ever(book):
    """No estimates beside the accuracy; the tickets are those of the prompts' places."""
    items = book.grant("w", 100)
    assert [item.ticket for item in items] == [f"{ASKED}.held-out.{place}" for place in range(len(PROMPTS))]
    assert {item.sample for item in items} == {0}
    for item in items:
        book.accept(answer(item))

    result = book.result(101.0)

    assert (result.estimates, result.samples, result.tied_majorities) == ({}, 1, 0)
    assert [one.prompt_id for one in result.prompts] == [prompt.prompt_id for prompt in PROMPTS]
