import json

import pytest

from mrl.metrics.names import is_known
from mrl.sharing.peer_groups import PeerGroups


@pytest.fixture
def table():
    """A table of values with the given bounds."""

    def table(*, peers=("a", "b"), **how) -> PeerGroups:
        return PeerGroups("value", policy="own", peers=peers, **({"max_age_versions": 3} | how))

    return table


def test_newest_record_of_every_peer_is_kept(table, make):
    """An older one that comes later does not replace it; of equals the first stays."""
    groups = table()
    assert groups.open(make.group([0])) == ["p"]
    groups.hear([make.value([1], source="b", step=4), make.value([2], source="a", step=1)])
    groups.hear([make.value([3], source="b", step=3), make.value([4], source="a", step=2)])
    groups.hear([make.value([5], source="a", step=2)])
    assert [item.record.rewards for item in groups.take("p")] == [[4], [1]]


def test_settled_when_every_peer_has_answered(table, make):
    """One of two is not enough; a prompt that nobody asks about waits for nothing, nor does one without peers."""
    groups = table()
    assert groups.is_settled("p")
    groups.open(make.group([0]))
    assert not groups.is_settled("p")
    groups.hear([make.value([1], source="a")])
    assert not groups.is_settled("p")
    groups.hear([make.value([1], source="b")])
    assert groups.is_settled("p")
    alone = table(peers=())
    alone.open(make.group([0]))
    assert alone.is_settled("p")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"source": "own"}, "own"),
        ({"age": 4}, "stale"),
        ({"prompt_id": "q"}, "late"),
    ],
)
def test_what_is_of_no_use_is_counted(table, make, how, reason):
    """Own records, old ones, and those of prompts that are not open."""
    groups = table()
    groups.open(make.group([0]))
    groups.hear([make.value([1], **({"source": "a"} | how)), make.value([1], source="a", age=3)])
    counts = groups.take_counts()
    assert {name: n for name, n in counts.items() if "ignored" in name} == {f"regime/ignored_{reason}": 1}
    assert len(groups.take("p")) == 1
    assert not any("ignored" in name for name in groups.take_counts())


def test_records_of_another_kind_are_counted(table, make):
    """A success is no value."""
    groups = table()
    groups.open(make.group([0]))
    groups.hear([make.success()])
    assert groups.take_counts()["regime/ignored_other"] == 1
    assert groups.take("p") == []


def test_taking_closes_and_forgets(table, make):
    """What comes after the own group was trained is late; the prompt is told once, unless it is open again."""
    groups = table()
    for prompt_id in "pq":
        groups.open(make.group([0], prompt_id))
        groups.take(prompt_id)
    groups.hear([make.value([1], source="a")])
    assert groups.take_counts()["regime/ignored_late"] == 1
    groups.open(make.group([0], "q"))
    assert groups.take_forgotten() == ["p"]
    assert groups.take_forgotten() == []
    assert groups.prompt_ids == ["q"]


@pytest.mark.parametrize(("kind", "rewards"), [("value", [[1]]), ("rollout", [])])
def test_two_own_groups_on_a_prompt_get_the_same_rewards_and_no_answer_twice(make, receiver, kind, rewards):
    """Rewards are measured against, by every group that waits; answers are trained on, once."""
    groups = PeerGroups(kind, policy="own", peers=("a",), max_age_versions=3)
    for step in (1, 2):
        groups.open(make.group([0], step=step))
    shared = make.sampled(receiver, [1.0])
    groups.hear([make.value([1], source="a") if kind == "value" else make.rollout(shared, receiver, source="a")])
    assert len(groups.take("p")) == 1
    assert groups.prompt_ids == (["p"] if rewards else [])
    assert [item.record.rewards for item in groups.take("p")] == rewards
    assert (groups.prompt_ids, groups.take_forgotten()) == ([], ["p"])


def test_an_own_group_that_was_dropped_keeps_no_prompt_open(table, make):
    """Older than records may be: nobody trains on it."""
    groups = table()
    for step in (1, 2, 5):
        groups.open(make.group([0], step=step))
    groups.take("p")
    assert groups.prompt_ids == ["p"], "the groups of versions 2 and 5 wait"
    groups.open(make.group([0], "q", step=9))
    groups.take("p")
    assert groups.prompt_ids == ["q"], "the group of version 5 is too old by now"


def test_what_peers_said_to_dropped_groups_is_let_go(table, make):
    """Dynamic sampling drops groups for days, and nobody takes them: they leave when they are too stale to be trained.

    A group that has come too late for that leaves at once.
    """
    groups = table(max_staleness_versions=2)
    for step in range(50):
        for name in ("trained", "dropped"):
            groups.open(make.group([0], f"{name}{step}", step=step))
            groups.hear([make.value([1], f"{name}{step}", source="a", step=step)])
        assert len(groups.take(f"trained{step}")) == 1
    assert groups.prompt_ids == ["dropped47", "dropped48", "dropped49"]
    assert "dropped46" in groups.take_forgotten(), "the exchange need not send more of it"
    lone = table(max_staleness_versions=2)
    lone.open(make.group([0], "new", step=9))
    lone.take("new")
    lone.open(make.group([0], "late", step=6))
    assert (lone.prompt_ids, lone.is_settled("late"), lone.take("late")) == ([], True, [])


def test_table_is_bounded(table, make):
    """The least recently opened goes first; opening again makes a prompt young and keeps what was heard."""
    groups = table(max_prompts=2)
    groups.open(make.group([0], "a"))
    groups.hear([make.value([1], "a", source="a")])
    for prompt_id in "bac":
        groups.open(make.group([0], prompt_id))
    assert groups.prompt_ids == ["a", "c"]
    assert groups.take_forgotten() == ["b"]
    assert len(groups.take("a")) == 1


def test_rates_are_cumulative_and_survive_json(table, make):
    """Prompts with any answer over all asked, and the same per peer; a restored table counts on."""
    groups = table()
    assert "sharing/hit_rate" not in groups.take_counts()
    for prompt_id, sources in [("p", "ab"), ("q", "a"), ("r", ""), ("s", "")]:
        groups.open(make.group([0], prompt_id))
        groups.hear([make.value([1], prompt_id, source=source) for source in sources])
        groups.take(prompt_id)
    counts = groups.take_counts()
    assert (counts["sharing/asked_prompts"], counts["sharing/hit_prompts"]) == (4, 2)
    assert counts["sharing/hit_rate"] == 2 / 4
    assert counts["sharing/hit_rate_from/a"] == 2 / 4
    assert counts["sharing/hit_rate_from/b"] == 1 / 4
    assert (counts["sharing/hit_prompts_from/a"], counts["sharing/hit_prompts_from/b"]) == (2, 1)
    assert all(map(is_known, counts))
    restored = table()
    restored.restore(json.loads(json.dumps(groups.state())))
    for one in (groups, restored):
        one.open(make.group([0], "p"))
        one.take("p")
        assert one.take_counts() == counts | {
            **{"sharing/asked_prompts": 1, "sharing/hit_prompts": 0, "sharing/hit_rate": 2 / 5},
            **{"sharing/hit_rate_from/a": 2 / 5, "sharing/hit_rate_from/b": 1 / 5},
            **{"sharing/hit_prompts_from/a": 0, "sharing/hit_prompts_from/b": 0},
        }


@pytest.mark.parametrize(
    ("regime", "kind"), [("prp", "rollout"), ("hacpo", "rollout"), ("graft", "rollout"), ("xgrpo", "value")]
)
def test_readers_ask_for_every_prompt_and_wait_a_little(build, make_context, make, step_of, regime, kind):
    """They ask every peer on every prompt, hold a group as the table says, and forget it once it is trained."""
    context = make_context(peers=("a", "b"))
    reader = build(regime, context, max_age_versions=2, peer_hold_versions=3, peer_wait_s=0.5)
    assert (reader.asking.kinds, reader.asking.limit) == ((kind,), 2)
    assert reader.asking.max_age_versions == 2
    assert (reader.patience.hold_versions, reader.patience.wait_s) == (3, 0.5)
    group = make.group([1, 0])
    assert reader.asks(group) == reader.awaited() == ["p"]
    assert not reader.is_settled(group)
    absorbed = step_of(reader, [group])
    assert absorbed.forget == ["p"]
    assert reader.awaited() == []
    assert reader.is_settled(group)
