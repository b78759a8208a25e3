"""Episodes of peers: what crosses of a success, and how a receiver imitates it."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from mrl.records.codec import decode, encode, pack_array
from mrl.records.episodes import EpisodeSegment, Message, ToolCall
from mrl.records.experience import EpisodeRecord, Received, SharedTurn, experience_decoder
from mrl.records.version import Version, VersionSpan
from mrl.sharing.peer_episodes import RenderedEpisode

CALL = ToolCall(name="look_up", arguments='{"key":"b"}')
SAID = [
    (2, True, Message(role="assistant", content="", tool_calls=(CALL,))),
    (3, False, Message(role="tool", content="7", name="look_up")),
    (2, True, Message(role="assistant", content="7")),
    (0, False, Message(role="user", content="right")),
]


def episode(answer, said=SAID):
    """The same answer in turns."""
    sizes = [size for size, is_sampled, _ in said if is_sampled]
    return structs.replace(
        answer,
        token_ids=pack_array(np.arange(sum(size for size, *_ in said)), "i4"),
        logprobs=pack_array(np.full(sum(sizes), -0.5), "f4"),
        versions=[VersionSpan(sum(sizes), Version(0, 2))],
        segments=[EpisodeSegment(num_tokens=n, is_sampled=own, messages=(message,)) for n, own, message in said],
        ending="done",
    )


@pytest.fixture
def make_episodes(make_group):
    """A group of episodes with these rewards."""

    def make(rewards, prompt_id="p"):
        group = make_group(rewards, prompt_id)
        return structs.replace(group, answers=[episode(answer) for answer in group.answers])

    return make


class Spelling:
    """Every message as so many tokens as it has characters; refuses what it is told to."""

    def __init__(self, refuses=""):
        self.refuses = refuses
        self.heard = []

    def spell(self, turns):
        self.heard.append(turns)
        if self.refuses:
            return self.refuses
        sizes = [max(1, len(turn.messages[0].content)) for turn in turns]
        return RenderedEpisode(
            np.arange(sum(sizes), dtype=np.int32), np.repeat([turn.is_sampled for turn in turns], sizes)
        )


@pytest.fixture
def sgt(build, make_context):
    """The regime of a policy that spells episodes so."""
    return lambda renderer, **parameters: build("sgt", replace(make_context(), renderer=renderer), **parameters)


def published(sgt, group, make) -> EpisodeRecord:
    (record,) = sgt(None).publish(group, make.author("peer"))
    return decode(encode(record), experience_decoder)


def test_a_success_crosses_as_turns_without_a_token(sgt, make_episodes, make):
    """Up to the policy's last turn, calls as structure, with the versions that sampled it."""
    record = published(sgt, make_episodes([0, 1]), make)

    assert isinstance(record, EpisodeRecord)
    assert record.turns == [
        SharedTurn(is_sampled=is_sampled, messages=(message,)) for _, is_sampled, message in SAID[:3]
    ]
    assert (record.reward, record.oldest, record.newest, record.verifier) == (
        1.0,
        Version(0, 2),
        Version(0, 2),
        "exact",
    )


def test_a_failed_start_state_is_rescued_by_a_peers_turns(sgt, make_episodes, make):
    """One imitation row: the peer's turns weigh alike, what the environment said weighs nothing."""
    renderer = Spelling()
    regime = sgt(renderer)
    own, record = make_episodes([0, 0]), published(sgt, make_episodes([1]), make)
    regime.asks(own)
    regime.hear([Received(record, 4)], step=0)

    absorbed = regime.absorb([own], step=0, rng=np.random.default_rng(0))

    (row,) = absorbed.examples
    assert renderer.heard == [record.turns]
    assert (row.component, row.source, row.behaviour_logprobs) == ("rescue", "peer", None)
    assert row.is_trained.tolist() == [True, False, True]
    assert row.weights.tolist() == [0.5, 0.5]
    assert row.advantages.tolist() == [0.0, 0.0]
    assert absorbed.counts["sharing/rescue_tokens"] == 2
    (shown,) = absorbed.rescued
    assert shown.completion.decode().splitlines()[-1] == "assistant: 7"
    assert (shown.turns, shown.prompt_token_ids) == (tuple(record.turns), tuple(row.prompt_token_ids.tolist()))
    assert regime.awaited() == []


@pytest.mark.parametrize("refuses", ["tool_calls", "too_long"])
def test_an_episode_that_cannot_be_said_is_counted(sgt, make_episodes, make, refuses):
    """The failure goes on waiting for another."""
    regime = sgt(Spelling(refuses))
    own = make_episodes([0, 0])
    regime.asks(own)
    regime.hear([Received(published(sgt, make_episodes([1]), make), 0)], step=0)

    absorbed = regime.absorb([own], step=0, rng=np.random.default_rng(0))

    counts = Counter(absorbed.counts)
    assert not absorbed.examples
    assert counts[f"regime/rejected_{refuses}"] == counts["align/rejected"] == 1
    assert regime.awaited() == ["p"]


def test_a_policy_without_episodes_takes_none(sgt, make_episodes, make):
    """It has no words for them."""
    regime = sgt(None)
    own = make_episodes([0, 0])
    regime.asks(own)
    regime.hear([Received(published(sgt, make_episodes([1]), make), 0)], step=0)

    assert regime.absorb([own], step=0, rng=np.random.default_rng(0)).counts["regime/rejected_no_spelling"] == 1


def test_own_episodes_are_rows_of_their_sampled_tokens(build, make_episodes):
    """Advantages, weights and behaviour are of these alone, and so is the length that divides."""
    (row, other) = build("independent").absorb([make_episodes([0, 1])], step=0, rng=np.random.default_rng(0)).examples

    for one in (row, other):
        assert one.answer_token_ids.size == 7
        assert one.is_trained.tolist() == [True, True, False, False, False, True, True]
        assert one.weights.tolist() == [0.25] * 4
        assert one.behaviour_logprobs.tolist() == [-0.5] * 4
        assert len(set(one.advantages.tolist())) == 1
