"""Groups in the engine: complete out of order, believed only when their weights are proved."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from structlog.testing import capture_logs

from mrl.engines.engine import FinishedAnswer, Generation, GenerationRequest
from mrl.errors import RoleFailed
from mrl.records.episodes import Message
from mrl.records.experience import SharedTurn
from mrl.records.finish import FinishReason
from mrl.records.rollouts import Continuation, StaleGroup, WorkItem
from mrl.records.version import Version, VersionSpan
from mrl.rollout.episode import PlayedEpisode
from mrl.rollout.groups_in_flight import MAX_UNBEGUN_IN_A_ROW, GroupsInFlight, UnprovedGroups, UnstartedGroups
from mrl.tasks.verify import Verdict

OLD, NEW = Version(0, 1), Version(0, 2)


def item(ticket: str, group_size: int = 2) -> WorkItem:
    return WorkItem(ticket=ticket, position=0, prompt_id="p", group_size=group_size, step=0)


def answer(*versions: Version) -> Generation:
    num_tokens = len(versions)
    spans = [VersionSpan(1, version) for version in versions]
    tokens = np.arange(num_tokens, dtype=np.int32)
    return Generation(tokens, np.zeros(num_tokens, np.float32), spans, FinishReason.STOP)


@pytest.fixture
def flights() -> GroupsInFlight:
    """Requests are made without a tokenizer or a pool: three prompt tokens, whatever the item."""

    def request(work: WorkItem, request_id: str) -> GenerationRequest:
        return GenerationRequest(request_id, np.arange(3, dtype=np.int32), np.zeros(work.group_size, np.uint64))

    return GroupsInFlight(SimpleNamespace(request=request))  # type: ignore[arg-type]


def test_a_long_answer_holds_up_its_own_group_alone(flights):
    """The second group is complete first, its answers in the order of their seeds."""
    first, second = flights.depart([item("a"), item("b")])
    early, late = answer(OLD), answer(OLD, OLD)

    assert flights.arrive([FinishedAnswer(first.request_id, 0, early)]) == []
    (complete,) = flights.arrive(
        [FinishedAnswer(second.request_id, 1, late), FinishedAnswer(second.request_id, 0, early)]
    )

    assert complete.item.ticket == "b"
    assert complete.generations == [early, late]
    assert (len(flights), flights.num_answers) == (1, 1)


def test_an_item_that_is_sampled_again_has_a_name_of_its_own(flights):
    """Answers to the lost request could not be taken for those to the new one."""
    (before,) = flights.depart([item("a")])
    lost = flights.lose()
    (after,) = flights.depart(lost)

    assert [work.ticket for work in lost] == ["a"]
    assert before.request_id != after.request_id
    with pytest.raises(KeyError):
        flights.arrive([FinishedAnswer(before.request_id, 0, answer(OLD))])


@pytest.mark.parametrize(("newest", "is_stale"), [(3, False), (4, True)])
def test_only_what_has_begun_too_long_ago_for_certain_is_given_up(flights, newest, is_stale):
    """Two versions of staleness are allowed; of "b" nobody knows when it began, nor of an episode without a turn."""
    first, second = flights.depart([item("a"), item("b")])
    flights.arrive(
        [FinishedAnswer(first.request_id, 1, answer(OLD, OLD, NEW)), FinishedAnswer(second.request_id, 1, answer())]
    )

    stale = flights.give_up_stale(Version(0, newest), 2)

    assert stale == ({first.request_id: StaleGroup(ticket="a", num_tokens=3)} if is_stale else {})
    assert len(flights) == (1 if is_stale else 2)


def test_a_group_waits_for_the_proof_of_every_version_in_it(flights):
    """One token under a version without canary holds the whole group."""
    unproved = UnprovedGroups()
    unproved.passed(OLD)
    old, mixed = flights.depart([item("a", 1), item("b", 1)])
    unproved.hold(flights.arrive([FinishedAnswer(mixed.request_id, 0, answer(OLD, NEW))]))
    unproved.hold(flights.arrive([FinishedAnswer(old.request_id, 0, answer(OLD))]))

    assert [flight.item.ticket for flight in unproved.release()] == ["a"]
    assert len(unproved) == 1
    unproved.passed(NEW)

    assert [flight.item.ticket for flight in unproved.release()] == ["b"]
    assert unproved.is_good(NEW)
    assert not unproved.is_good(None)


def test_states_that_lead_nowhere_end_no_run(flights):
    """However many in a row: the group is given up whole and says why, others that begin are none of its concern."""
    said = tuple(SharedTurn(is_sampled=own, messages=(Message("user", "a"),)) for own in (True, False))
    state = Continuation(prompt_id="p", source="peer", turns=list(said), num_left=1)
    beginnings = UnstartedGroups()
    for number in range(MAX_UNBEGUN_IN_A_ROW + 1):
        work = WorkItem(ticket=f"{number}", position=-number, prompt_id="p", group_size=2, step=0, continuation=state)
        (request,) = flights.depart([work])
        nothing, one = np.zeros(0, np.int32), answer(OLD)
        verdict = Verdict(0.0, "", failure="unequal", words="it said another thing")
        unequal = PlayedEpisode(
            nothing, nothing.astype(np.float32), [], FinishReason.LENGTH, nothing, [], verdict, "unequal"
        )
        complete = flights.arrive(
            [FinishedAnswer(request.request_id, 0, one), FinishedAnswer(request.request_id, 1, unequal)]
        )
        begun, given_up = beginnings.sort(complete)
        assert begun == []
        assert given_up == [StaleGroup(ticket=f"{number}", num_tokens=0, unbegun="unequal")]


def test_agents_that_are_always_silent_are_told_of(flights):
    """For how long no group has come and why, every 30 s, until one comes; while others come nothing is said."""
    now_s, numbers = [0.0], itertools.count()
    beginnings = UnstartedGroups(lambda: now_s[0])

    def came(at_s, *words):
        """What is told when a group comes, or is given up for each of these reasons."""
        now_s[0], complete = at_s, []
        for reason in words:
            (request,) = flights.depart([item(f"{next(numbers)}", 1)])
            nothing, verdict = np.zeros(0, np.int32), Verdict(0.0, "", failure="given_up", words=reason)
            silent = PlayedEpisode(
                nothing, nothing.astype(np.float32), [], FinishReason.LENGTH, nothing, [], verdict, "given_up"
            )
            complete += flights.arrive([FinishedAnswer(request.request_id, 0, silent if reason else answer(OLD))])
        with capture_logs() as said:
            beginnings.sort(complete)
        return [(one["since_s"], one["groups"], one["cure"]) for one in said if "no group completed" in one["event"]]

    silent, away = "the agent sent no request for 9 s", "the gateway closed the connection"
    assert came(29.0, silent, silent, away) == []
    assert came(31.0, "", silent) == [], "one came"
    assert came(60.0, silent) == []
    ((since_s, groups, cure),) = came(62.0, silent, away)
    assert (since_s, groups) == (31, f"3 abandoned: {silent}; 1 abandoned: {away}")
    assert "gateway.idle_s" in cure
    assert came(91.0) == []
    ((since_s, groups, _),) = came(93.0)
    assert since_s == 62
    assert came(200.0, "") == came(300.0, silent) == came(329.0) == [], "only from then on none has come"
    assert came(330.0)


@pytest.mark.parametrize(("ending", "ends_the_worker"), [("given_up", False), ("raised", True)])
def test_groups_that_were_given_up_from_outside_end_no_worker(flights, ending, ends_the_worker):
    """However many in a row, unlike environments that do not begin."""
    beginnings, nothing = UnstartedGroups(), np.zeros(0, np.int32)
    verdict = Verdict(0.0, "", failure=ending, words="the gateway closed the connection")
    empty = PlayedEpisode(nothing, nothing.astype(np.float32), [], FinishReason.LENGTH, nothing, [], verdict, ending)
    complete = []
    for number in range(MAX_UNBEGUN_IN_A_ROW):
        (request,) = flights.depart([item(f"{number}")])
        complete += flights.arrive(
            [FinishedAnswer(request.request_id, 0, answer(OLD)), FinishedAnswer(request.request_id, 1, empty)]
        )
    if ends_the_worker:
        with pytest.raises(RoleFailed, match="the gateway closed the connection"):
            beginnings.sort(complete)
        return
    begun, given_up = beginnings.sort(complete)
    assert (begun, len(given_up)) == ([], MAX_UNBEGUN_IN_A_ROW)
