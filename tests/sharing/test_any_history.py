"""What holds for every regime, whatever the peers send: no exception, sound rows, known metrics, a lasting state."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrl.metrics.names import is_known
from mrl.records.codec import decode, encode, pack_array
from mrl.records.episodes import Message, ToolCall
from mrl.records.experience import (
    EpisodeRecord,
    OutcomeRecord,
    Received,
    RolloutRecord,
    ScoreRecord,
    SharedAnswer,
    SharedTurn,
    TokenTrace,
    TracedTurn,
    ValueRecord,
    experience_decoder,
)
from mrl.records.finish import FinishReason
from mrl.records.version import Version
from mrl.sharing.own_traces import digest_of
from mrl.sharing.recorder import SharingRecorder
from mrl.sharing.regimes import REGIMES
from mrl.sharing.rlad import request_id
from tests.support.plain_voice import DirectRequestCodec

TEXTS = st.sampled_from([b"", b"\xff", b"\xc3", b"reverse: yah", b"z" * 300, "caf\u00e9".encode(), b"a\xf0\x9f"])
REWARDS = st.sampled_from([0.0, 0.3, 1.0, -1e6, 1e6])
AGGREGATIONS = ["sequence_mean", "token_mean", "constant"]
MAX_ANSWER_TOKENS = 64
PROMPTS = st.sampled_from(["p", "q", "elsewhere"])
CALLS = st.sampled_from([(), (), (ToolCall("f", "{}"),)])
NO_DIGEST = st.just(b"")
MESSAGES = st.builds(Message, st.just("assistant"), st.sampled_from(["", "yah", "caf\u00e9", "z" * 80]), CALLS)


@st.composite
def traces(draw, digests=NO_DIGEST):
    """None, bytes at random, or arrays that may or may not fit the text."""
    kind = draw(st.sampled_from(["none", "torn", "arrays"]))
    if kind == "none":
        return None
    if kind == "torn":
        parts = [draw(st.binary(max_size=9)) for _ in range(3)]
        return TokenTrace(byte_lengths=parts[0], logprobs=parts[1], special=parts[2], token_ids=parts[0])
    size = draw(st.integers(0, 4))
    lengths = draw(st.lists(st.integers(-1, 12), min_size=size, max_size=size))
    numbers = draw(st.lists(st.sampled_from([-0.5, -1e30, math.nan, 3.0]), min_size=size, max_size=size))
    ids = draw(st.none() | st.lists(st.integers(-2, 400), min_size=size, max_size=size))
    return TokenTrace(
        byte_lengths=pack_array(lengths, "i4"),
        logprobs=pack_array(numbers, "f4"),
        special=pack_array([length == 0 for length in lengths], "u1"),
        noncanonical=draw(st.booleans()),
        token_ids=None if ids is None else pack_array(ids, "i4"),
        written=draw(digests),
    )


@st.composite
def played(draw):
    """Turns that may or may not make an episode, their traces as anything's."""
    said = st.tuples(MESSAGES) | st.just(()) | st.tuples(st.just(Message("user", "?")))
    digests = st.sampled_from([b"", b"?", digest_of(b"yah<f {}>"), digest_of(b"<f {}>")])
    size = draw(st.sampled_from([1, 1, 3, 3, 2]))
    return [
        TracedTurn(is_sampled=True, messages=draw(said | st.tuples(MESSAGES)), trace=draw(traces(digests)))
        if place % 2 == 0
        else TracedTurn(is_sampled=draw(st.sampled_from([False] * 9 + [True])), messages=(Message("user", "so"),))
        for place in range(size)
    ]


@st.composite
def peer_records(draw, fingerprint, request_ids):
    """A record of any kind that the wire lets through."""
    at = Version(0, draw(st.integers(0, 5)))
    tags = {
        **{"record_id": "r", "source": draw(st.sampled_from(["peer", "own", "stranger"])), "oldest": at, "newest": at},
        **{"fingerprint": draw(st.sampled_from([fingerprint, "f"])), "prompt_id": draw(PROMPTS), "task": "words"},
        "created_unix_s": 0.0,
    }
    said = {
        "completion": draw(TEXTS),
        "finish_reason": draw(st.sampled_from(FinishReason)),
        "reward": draw(REWARDS),
        "trace": draw(traces()),
    }
    answers = st.builds(
        SharedAnswer,
        completion=TEXTS,
        finish_reason=st.sampled_from(FinishReason),
        reward=REWARDS,
        advantage=REWARDS,
        trace=traces(),
        turns=st.just([]) | played(),
    )
    match draw(st.sampled_from(["outcome", "rollout", "rollout", "value", "score", "episode"])):
        case "episode":
            messages = st.tuples(st.builds(Message, st.sampled_from(["assistant", "user"]), st.text(max_size=3)))
            turns = st.builds(SharedTurn, is_sampled=st.booleans(), messages=st.just(()) | messages)
            told = draw(st.lists(turns, min_size=1, max_size=5))
            record = EpisodeRecord(**tags, turns=told, verifier="v", reward=draw(REWARDS))
        case "outcome":
            record = OutcomeRecord(**tags, **said, verifier="v")
        case "rollout":
            record = RolloutRecord(**tags, answers=draw(st.lists(answers, min_size=1, max_size=3)))
        case "value":
            record = ValueRecord(**tags, rewards=draw(st.lists(REWARDS, min_size=1, max_size=3)))
        case _:
            scores = draw(st.lists(traces(), min_size=1, max_size=3))
            record = ScoreRecord(**tags, request_id=draw(st.sampled_from(request_ids)), receiver="own", scores=scores)
    return Received(decode(encode(record), experience_decoder), draw(st.integers(0, 9)))


@pytest.fixture
def own_groups(make, receiver):
    """Two prompts: ids that are the texts, and ids that are not."""

    def own_groups(step, rewards):
        return [
            make.sampled(receiver, rewards[:2], "p", step=step),
            make.group(rewards[2:], "q", step=step, texts=[b"", b"\xff"]),
        ]

    return own_groups


class NotingRecorder(SharingRecorder):
    """Says besides of which prompts answers of peers were looked at."""

    def __init__(self):
        super().__init__()
        self.prompt_ids = set()

    def examine(self, answers):
        answers = list(answers)
        self.prompt_ids |= {answer.prompt_id for answer in answers}
        super().examine(answers)


def counted_by(component, absorbed, groups, looked_at):
    """What the component's kind of denominator says: own groups that were not replaced, and usable rows of peers."""
    replaced = looked_at if "grafted" in absorbed.denominators else set()
    lengths = [len(answer.token_ids) // 4 for g in groups if g.prompt_id not in replaced for answer in g.answers]
    if "cross" in absorbed.denominators:  # HACPO has a row for every own answer, and trains none to its EOS
        lengths = [row.num_trained_tokens for row in absorbed.examples if row.component == "policy_gradient"]
    num_rows = len(lengths) + absorbed.counts.get("sharing/peer_rows", 0)
    match component.denominator:
        case "rows":
            return num_rows
        case "tokens":
            return sum(lengths) + absorbed.counts.get("sharing/peer_tokens", 0)
        case "constant":
            return num_rows * MAX_ANSWER_TOKENS
        case "prompts":
            return len(groups)


def own_logprobs(absorbed):
    """As the training pass tells them of every row that a peer wrote or scored."""
    rows = {place: row for place, row in enumerate(absorbed.examples) if row.examined is not None}
    return {place: np.full(row.num_trained_tokens, -1.0, np.float32) for place, row in rows.items()}


def check(absorbed, components, groups, values, looked_at):
    """What the learner relies on."""
    names = {component.name for component in components}
    assert absorbed.denominators.keys() == names
    assert all(math.isfinite(value) and value >= 1 for value in absorbed.denominators.values())
    assert absorbed.expansion >= 1 or not groups
    assert not absorbed.counts.keys() & values.keys()
    assert all(is_known(name) and math.isfinite(value) for name, value in (absorbed.counts | values).items())
    for component in components:
        counted = counted_by(component, absorbed, groups, looked_at)
        assert absorbed.denominators[component.name] == max(1, counted), component
    for row in absorbed.examples:
        size = row.answer_token_ids.size if row.is_trained is None else int(row.is_trained.sum())
        assert row.is_trained is None or row.is_trained.shape == row.answer_token_ids.shape
        assert size or row.is_trained is None
        assert row.component in names
        assert row.advantages.shape == row.weights.shape == (size,)
        assert np.isfinite(row.advantages).all()
        assert np.isfinite(row.weights).all()
        for logprobs, spans in (
            (row.behaviour_logprobs, row.behaviour_spans),
            (row.teacher_logprobs, row.teacher_spans),
        ):
            assert logprobs is None or logprobs.shape == (size,)
            assert spans is None or (spans.shape == (size,) and spans[0] == 0 and set(np.diff(spans)) <= {0, 1})
        assert row.behaviour_logprobs is None or np.isfinite(row.behaviour_logprobs).all()
    examined = [row.examined for row in absorbed.examples if row.examined is not None]
    assert len(examined) == len(set(examined))
    assert not any(answer.rejected for answer in examined)
    assert all(row.examined is not None for row in absorbed.examples if row.source != "own")


@pytest.mark.parametrize("name", REGIMES)
def test_any_history(name, build, make_context, own_groups, make, receiver, record):
    """Two steps of anything; a regime restored between them from JSON does in the second what the original does."""

    @settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(data=st.data(), kl=st.sampled_from([None, 0.1]), aggregation=st.sampled_from(AGGREGATIONS))
    def history(data, kl, aggregation):
        def context():
            own = make_context(kl_coefficient=kl, aggregation=aggregation, max_answer_tokens=MAX_ANSWER_TOKENS)
            own = replace(own, recorder=NotingRecorder())
            return replace(own, renderer=DirectRequestCodec(receiver)) if name in ("prp", "hacpo", "graft") else own

        parameters = {"rl_steps": 0} if name == "copd" else {}
        regimes = [build(name, context(), **parameters)]
        for step in (0, 1):
            groups = own_groups(step, data.draw(st.lists(REWARDS, min_size=4, max_size=4)))
            request_ids = [request_id("own", group.ticket) for group in groups]
            received = data.draw(st.lists(peer_records(receiver.fingerprint, request_ids), max_size=4))
            found, told = [], []
            regimes[0].context.recorder.prompt_ids = set()
            for regime in regimes:
                assert all(regime.asks(group) in ([], [group.prompt_id]) for group in groups)
                for group in groups:
                    regime.publish(group, make.author())
                regime.hear(received, step=step)
                assert all(regime.is_settled(group) in (True, False) for group in groups)
                found.append(regime.absorb(groups, step=step, rng=np.random.default_rng(step)))
                told.append(record(regime, found[-1], own_logprobs(found[-1])))
            check(found[0], regimes[0].components, groups, told[0], regimes[0].context.recorder.prompt_ids)
            if step:
                assert_equal(*found)
                assert told[0] == told[1]
                assert regimes[0].state() == regimes[1].state()
            else:
                regimes.append(build(name, context(), **parameters))
                regimes[1].restore(json.loads(json.dumps(regimes[0].state())))
                assert set(regimes[1].awaited()) == set(regimes[0].awaited())

    history()


def assert_equal(one, other):
    """The same rows, denominators, counts and ends of waits."""
    assert (one.denominators, one.counts, list(one.forget)) == (other.denominators, other.counts, list(other.forget))
    assert len(one.examples) == len(other.examples)
    for mine, theirs in zip(one.examples, other.examples, strict=True):
        for name in set(type(mine).__slots__) - {"examined"}:
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), err_msg=name)
