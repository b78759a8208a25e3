"""Episodes that no peer could say, since their agent rewrote the conversation or gave text without roles.

Their own policy trains on them, and no turn of them crosses.
"""

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from mrl.records.codec import decode, encode
from mrl.records.episodes import Message, Opening
from mrl.records.experience import Received, experience_decoder
from mrl.sharing.graft import choose_grafts
from mrl.sharing.peer_traces import peer_traces
from tests.sharing.test_teacher_turns import scores_of
from tests.support.drawn_episodes import CALL, own, told

ROW_ARRAYS = ("prompt_token_ids", "answer_token_ids", "advantages", "weights", "behaviour_logprobs", "is_trained")
LOOKED_UP = [own("hay", CALL), told("7"), own("reverse: 7")]
COMPACTED = (Message("system", "secret so far " * 20_000), told("go on"))
"""More text than crosses."""


@pytest.fixture(params=["is_rewritten", "is_bare"])
def mark(request):
    """Of what an agent begins a row with."""
    return request.param


@pytest.fixture
def rows_of(make, voices, mark):
    """A group of episodes of two rows each, begun by the template (t), or by an agent (r)."""

    def rows_of(kinds, rewards):
        answers = []
        for number, (kind, reward) in enumerate(zip(kinds, rewards, strict=True)):
            answer = voices["own"].played(LOOKED_UP, reward=reward, seed=number)
            first, given, last = answer.segments
            how = {mark: True, "messages": COMPACTED} if kind == "r" else {}
            given = structs.replace(given, begins_row=kind in "tr", **how)
            said = f"episode {number}".encode()
            answers.append(structs.replace(answer, segments=[first, given, last], completion=said))
        opening = Opening((Message("user", "guess"),))
        return structs.replace(make.group(list(rewards)), answers=answers, opening=opening)

    return rows_of


@pytest.fixture
def context(make_context, voices):
    """Of a policy that has episodes itself."""
    return replace(make_context(), renderer=voices["own"])


def published(regime, group, make):
    """What goes over the wire of a group."""
    return [decode(encode(one), experience_decoder) for one in regime.publish(group, make.author())]


def test_a_success_that_was_rewritten_does_not_cross(build, context, make, rows_of, step_of):
    """The next one does; it is trained on as ever."""
    regime = build("sgt", context)
    group = rows_of("rrt", [1.0, 1.0, 1.0])
    (record,) = published(regime, group, make)
    (alone,) = published(regime, rows_of("..t", [0.0, 0.0, 1.0]), make)
    assert record.turns == alone.turns
    assert published(regime, rows_of("rr", [1.0, 0.0]), make) == []
    absorbed = step_of(regime, [rows_of("rr..", [1.0, 0.0, 0.0, 1.0])])
    expected = step_of(build("independent", context), [rows_of("rr..", [1.0, 0.0, 0.0, 1.0])])
    assert [row.num_rows for row in absorbed.examples] == [2, 2, 1, 1]
    for one, other in zip(absorbed.examples, expected.examples, strict=True):
        assert all(np.array_equal(getattr(one, field), getattr(other, field)) for field in ROW_ARRAYS)


def test_a_success_that_was_rewritten_is_no_state_to_go_on_from(build, context, make, rows_of):
    """The next one is."""
    regime = build("prefix", context)
    (record,) = published(regime, rows_of("rrt", [1.0, 1.0, 1.0]), make)
    (alone,) = published(regime, rows_of("..t", [0.0, 0.0, 1.0]), make)
    assert record.turns == alone.turns
    assert published(regime, rows_of("rr", [1.0, 0.0]), make) == []


@pytest.mark.parametrize("name", ["prp", "hacpo", "graft"])
def test_of_a_whole_group_only_the_reward_of_such_an_episode_crosses(name, build, context, make, rows_of):
    """Baselines need it. No word and no token of it is there, and no row is made of it; its neighbours are as ever."""
    regime, rewards = build(name, context), [1.0, 0.0, 0.5]
    group = rows_of("t.r", rewards)
    (record,) = published(regime, group, make)
    (plain,) = published(regime, rows_of("t..", rewards), make)
    assert [answer.reward for answer in record.answers] == rewards
    assert [answer.advantage for answer in record.answers] == [answer.advantage for answer in plain.answers]
    assert [len(answer.turns) for answer in record.answers] == [3, 3, 0]
    assert record.answers[:2] == plain.answers[:2]
    assert b"secret" in encode(group)
    assert b"secret" not in encode(record)
    (traces,) = peer_traces([record], context, needs_trace=True)
    assert [trace.rejected for trace in traces] == ["", "", "withheld"]
    values = context.recorder.record([], {})
    assert values == {"align/rows/own": 3, "align/rejected_share/own": 0, "align/rejected/withheld/own": 1}
    assert [trace.reward for trace in traces] == rewards


@pytest.mark.parametrize(("kinds", "sources"), [("rr.", ["own"]), ("rt.", ["peer"] * 2), ("tt.", ["peer"] * 3)])
def test_a_peers_group_is_grafted_for_a_success_that_crosses(kinds, sources, build, context, make, rows_of, step_of):
    """Without any the own rows stay."""
    regime = build("graft", context, balance=False)
    (record,) = published(regime, rows_of(kinds, [1.0, 1.0, 0.0]), make)
    theirs = [Received(structs.replace(record, source="peer", prompt_id="p"), 0)]
    absorbed = step_of(regime, [rows_of("..", [0.0, 0.5])], theirs)
    assert absorbed.counts["sharing/grafted_prompts"] == (sources[0] == "peer")
    assert sorted({row.source for row in absorbed.examples}) == sorted(set(sources))
    assert len(absorbed.examples) == (len(sources) if sources[0] == "peer" else 2)


@pytest.mark.parametrize(("kind", "is_grafted"), [("r", False), ("t", True)])
def test_balance_counts_what_the_peer_would_graft(kind, is_grafted, build, context, make, rows_of):
    """Of two groups of which one was left here and one there, the one that may go back is told."""
    records = [
        structs.replace(one, source="peer")
        for rewards in ([1.0, 0.0], [0.0, 0.0])
        for one in published(build("graft", context), rows_of("..", rewards), make)
    ]
    groups = [rows_of("..", [0.0, 0.0]), rows_of(kind + ".", [1.0, 0.0])]
    assert choose_grafts(groups, [[one] for one in records], balance=True) == ({0: records[0]} if is_grafted else {})


def test_rewards_alone_cross_as_ever(build, context, make, rows_of):
    """They need no row."""
    records = [published(build("xgrpo", context), rows_of(kinds, [1.0, 0.0]), make) for kinds in ("rr", "..")]
    assert records[0][0].rewards == records[1][0].rewards == [1.0, 0.0]


@pytest.mark.parametrize("name", ["sgt", "prefix", "prp", "hacpo", "graft", "rlad", "copd"])
def test_rows_that_a_template_begins_change_nothing_on_the_wire(name, build, context, make, rows_of):
    """Bit for bit what an episode of one row gives."""
    parameters = {"rl_steps": 0} if name == "copd" else {}
    regime = build(name, context, **parameters)
    wire = [
        [encode(one) for one in regime.publish(structs.replace(rows_of(kinds, [1.0, 0.0]), ticket="t"), make.author())]
        for kinds in ("tt", "..")
    ]
    assert wire[0] == wire[1] != []


def test_an_episode_without_a_branch_costs_no_byte_for_it(rows_of, mark):
    """Nor does one of one turn, between a worker and its learner."""
    group = rows_of("t.", [1.0, 0.0])
    assert b"is_rewritten" not in encode(group)
    assert b"is_bare" not in encode(group)
    assert mark.encode() in encode(rows_of("r.", [1.0, 0.0]))


@pytest.mark.parametrize(("name", "parameters"), [("rlad", {}), ("copd", {"rl_steps": 0, "min_agreement": 0.0})])
def test_a_teacher_is_not_told_of_it_and_scores_the_others(
    name, parameters, build, context, make, rows_of, step_of, voices, record
):
    """It has the plain ratio, and is none that the teacher was asked about."""
    regime, group = build(name, context, **parameters), rows_of("tr.", [1.0, 0.0, 0.5])
    (request,) = published(regime, group, make)
    (plain,) = published(regime, rows_of("t..", [1.0, 0.0, 0.5]), make)
    assert b"secret" not in encode(request)
    assert [len(answer.turns) for answer in request.answers] == [3, 0, 3]
    assert [request.answers[n] for n in (0, 2)] == [plain.answers[n] for n in (0, 2)]
    scores = scores_of(request, voices["bytes"])
    assert [one is None for one in scores] == [False, False, True, False, False]
    absorbed = step_of(regime, [group], [make.score(request.record_id, scores)])
    assert [row.teacher_logprobs is not None for row in absorbed.examples] == [True, False, True]
    assert [row.num_rows for row in absorbed.examples] == [2, 2, 1]
    counts = absorbed.counts
    assert (counts["sharing/asked_rows"], counts["sharing/scored_rows"], counts["sharing/unscored_rows"]) == (2, 2, 0)
    assert counts["sharing/hit_rate"] == 1.0
    values = record(regime, absorbed)
    assert (values["align/rows/peer"], values["align/rejected_share/peer"]) == (2.0, 0.0)
    assert step_of(regime, [group]).counts["sharing/absent_rows"] == 2.0, "no score came"


@pytest.mark.parametrize(("name", "parameters"), [("rlad", {}), ("copd", {"rl_steps": 0})])
def test_a_group_of_nothing_else_asks_no_teacher(name, parameters, build, context, make, rows_of, step_of):
    """It waits for nobody."""
    regime, group = build(name, context, **parameters), rows_of("rr", [1.0, 0.0])
    assert published(regime, group, make) == []
    assert regime.asks(group) == []
    assert regime.is_settled(group)
    absorbed = step_of(regime, [group])
    assert absorbed.counts["sharing/asked_rows"] == 0.0
    assert [row.num_rows for row in absorbed.examples] == [2, 2]
