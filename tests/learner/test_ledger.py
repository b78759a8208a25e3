"""The ledger paces sampling, loses no prompt, and never trains on a stale or undated group."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.learner.ledger import SamplingLimits, WorkLedger
from mrl.records.chosen_experts import ChosenExperts
from mrl.records.codec import pack_array
from mrl.records.episodes import EpisodeSegment
from mrl.records.experience import SharedTurn
from mrl.records.rollouts import Continuation, ScoredGroup, StaleGroup, WorkRequest
from mrl.records.version import Version, VersionSpan
from tests.support.answers import made_answer

PACE = SamplingLimits(groups_per_step=4, group_size=2, max_staleness_versions=1, total_steps=10)


def ledger(epoch: int = 0, step: int = 0, pace: SamplingLimits = PACE) -> WorkLedger:
    return WorkLedger(pace, lambda position: f"p{position}", Version(epoch, step), step=step)


def ask(count: int, worker: str = "w", holding: tuple[str, ...] = (), serving: Version | None = None) -> WorkRequest:
    return WorkRequest(worker=worker, max_groups=count, holding=list(holding), serving=serving)


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


def test_a_worker_that_is_behind_gets_what_can_still_be_fresh(make_group):
    """The groups of the newest version's step are for who serves it; void weights sample nothing."""
    books = ledger()
    books.accept([make_group(item.ticket) for item in books.grant(ask(8), 0.0)], "w", 0.0)
    books.take_batch(0)
    books.take_batch(1)

    assert books.grant(ask(9, serving=Version(0, 0)), 0.0) == []
    assert len(books.grant(ask(9, serving=Version(0, 1)), 0.0)) == 4

    resumed = ledger(epoch=1, step=3)
    resumed.restore({"cursor": 12, "open": [], "dropped": 0}, step=3)
    assert resumed.grant(ask(9, serving=Version(0, 4)), 0.0) == []
    assert len(resumed.grant(ask(9, serving=Version(0, 3)), 0.0)) == 8


@given(st.integers(0, 3), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), min_size=20, max_size=60))
def test_nothing_goes_stale_that_ends_in_the_order_in_which_it_began(eta, turns):
    """However late a worker takes new weights: a full stock is trained on to the last group."""
    books = ledger(pace=SamplingLimits(4, 2, eta, total_steps=1000))
    step = serving = trained = 0
    for newer, room in turns:
        serving = min(step, serving + newer)
        items = books.grant(ask(room, serving=Version(0, serving)), 0.0)
        books.accept([_group(item.ticket, serving, passed=1) for item in items], "w", 0.0)
        if books.take_batch(step):
            trained, step = trained + 4, step + 1

    assert books.counts["stale_groups"] == 0
    assert trained + len(books.ready) == books.cursor


def test_a_worker_is_granted_the_work_of_an_announced_version_at_once(make_group):
    """Before the learner, which has other things to do behind its step, asks for the next batch."""
    books = ledger(pace=SamplingLimits(4, 2, max_staleness_versions=0, total_steps=10))
    books.accept([make_group(item.ticket) for item in books.grant(ask(4), 0.0)], "w", 0.0)
    books.take_batch(0)
    assert books.grant(ask(9), 0.0) == []

    books.announced(Version(0, 1))

    assert books.grant(ask(9, serving=Version(0, 0)), 0.0) == []
    assert [item.step for item in books.grant(ask(9, serving=Version(0, 1)), 0.0)] == [1] * 4


def test_no_more_is_granted_than_the_run_needs(make_group):
    """The last steps sample exactly what they train on."""
    books = ledger(pace=SamplingLimits(4, 2, max_staleness_versions=5, total_steps=1))

    assert len(books.grant(ask(100), 0.0)) == 4


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


def test_a_group_that_was_given_up_makes_room_for_another_prompt(make_group):
    """It is told of twice, since nobody acknowledged it, and counts once."""
    books = ledger()
    items = books.grant(ask(100), 0.0)
    given_up = [StaleGroup(ticket=items[0].ticket, num_tokens=7)]

    books.write_off(given_up, "w", 0.0)
    books.write_off(given_up, "w", 0.0)

    assert dict(books.counts) == {"stale_groups": 1, "stale_tokens": 7, "repeated": 1}
    (other,) = books.grant(ask(100, holding=tuple(item.ticket for item in items[1:])), 0.0)
    assert other.position == len(items)


def test_groups_of_a_voided_epoch_are_dropped(make_group):
    """After a resume at step 3, tokens of step 5 of the earlier life are void."""
    books = ledger(epoch=1, step=3)
    item = books.grant(ask(1), 0.0)[0]
    books.accept([make_group(item.ticket, epoch=0, step=5)], "w", 0.0)

    books.take_batch(3)

    assert books.counts["stale_groups"] == 1


@pytest.mark.parametrize(
    "damage",
    [
        {"versions": []},
        {"logprobs": b""},
        {"token_ids": b"abc"},
        {"token_ids": b"", "logprobs": b"", "versions": []},
        {"logprobs": pack_array([-1.0, float("nan"), -1.0], "f4")},
        {"logprobs": pack_array([-1.0, -1.0, float("-inf")], "f4")},
        {"logprobs": pack_array([-1.0, 0.5, -1.0], "f4")},
        {"experts": ChosenExperts(bytes(8), 4, 1)},
    ],
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


def _segments(*sizes: int) -> list[EpisodeSegment]:
    """Turns of these sizes, the policy's first and every second one."""
    return [EpisodeSegment(num_tokens=n, is_sampled=place % 2 == 0, messages=()) for place, n in enumerate(sizes)]


def _rows(segments: list[EpisodeSegment], *begun: int) -> list[EpisodeSegment]:
    """The same turns; with these, rows begin."""
    return [msgspec.structs.replace(one, begins_row=place in begun) for place, one in enumerate(segments)]


@pytest.mark.parametrize(
    ("segments", "is_taken"),
    [
        (_segments(1, 1, 1), True),
        (_segments(1, 1, 1, 0), True),
        (_segments(2, 1), False),
        (_segments(1, 1, 2), False),
        (_segments(2, 0, 1), False),
        (_rows(_segments(1, 1, 1), 1), True),
        (_rows(_segments(1, 1, 1), 0), False),
        (_rows(_segments(1, 1, 1), 2), False),
        (_rows(_segments(0, 1, 2), 1), False),
        (_rows(_segments(1, 1, 1, 0), 3), False),
    ],
)
def test_the_turns_of_an_episode_are_those_of_its_row(make_group, segments, is_taken):
    """Tokens, log-probabilities and versions have to agree with them, and the policy has the last turn with tokens.

    A row begins with what was given, behind a turn.
    """
    books = ledger()
    item = books.grant(ask(1), 0.0)[0]
    group = make_group(item.ticket)
    version = group.answers[0].versions[0].version
    episode = msgspec.structs.replace(
        group.answers[1],
        token_ids=pack_array([4, 5, 6], "i4"),
        logprobs=pack_array([-1.0, -1.0], "f4"),
        versions=[VersionSpan(2, version)],
        segments=segments,
    )
    group = msgspec.structs.replace(group, answers=[group.answers[0], episode])

    assert bool(books.accept([group], "w", 0.0)) is is_taken


@pytest.mark.parametrize(
    ("kinds", "is_sound"), [("s|gs", True), ("sgs|gs|ggs", True), ("s|s", False), ("sg|gs", False), ("s|g|gs", False)]
)
def test_each_row_of_an_episode_ends_with_a_turn_of_the_policy(make_group, kinds, is_sound):
    """And begins, behind the first one, with what was given: s is a sampled token, g a given one, | begins a row."""
    segments = [
        EpisodeSegment(num_tokens=1, is_sampled=kind == "s", messages=(), begins_row=row > 0 and place == 0)
        for row, part in enumerate(kinds.split("|"))
        for place, kind in enumerate(part)
    ]
    answer = msgspec.structs.replace(make_group("0.0").answers[0], segments=segments)
    assert answer.has_sound_rows is is_sound


@pytest.mark.parametrize(("epoch", "step", "is_taken"), [(1, 4, True), (0, 9, True), (1, 5, False), (2, 0, False)])
def test_a_group_of_a_version_that_is_still_to_come_is_refused(make_group, epoch, step, is_taken):
    """By epoch first: a life before may have been further. It would never have counted as stale."""
    books = ledger(epoch=1, step=3)
    books.announced(Version(1, 3))
    books.announced(Version(1, 4))
    item = books.grant(ask(1), 0.0)[0]
    group = make_group(item.ticket, epoch=1, step=3)
    *spans, last = group.answers[1].versions
    spans.append(msgspec.structs.replace(last, version=Version(epoch, step)))
    answers = [group.answers[0], msgspec.structs.replace(group.answers[1], versions=spans)]

    assert bool(books.accept([msgspec.structs.replace(group, answers=answers)], "w", 0.0)) is is_taken
    assert books.counts["unsound"] == (not is_taken)


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


def fill(books: WorkLedger, make_group, rewards: list[tuple[float, ...]], step: int = 0) -> list[str]:
    """Grant and bring in one group per entry; returns their prompt ids."""
    items = books.grant(ask(len(rewards)), 0.0)
    assert len(items) == len(rewards)
    groups = [make_group(item.ticket, reward, step=step) for item, reward in zip(items, rewards, strict=True)]
    books.accept(groups, "w", 0.0)
    return [group.prompt_id for group in groups]


def prompts(groups) -> list[str]:
    return [group.prompt_id for group in groups]


MIXED, FAILED, PASSED = (1.0, 0.0), (0.0, 0.0), (1.0, 1.0)


def test_uniform_groups_make_room_for_the_next_prompts(make_group):
    """With dynamic sampling a group of equal rewards is counted and reported, and another prompt is sampled instead."""
    books = ledger(pace=SamplingLimits(4, 2, 0, 10, drop_uniform=True))
    items = books.grant(ask(100), 0.0)
    rewards = [MIXED, FAILED, PASSED, MIXED]
    groups = [make_group(item.ticket, reward) for item, reward in zip(items, rewards, strict=True)]

    new = books.accept(groups, "w", 0.0)

    assert new == groups
    assert books.take_batch(0) is None
    assert (books.counts["uniform_groups"], books.counts["uniform_tokens"]) == (2, 10)
    assert fill(books, make_group, [MIXED, MIXED]) == ["p4", "p5"]
    assert books.grant(ask(100), 0.0) == []
    assert prompts(books.take_batch(0) or []) == ["p0", "p3", "p4", "p5"]


def test_uniform_groups_stay_without_dynamic_sampling(make_group):
    """By default every group is trained on."""
    books = ledger()
    fill(books, make_group, [FAILED] * 4)

    assert len(books.take_batch(0) or []) == 4
    assert not books.counts


def test_dynamic_sampling_ends_at_its_limit_and_begins_anew_with_every_batch(make_group):
    """After max_resampling * B groups uniform ones are taken, and counted as such."""
    books = ledger(pace=SamplingLimits(2, 2, 0, 10, drop_uniform=True, max_resampling=2.0))
    dropped = fill(books, make_group, [FAILED] * 2)
    taken = fill(books, make_group, [FAILED] * 2)

    assert prompts(books.take_batch(0) or []) == taken
    assert (books.counts["uniform_groups"], books.counts["uniform_taken"]) == (len(dropped), 2)
    books.step = 1
    fill(books, make_group, [FAILED], step=1)
    assert (books.counts["uniform_groups"], books.ready) == (3, [])


def test_a_resume_goes_on_resampling_where_it_was(make_group):
    """A dropped prompt does not come again, and the limit counts it still."""
    pace = SamplingLimits(2, 2, 0, 10, drop_uniform=True, max_resampling=2.0)
    books = ledger(pace=pace)
    fill(books, make_group, [FAILED, MIXED])
    resumed = ledger(epoch=1, pace=pace)
    resumed.restore(msgspec.json.decode(msgspec.json.encode(books.state())), 0)

    items = resumed.grant(ask(100), 0.0)

    assert [item.position for item in items] == [1, 2]
    resumed.accept([make_group(item.ticket, FAILED, epoch=1) for item in items], "w", 0.0)
    assert (resumed.counts["uniform_groups"], resumed.counts["uniform_taken"]) == (1, 1)


def test_settled_groups_go_first_and_others_only_as_long_as_they_may_wait(make_group):
    """Held once, an unsettled group goes with the next batch before all others; each rank is oldest first."""
    books = ledger(pace=SamplingLimits(2, 2, 3, 10))
    fill(books, make_group, [MIXED] * 6)

    def settled(group) -> bool:
        return group.prompt_id in {"p3", "p4", "p5"}

    assert books.unsettled(0, settled, 1) == 0
    assert prompts(books.take_batch(0, settled, 1) or []) == ["p3", "p4"]
    assert books.unsettled(1, settled, 1) == 2
    assert prompts(books.take_batch(1, settled, 1) or []) == ["p0", "p1"]
    assert prompts(books.take_batch(2, settled, 1) or []) == ["p2", "p5"]


def test_a_group_at_the_staleness_bound_does_not_wait(make_group):
    """Rather than being dropped it is trained alone."""
    books = ledger(pace=SamplingLimits(1, 2, 1, 10))
    fill(books, make_group, [MIXED], step=0)
    books.step = 1
    fill(books, make_group, [MIXED], step=1)

    assert prompts(books.take_batch(1, lambda group: group.prompt_id == "p1", 5) or []) == ["p0"]


@pytest.mark.parametrize("verdict", [True, False])
@pytest.mark.parametrize("hold_versions", [0, 3])
def test_groups_of_equal_standing_go_oldest_first(make_group, verdict, hold_versions):
    """A regime that never waits, or that waits for all, changes nothing."""
    books = ledger(pace=SamplingLimits(2, 2, 5, 10))
    fill(books, make_group, [MIXED] * 6)

    batches = [prompts(books.take_batch(step, lambda _: verdict, hold_versions) or []) for step in range(3)]

    assert batches == [["p0", "p1"], ["p2", "p3"], ["p4", "p5"]]


def test_nothing_is_held_back_when_a_batch_needs_it(make_group):
    """With exactly enough groups all of them go, settled or not; with fewer there is no batch to speak of."""
    books = ledger(pace=SamplingLimits(3, 2, 5, 10))
    fill(books, make_group, [MIXED] * 2)
    assert books.unsettled(0, lambda _: False, 9) is None
    fill(books, make_group, [MIXED])

    assert books.unsettled(0, lambda group: group.prompt_id == "p1", 9) == 2
    assert prompts(books.take_batch(0, lambda group: group.prompt_id == "p1", 9) or []) == ["p1", "p0", "p2"]
    assert books.take_batch(1) is None


ADAPTIVE = SamplingLimits(groups_per_step=5, group_size=2, max_staleness_versions=3, total_steps=1000, adaptive=True)


def held_groups(books: WorkLedger) -> int:
    """In flight and in stock, when a worker has asked for all that it may sample."""
    books.grant(ask(100, holding=tuple(books.running)), 0.0)
    return len(books.running) + len(books.ready)


def train_from_plenty(books: WorkLedger, make_group, steps: int) -> None:
    """Every step finds all the groups in stock that may be."""
    for _ in range(steps):
        fill(books, make_group, [MIXED] * books.capacity(), step=books.step)
        assert books.take_batch(books.step)
        books.step += 1


def test_an_adaptive_pace_holds_less_where_the_learner_has_plenty(make_group):
    """From (eta + 1) B groups, a fifth of a batch less after three rich steps without a wait; and no less than that."""
    books = ledger(pace=ADAPTIVE)
    assert held_groups(books) == 4 * 5

    books = ledger(pace=ADAPTIVE)
    train_from_plenty(books, make_group, 3)
    books.adjust(short_wait_s=0.0, wait_s=0.0, period_s=60.0)

    assert held_groups(books) == 4 * 5 - 1


def test_an_adaptive_pace_holds_more_again_where_the_learner_waits_for_it(make_group):
    """A wait while workers might not sample more widens the window by half a batch; any other wait does not."""
    books = ledger(pace=ADAPTIVE)
    for _ in range(4):
        train_from_plenty(books, make_group, 3)
        books.adjust(short_wait_s=0.0, wait_s=0.0, period_s=60.0)
    assert books.window is not None
    assert books.window.groups == 16

    books.adjust(short_wait_s=0.0, wait_s=30.0, period_s=60.0)
    assert books.window.groups == 16
    books.adjust(short_wait_s=2.0, wait_s=2.0, period_s=60.0)
    assert books.window.groups == 18.5
    assert held_groups(books) == 19, "the group that the window has half a place for is let in"


def test_a_worker_that_gets_less_than_it_has_room_for_is_short():
    """Until it asks for no more than it gets, or would get if it served the newest weights."""
    books = ledger()
    books.grant(ask(100), 0.0)
    assert books.is_short
    books = ledger()
    books.grant(ask(8), 0.0)
    assert not books.is_short
    books.step = 1
    assert books.grant(ask(4, holding=tuple(books.running), serving=Version(0, 0)), 0.0) == []
    assert not books.is_short


EVENTS = st.lists(
    st.tuples(st.sampled_from(["ask", "give", "give up", "crash", "train", "offer"]), st.integers(0, 9)), max_size=60
)


@given(EVENTS, st.booleans(), st.integers(0, 3), st.booleans())
def test_every_position_is_trained_dropped_or_open(events, drop_uniform, hold_versions, adaptive):
    """Whatever happens, no position of the prompt order is lost and none is trained twice; nothing stale is trained."""
    books, step = ledger(pace=SamplingLimits(2, 2, 2, 1000, drop_uniform, 3.0, adaptive)), 0
    held: dict[str, int] = {}
    trained: list[int] = []
    for event, number in events:
        if event == "ask":
            items = books.grant(ask(number, holding=tuple(held)), 0.0)
            held |= {item.ticket: step for item in items}
        elif event == "give":
            for ticket in list(held)[:number]:
                books.accept([_group(ticket, held.pop(ticket), passed=number % 3)], "w", 0.0)
        elif event == "give up":
            books.write_off([StaleGroup(ticket=one, num_tokens=1) for one in list(held)[:number]], "w", 0.0)
            held = dict(list(held.items())[number:])
        elif event == "crash":
            held = {}
        elif event == "offer":
            books.offer([_state()] * number)
        else:
            batch = books.take_batch(step, lambda group: len(group.prompt_id) % 2 == 0, hold_versions)
            if batch is not None:
                trained += [int(group.ticket.split(".")[1]) for group in batch]
                assert all(step - group.oldest.step <= 2 for group in batch)
                books.adjust(short_wait_s=0.0, wait_s=0.0, period_s=1.0)
                step += 1
    open_positions = books.state()["open"]

    assert len(set(trained)) == len(trained)
    dropped = books.counts["stale_groups"] + books.counts["uniform_groups"]
    assert len(trained) + len(open_positions) + dropped == books.cursor + books.continuations.num_entered
    kept = {position for position in open_positions if books.continuations.at(position)}
    assert kept == {position for position in open_positions if position < 0}
    assert books.accepted + len(books.running) <= (step + 3) * 2

    books.grant(ask(0), 0.0)
    rest = books.grant(ask(100), 0.0)
    books.accept([_group(item.ticket, step, passed=1) for item in rest], "w", 0.0)
    assert books.take_batch(step), "a worker that samples whatever it may always makes the next batch possible"


def _state() -> Continuation:
    said = [SharedTurn(is_sampled=is_sampled, messages=()) for is_sampled in (True, False)]
    return Continuation(prompt_id="q", source="peer", turns=said, num_left=1)


def _group(ticket: str, step: int, passed: int) -> ScoredGroup:
    number = ticket.split(".")[1]
    return ScoredGroup(
        ticket=ticket,
        prompt_id="q" if number.startswith("-") else f"p{number}",
        continuation=_state() if number.startswith("-") else None,
        task="t",
        prompt_token_ids=pack_array([1], "i4"),
        answers=[made_answer(step, reward=float(place < passed)) for place in range(2)],
    )
