"""Records of a run that ended, as regimes take them: like those of a peer, save where a peer would answer back."""

from dataclasses import replace

import numpy as np
import pytest

from mrl.config.schema import RunConfig
from mrl.errors import ConfigError
from mrl.sharing.context import sharing_context
from mrl.sharing.regimes import REGIMES, check_sharing, replayed_kinds

SOURCE = "replay.old"
READERS = sorted(name for name, kind in REGIMES.items() if kind.replays)


@pytest.fixture
def alone(make_context):
    """The context of a policy that learns without a peer, beside the records of a run that ended."""
    return replace(make_context(peers=()), replayed=(SOURCE,))


@pytest.fixture
def told(make, peer):
    """What the source said about a prompt, for each regime that reads it."""
    of_group = make.sampled(peer, [1.0, 0.0], texts=[b"copy: hay", b"z"], logprobs=-0.5)
    rollout = make.rollout(of_group, peer, source=SOURCE)
    return {
        "prp": rollout,
        "hacpo": rollout,
        "graft": rollout,
        "xgrpo": make.value([1.0, 0.0], source=SOURCE),
        "sgt": make.success(b"copy: hay", source=SOURCE),
    }


def rows_of(absorbed):
    """Everything of the rows that a learner trains on."""
    return [
        (row.component, row.source, row.answer_token_ids.tolist(), row.advantages.tolist(), row.weights.tolist())
        for row in absorbed.examples
    ]


def test_every_reader_is_covered():
    """Scores answer a question, and `independent` asks nobody."""
    assert READERS == ["graft", "hacpo", "prp", "sgt", "xgrpo"]


@pytest.mark.parametrize("name", READERS)
def test_what_is_replayed_is_what_the_regime_asks_for(name, build):
    """The kinds by which a run is found to be of use are those of the regime's own question."""
    assert set(REGIMES[name].replays) == set(build(name).asking.kinds)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("rewards", [[0.0, 0.0], [0.0, 1.0]])
def test_a_replayed_record_trains_as_a_peers_would(name, rewards, alone, told, build, make_context, make, step_of):
    """The same rows under the same denominators, counted under its own name."""
    parameters = {"balance": False} if name == "graft" else {}
    beside = make_context(peers=(SOURCE,))
    group = make.group(rewards)
    found = step_of(build(name, alone, **parameters), [group], [told[name]])
    wanted = step_of(build(name, beside, **parameters), [group], [told[name]])
    assert rows_of(found) == rows_of(wanted)
    assert found.denominators == wanted.denominators
    assert found.counts == wanted.counts
    if name != "sgt":
        assert found.counts[f"sharing/hit_rate_from/{SOURCE}"] == 1.0


def test_graft_takes_a_group_without_balance(alone, told, build, make_context, make, step_of):
    """Nobody grafts onto a run that ended, so its groups are not held to as many as that; a live peer's are."""
    groups = [make.group([0.0, 0.0])]
    assert step_of(build("graft", alone), groups, [told["graft"]]).counts["sharing/grafted_prompts"] == 1
    beside = make_context(peers=(SOURCE,))
    assert step_of(build("graft", beside), groups, [told["graft"]]).counts["sharing/grafted_prompts"] == 0


def test_groups_wait_for_what_is_on_its_way_within_their_patience(alone, told, build, make):
    """The answer to a question takes a moment: a prompt is settled when it is there, and is never waited for longer."""
    regime = build("prp", alone)
    group = make.group([0.0, 0.0])
    regime.asks(group)
    assert not regime.is_settled(group)
    regime.hear([told["prp"]], step=0)
    assert regime.is_settled(group)
    assert regime.patience.wait_s == 1.0
    assert regime.asking.limit == 1


def test_peers_and_replayed_sources_are_asked_for_together(make_context, build):
    """One group of each."""
    both = replace(make_context(peers=("a", "b")), replayed=("replay.a", "replay.b"))
    assert build("prp", both).asking.limit == 4


def test_sources_of_a_configuration(receiver):
    """Named after the prefix; there are none without a replay."""
    tables = {
        "run": {"name": "r", "steps": 1},
        "tasks": {"t": {"source": "words", "dataset": "reverse"}},
        "policies": {"b": {}},
        "sharing": {"regime": "sgt", "replay": {"run": "runs/old", "policies": ["a", "b"], "prefix": "old"}},
    }
    config = RunConfig.model_validate(tables)
    assert sharing_context(config, "b", receiver).replayed == ("old.a", "old.b")
    plain = config.model_copy(update={"sharing": {"regime": "sgt"}})
    assert sharing_context(plain, "b", receiver).replayed == ()


@pytest.mark.parametrize(
    ("replay", "told"),
    [
        ({"runs": "x"}, r"t: sharing\.replay\.runs: unknown key; got 'runs'; .*did you mean sharing\.replay\.run\?"),
        (
            {"run": "x", "prefix": "Old."},
            r"t: sharing\.replay\.prefix: invalid value; got 'Old\.'; wanted lowercase letters",
        ),
        ({}, r"t: sharing\.replay\.run: invalid value"),
        ("runs/old", r"t: sharing\.replay: not a table; got 'runs/old'; wanted \[sharing\.replay\]"),
    ],
)
def test_a_table_that_is_wrong_is_told_in_one_line(replay, told):
    """Under any regime."""
    with pytest.raises(ConfigError, match=told):
        check_sharing({"regime": "sgt", "replay": replay}, "t")


def test_kinds_of_the_table():
    """Those of the regime, and none where nothing is replayed or the regime reads nothing of it."""
    replay = {"run": "runs/old"}
    assert replayed_kinds({"regime": "sgt", "replay": replay}) == ("outcome", "episode")
    assert replayed_kinds({"regime": "sgt"}) == ()
    assert replayed_kinds({"regime": "rlad", "replay": replay}) == ()
    assert replayed_kinds({"replay": replay}) == ()


def test_rewards_of_a_run_that_ended_move_the_baseline(alone, told, build, make, step_of):
    """xgrpo, by hand: own rewards 0, 0 and replayed 1, 0 have mean 1/4 and std 1/2."""
    [first, second] = step_of(build("xgrpo", alone), [make.group([0.0, 0.0])], [told["xgrpo"]]).examples
    np.testing.assert_allclose([first.advantages[0], second.advantages[0]], [-0.5, -0.5], rtol=1e-4)
