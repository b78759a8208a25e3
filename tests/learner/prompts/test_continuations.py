"""States to go on from are work like any other: granted first, lost, granted again, trained once, resumed."""

import json
from types import SimpleNamespace

import pytest
from msgspec import structs

from mrl.config.schema import RunTable
from mrl.learner.asynchronous_batching import OwnGroups
from mrl.learner.batches import BatchMaker, batch_values
from mrl.learner.ledger import MAX_GIVEN_BYTES, SamplingLimits, WorkLedger
from mrl.learner.verifier_limit import VerifierFailures
from mrl.records.codec import decode, encode, pack_array
from mrl.records.episodes import Message
from mrl.records.experience import SharedTurn
from mrl.records.rollouts import (
    FIRST_CONTINUATION,
    Continuation,
    Groups,
    ScoredGroup,
    StaleGroup,
    WorkGrant,
    WorkItem,
    WorkRequest,
    learner_message_decoder,
    worker_message_decoder,
)
from mrl.records.version import Version
from mrl.sharing.regime import AbsorbResult
from tests.support.answers import made_answer

PACE = SamplingLimits(groups_per_step=2, group_size=1, max_staleness_versions=1, total_steps=10)


def state(prompt_id: str, words: str = "go") -> Continuation:
    turns = [
        SharedTurn(is_sampled=True, messages=(Message("assistant", words),)),
        SharedTurn(is_sampled=False, messages=(Message("user", "gone"),)),
    ]
    return Continuation(prompt_id=prompt_id, source="peer", turns=turns, num_left=1)


def ledger(epoch: int = 0, pace: SamplingLimits = PACE) -> WorkLedger:
    return WorkLedger(pace, lambda position: f"p{position}", Version(epoch, 0))


def asks(books: WorkLedger, count: int = 9, holding: list[WorkItem] = ()) -> list[WorkItem]:
    request = WorkRequest(worker="w", max_groups=count, holding=[item.ticket for item in holding])
    return books.grant(request, 0.0)


def played(item: WorkItem, step: int = 0, reward: float = 0.0) -> ScoredGroup:
    return ScoredGroup(
        ticket=item.ticket,
        prompt_id=item.prompt_id,
        task="t",
        prompt_token_ids=pack_array([1], "i4"),
        answers=[made_answer(step, reward=reward)],
        continuation=item.continuation,
    )


def test_states_are_granted_before_the_next_prompts_and_in_place_of_them():
    """No more is sampled than without them, and they end up in batches as other groups do."""
    books = ledger()
    books.offer([state("a"), state("b")])

    items = asks(books)

    assert [item.prompt_id for item in items] == ["a", "b", "p0", "p1"], "four groups in all, as without"
    assert [item.continuation for item in items] == [state("a"), state("b"), None, None]
    assert [item.position for item in items] == [FIRST_CONTINUATION, FIRST_CONTINUATION + 1, 0, 1]
    assert len({item.ticket for item in items}) == 4
    books.accept([played(item) for item in items], "w", 0.0)
    assert [group.prompt_id for group in books.take_batch(0)] == ["a", "b"]
    assert [group.prompt_id for group in books.take_batch(1)] == ["p0", "p1"]
    assert len(books.continuations) == 0
    assert books.counts == {}


def test_what_a_worker_lost_is_granted_again_and_trained_once():
    """Also where the lost group comes after all: its ticket is taken off the books the first time."""
    books = ledger()
    books.offer([state("a")])
    (item,) = asks(books, 1)
    assert asks(books, 0) == []

    assert books.accept([played(item)], "w", 0.0) != []
    (other,) = asks(books, 1)
    assert other.prompt_id == "p0"
    assert books.accept([played(item)], "w", 0.0) == []
    assert books.counts == {"granted_again": 1, "repeated": 1}

    books.offer([state("b")])
    (first,) = asks(books, 1, [other])
    (again,) = asks(books, 1, [other])
    assert (first.ticket, first.continuation) == (again.ticket, again.continuation)


@pytest.mark.parametrize("change", [{"continuation": None}, {"continuation": state("a", "other")}, {"prompt_id": "p0"}])
def test_a_group_that_began_elsewhere_is_not_taken(change):
    """It would be trained on as what it is not; the state is granted again."""
    books = ledger()
    books.offer([state("a")])
    (item,) = asks(books, 1)

    assert books.accept([structs.replace(played(item), **change)], "w", 0.0) == []
    assert books.counts == {"unsound": 1}
    assert asks(books, 1)[0].continuation == state("a")


def test_a_state_that_leads_nowhere_is_counted_by_its_reason_and_forgotten():
    """Its place goes to the next prompt; nothing of it is trained."""
    books = ledger()
    books.offer([state("a")])
    (item,) = asks(books, 1)

    books.write_off([StaleGroup(ticket=item.ticket, num_tokens=0, unbegun="unequal")], "w", 0.0)

    assert books.counts == {"unbegun_groups/unequal": 1}
    items = asks(books)
    assert [one.prompt_id for one in items] == ["p0", "p1", "p2", "p3"]
    books.accept([played(one) for one in items], "w", 0.0)
    books.take_batch(0)
    assert len(books.continuations) == 0


def test_a_resumed_learner_has_the_states_that_were_open():
    """Running, ready or waiting; those that were trained on are gone, and new ones get other places."""
    books = ledger()
    books.offer([state(name) for name in "abc"])
    items = asks(books, 3)
    books.accept([played(item) for item in items[:2]], "w", 0.0)
    books.take_batch(0)
    books.offer([state("d")])

    resumed = ledger(epoch=1)
    resumed.restore(json.loads(json.dumps(books.state())), step=1)

    resumed.offer([state("e")])
    granted = asks(resumed)
    assert [item.prompt_id for item in granted] == ["c", "d", "e", "p0"]
    assert [item.position - FIRST_CONTINUATION for item in granted[:3]] == [2, 3, 4]


def test_a_grant_fits_into_a_message():
    """A worker that has room for more asks again."""
    books = ledger(pace=SamplingLimits(60, 1, 1, 10))
    books.offer([state("a", "x" * (MAX_GIVEN_BYTES // 4)) for _ in range(10)])
    items = asks(books, 60)
    assert 4 <= len(items) <= 5
    assert len(decode(encode(WorkGrant(items=items)), learner_message_decoder).items) == len(items)
    assert len(asks(books, 60, holding=items)) == len(items)


def test_states_cross_to_workers_and_back():
    """As records of their own types; a group without one says nothing of it."""
    books = ledger()
    books.offer([state("a")])
    (item,) = decode(encode(WorkGrant(items=asks(books, 1))), learner_message_decoder).items
    told = decode(encode(Groups(worker="w", groups=[played(item)])), worker_message_decoder)
    assert told.groups[0].continuation == state("a")
    assert (state("a").num_given, state("a").num_bytes) == (1, 6)


def test_a_step_hands_states_to_workers_and_tells_of_those_that_led_nowhere():
    """Rewards of a batch are those from start states, as far as there are any."""
    offered: list[Continuation] = []
    item = WorkItem(ticket="t", position=0, prompt_id="a", group_size=1, step=0)
    begun = played(item, reward=1.0)
    continued = structs.replace(begun, continuation=state("a"), answers=played(item).answers)
    intake = SimpleNamespace(
        take_failures=VerifierFailures,
        take_counts=lambda: {"unbegun_groups/unequal": 2},
        window_groups=None,
        curriculum_values={},
        offer=offered.extend,
    )
    absorbed = AbsorbResult([], {"policy_gradient": 1.0}, continuations=[state("b")])
    own = SimpleNamespace(name="policy_gradient")
    regime = SimpleNamespace(absorb=lambda groups, *, step, rng: absorbed, components=(own,))
    batching = SimpleNamespace(gather=lambda step, stopping: OwnGroups([begun, continued], {}))

    prepared = BatchMaker(intake, regime, None, batching, RunTable(name="r", steps=1)).prepare(0, None, lambda: False)

    assert offered == [state("b")]
    assert prepared.values["prefix/unbegun_groups/unequal"] == 2
    assert prepared.values["reward/mean"] == 1.0
    assert batch_values([continued], 0)["reward/mean"] == 0.0
