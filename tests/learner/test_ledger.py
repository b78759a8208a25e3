"""The ledger paces sampling, loses no prompt, and never trains on a stale or undated group."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.learner.ledger import Pace, WorkLedger
from mrl.records.rollouts import WorkRequest
from mrl.records.version import Version

PACE = Pace(groups_per_step=4, group_size=2, max_staleness_versions=1, total_steps=10)


def ledger(epoch: int = 0, step: int = 0, pace: Pace = PACE) -> WorkLedger:
    return WorkLedger(pace, lambda position: f"p{position}", Version(epoch, step), step=step)


def ask(count: int, worker: str = "w", holding: tuple[str, ...] = ()) -> WorkRequest:
    return WorkRequest(worker=worker, max_groups=count, holding=list(holding))


def test_at_most_eta_plus_one_steps_of_groups_run_ahead():
    """At step 0 with eta 1 and B 4, eight groups are granted and not one more."""
    books = ledger()

    items = books.grant(ask(100), 0.0)

    assert [item.position for item in items] == list(range(8))
    assert books.grant(ask(100, holding=tuple(item.ticket for item in items)), 0.0) == []


def test_a_new_version_raises_the_budget_by_one_step(make_group):
    """When step 1 begins, four more groups may be sampled."""
    books = ledger()
    items = books.grant(ask(8), 0.0)
    books.accept([make_group(item.ticket) for item in items], "w", 0.0)

    assert len(books.take_batch(0) or []) == 4
    assert books.grant(ask(9), 0.0) == []
    books.take_batch(1)
    assert len(books.grant(ask(9), 0.0)) == 4


def test_no_more_is_granted_than_the_run_needs(make_group):
    """The last steps sample exactly what they train on."""
    books = ledger(pace=Pace(4, 2, max_staleness_versions=5, total_steps=1))

    assert len(books.grant(ask(100), 0.0)) == 4


def test_the_work_of_a_restarted_worker_is_granted_again():
    """A worker that holds nothing gets the positions that its earlier life held."""
    books = ledger()
    first = books.grant(ask(3), 0.0)

    again = books.grant(ask(3), 1.0)

    assert [item.position for item in again] == [item.position for item in first]


def test_a_lost_grant_is_granted_again_and_a_held_one_is_not():
    """What the worker does not hold comes back to it; what it holds stays its own."""
    books = ledger()
    items = books.grant(ask(3), 0.0)

    again = books.grant(ask(2, holding=(items[0].ticket,)), 1.0)

    assert {item.ticket for item in again} == {items[1].ticket, items[2].ticket}


def test_the_work_of_a_silent_worker_goes_to_another():
    """After the silence limit another worker is granted the same prompts."""
    books = ledger()
    first = books.grant(ask(8, worker="dead"), 0.0)
    assert books.grant(ask(8, worker="live"), 50.0) == []

    books.expire(61.0, silence_s=60.0)

    assert len(books.grant(ask(8, worker="live"), 61.0)) == len(first)


def test_a_group_that_comes_twice_counts_once(make_group):
    """Repetitions of a delivery change nothing."""
    books = ledger()
    item = books.grant(ask(1), 0.0)[0]

    new = [books.accept([make_group(item.ticket)], "w", 0.0) for _ in range(2)]

    assert [len(groups) for groups in new] == [1, 0]
    assert books.counts["repeated"] == 1


def test_stale_groups_are_dropped_with_their_lengths_and_sampled_anew(make_group):
    """Groups older than eta are not trained on, their tokens are counted, and the budget is given back."""
    books = ledger()
    items = books.grant(ask(8), 0.0)
    books.accept([make_group(item.ticket, step=0) for item in items], "w", 0.0)

    assert books.take_batch(2) is None
    assert books.counts["stale_groups"] == 8
    assert books.counts["stale_tokens"] == 8 * 5
    assert len(books.grant(ask(100), 0.0)) == 16


def test_groups_of_a_voided_epoch_are_dropped(make_group):
    """After a resume at step 3, tokens of step 5 of the earlier life are void."""
    books = ledger(epoch=1, step=3)
    item = books.grant(ask(1), 0.0)[0]
    books.accept([make_group(item.ticket, epoch=0, step=5)], "w", 0.0)

    books.take_batch(3)

    assert books.counts["stale_groups"] == 1


@pytest.mark.parametrize(
    "damage",
    [{"versions": []}, {"logprobs": b""}, {"token_ids": b"abc"}, {"token_ids": b"", "logprobs": b"", "versions": []}],
)
def test_a_group_that_cannot_be_dated_is_refused(make_group, damage):
    """Every token needs a version and a log-probability; the prompt is sampled again."""
    books = ledger()
    item = books.grant(ask(1), 0.0)[0]
    group = make_group(item.ticket)
    answers = [group.answers[0], msgspec.structs.replace(group.answers[1], **damage)]
    group = msgspec.structs.replace(group, answers=answers)

    assert books.accept([group], "w", 0.0) == []
    assert books.counts["unsound"] == 1
    assert books.grant(ask(1), 0.0)[0].position == item.position


@pytest.mark.parametrize(
    "damage", [{"prompt_id": "p5"}, {"prompt_token_ids": b""}, {"prompt_token_ids": b"abcde"}, {"answers": 1}]
)
def test_a_group_that_was_not_granted_like_this_is_refused(make_group, damage):
    """Prompt and number of answers must be those of the grant."""
    books = ledger()
    item = books.grant(ask(1), 0.0)[0]
    group = make_group(item.ticket)
    changes = {"answers": group.answers[:1]} if "answers" in damage else damage

    assert books.accept([msgspec.structs.replace(group, **changes)], "w", 0.0) == []
    assert books.counts["unsound"] == 1


def test_a_group_that_comes_after_its_grant_was_taken_back_still_counts(make_group):
    """A slow worker's groups are used unless their prompts were granted to another meanwhile."""
    books = ledger()
    items = books.grant(ask(2), 0.0)
    books.expire(61.0, silence_s=60.0)
    books.grant(ask(1, worker="other"), 61.0)

    new = books.accept([make_group(item.ticket) for item in items], "w", 62.0)

    assert [group.ticket for group in new] == [item.ticket for item in items]
    assert books.grant(ask(1), 62.0)[0].position == 2


def test_a_resume_samples_what_was_not_trained_on(make_group):
    """Positions that were running or ready at the checkpoint are granted first, then the cursor goes on."""
    books = ledger()
    items = books.grant(ask(8), 0.0)
    books.accept([make_group(item.ticket) for item in items[:6]], "w", 0.0)
    books.take_batch(0)
    state = msgspec.json.decode(msgspec.json.encode(books.state()))
    resumed = ledger(epoch=1, step=1)
    resumed.restore(state, 1)

    positions = [item.position for item in resumed.grant(ask(100), 0.0)]

    assert positions == [4, 5, 6, 7, 8, 9, 10, 11]


@given(st.lists(st.tuples(st.sampled_from(["ask", "give", "crash", "train"]), st.integers(0, 9)), max_size=60))
def test_every_position_is_trained_dropped_or_open(events):
    """Whatever happens, no position of the prompt order is lost and none is trained twice."""
    books, step = ledger(pace=Pace(2, 2, 2, 1000)), 0
    held: dict[str, int] = {}
    trained: list[int] = []
    for event, number in events:
        if event == "ask":
            items = books.grant(ask(number, holding=tuple(held)), 0.0)
            held |= {item.ticket: step for item in items}
        elif event == "give":
            for ticket in list(held)[:number]:
                books.accept([_group(ticket, held.pop(ticket))], "w", 0.0)
        elif event == "crash":
            held = {}
        else:
            batch = books.take_batch(step)
            if batch is not None:
                trained += [int(group.ticket.split(".")[1]) for group in batch]
                step += 1
    open_positions = books.state()["open"]

    assert len(set(trained)) == len(trained)
    assert len(trained) + len(open_positions) + books.counts["stale_groups"] == books.cursor
    assert books.accepted + len(books.running) <= (step + 3) * 2


def _group(ticket: str, step: int):
    from mrl.records.codec import pack_array
    from mrl.records.rollouts import Answer, ScoredGroup
    from mrl.records.version import VersionSpan

    answer = Answer(
        token_ids=pack_array([1], "i4"),
        logprobs=pack_array([-1.0], "f4"),
        versions=[VersionSpan(1, Version(0, step))],
        completion=b"",
        finished=True,
        reward=0.0,
    )
    return ScoredGroup(
        ticket=ticket,
        prompt_id=f"p{ticket.split('.')[1]}",
        task="t",
        prompt_token_ids=pack_array([1], "i4"),
        answers=[answer, answer],
    )
