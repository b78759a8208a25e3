"""RLAD on episodes: what is sent of them, and a teacher's scores laid on own turns."""

from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec import UNSET, structs

from mrl.alignment.aligned_batch import AlignedBatch
from mrl.alignment.flags import Flag, Rejected
from mrl.records.codec import decode, encode, pack_array, unpack_array
from mrl.records.episodes import CUT, Message, Opening, ToolSpec
from mrl.records.experience import MAX_COMPLETION_BYTES, GivenAnswer, LikeliestUnits, TokenTrace, experience_decoder
from mrl.records.finish import FinishReason
from mrl.rollout.foreign_answers import foreign_episode
from mrl.sharing.peer_episodes import shared_turns
from mrl.sharing.rlad import request_id
from mrl.sharing.teacher_traces import teacher_trace
from tests.support.drawn_episodes import CALL, drawn, own, told
from tests.support.plain_voice import DirectRequestCodec

OPENING = Opening((Message("user", "guess"),), (ToolSpec("look_up", "Looks.", '{"type":"object"}'),))


LOOKED_UP = [own("hay", CALL), told("7"), own("reverse: 7"), told("right")]


@pytest.fixture
def played(make, voices):
    """An own group of episodes."""

    def played(*episodes, rewards=None, **how):
        rewards = rewards or [float(n % 2) for n in range(len(episodes))]
        answers = [
            voices["own"].played(said, reward=reward, seed=n, **how)
            for n, (said, reward) in enumerate(zip(episodes, rewards, strict=True))
        ]
        return structs.replace(make.group(rewards), answers=answers, opening=OPENING)

    return played


@pytest.fixture
def request_of(build, make_context, make, voices):
    """The regime of the student, and the request that it makes about a group."""

    def request_of(group):
        regime = build("rlad", replace(make_context(), renderer=voices["own"]))
        (request,) = regime.publish(group, make.author()) or [None]
        return regime, None if request is None else decode(encode(request), experience_decoder)

    return request_of


def scores_of(request, codec, seed=0):
    """What a teacher with this voice answers, its log-probs made up."""
    rng = np.random.default_rng(seed)
    found = []
    for answer in request.answers:
        said = foreign_episode(answer, codec.receiver, codec)
        for text in [None] * answer.num_scores if said is None else said.texts:
            found.append(
                text
                and TokenTrace(
                    byte_lengths=pack_array(text.byte_lengths, "i4"),
                    logprobs=pack_array(-rng.exponential(size=text.token_ids.size), "f4"),
                    special=pack_array(codec.receiver.table.is_special(text.token_ids), "u1"),
                    written=text.written,
                )
            )
    return found


def slow_logprobs(answer, scores, student, teacher):
    """Token by token: [S] what the teacher gave to the stretch between common ends that the own token lies in."""
    found, place, scores = [], 0, iter(scores)
    ids = unpack_array(answer.token_ids, "i4").tolist()
    for segment in answer.segments:
        turn, place = ids[place : place + segment.num_tokens], place + segment.num_tokens
        if not segment.is_sampled:
            continue
        score = next(scores)
        lengths, logprobs = unpack_array(score.byte_lengths, "i4"), unpack_array(score.logprobs, "f4")
        alike = student.text(segment.messages) == teacher.text(segment.messages)
        limit = len(student.text(segment.messages)) if alike else len(segment.messages[0].content.encode())
        ends = np.cumsum([len(student.receiver.completion_bytes([token])) for token in turn]).tolist()
        common = sorted({0} | {e for e in ends if e in np.cumsum(lengths).tolist() and e <= limit})
        for token, end in zip(turn, ends, strict=True):
            if token in student.receiver.eos_ids:
                found.append(float(logprobs[-1]) if alike and lengths[-1] == 0 else None)
                continue
            start = max((e for e in common if e < end), default=0)
            stop = min((e for e in common if e >= end), default=None)
            told = zip(logprobs, np.cumsum(lengths).tolist(), lengths, strict=True)
            found.append(None if stop is None else sum(float(x) for x, e, n in told if n and start < e <= stop))
    return found


@pytest.mark.parametrize("teacher", ["bytes", "bytes_other_calls", "own", "own_other_calls"])
def test_scores_of_turns_equal_their_slow_twin(played, request_of, voices, receiver, teacher):
    """Over drawn episodes, ended and cut ones: every own token has what the teacher gave to its span, or nothing."""
    rng = np.random.default_rng(3)
    for number in range(40):
        group = played(drawn(rng), own_turns := drawn(rng), ending=CUT if number % 4 == 0 else "done")
        _, request = request_of(group)
        scores = scores_of(request, voices[teacher], seed=number)
        split = request.answers[0].num_scores
        assert len(own_turns[::2]) == len(scores) - split
        for answer, of_answer in zip(group.answers, (scores[:split], scores[split:]), strict=True):
            trace = teacher_trace(answer, of_answer, "f", receiver)
            expected = slow_logprobs(answer, of_answer, voices["own"], voices[teacher])
            if trace is None:
                assert set(expected) == {None}
                continue
            assert [None if np.isnan(x) else pytest.approx(x, rel=1e-6) for x in trace.logprobs] == expected
            assert (np.diff(trace.spans) >= 0).all()
            sizes = np.cumsum([segment.num_tokens for segment in answer.segments if segment.is_sampled])
            turns = np.repeat(np.arange(sizes.size), np.diff(sizes, prepend=0))
            held = {(span, turn, str(x)) for span, turn, x in zip(trace.spans, turns, trace.logprobs, strict=True)}
            assert len(held) == trace.spans[-1] + 1, "a span lies in one turn, and its tokens have one score"
            nats = sum(unpack_array(score.logprobs, "f4").astype(float).sum() for score in of_answer)
            assert trace.aligned.peer_logprob.item() == pytest.approx(nats)
            spans, dropped = trace.aligned.span_logprob.sum(), trace.aligned.dropped_logprob.item()
            assert spans + dropped == pytest.approx(nats)


def units_of(score, number):
    """A teacher's units of one turn: "y" at every place, and how likely says which turn and which place it is."""
    size = len(score.special)
    nats = pack_array([-1.0 - number - place / 100 for place in range(size)], "f4")
    return LikeliestUnits(units=[b"y"], places=pack_array([0] * size, "i4"), logprobs=nats)


def slow_places(answer, scores, student, teacher):
    """Token by token: [S] turn, and place in the teacher's turn of the one token that stands for the own one alone."""
    found, ids = [], iter(unpack_array(answer.token_ids, "i4").tolist())
    turns = [(one, [next(ids) for _ in range(one.num_tokens)]) for one in answer.segments]
    for number, ((segment, turn), score) in enumerate(
        zip([one for one in turns if one[0].is_sampled], scores, strict=True)
    ):
        lengths = unpack_array(score.byte_lengths, "i4").tolist()
        alike = student.text(segment.messages) == teacher.text(segment.messages)
        limit = len(student.text(segment.messages)) if alike else len(segment.messages[0].content.encode())
        theirs = {(sum(lengths[:n]), sum(lengths[: n + 1])): n for n, size in enumerate(lengths) if size}
        at = 0
        for token in turn:
            start, at = at, at + len(student.receiver.completion_bytes([token]))
            place = theirs.get((start, at)) if at <= limit else None
            if token in student.receiver.eos_ids:
                place = len(lengths) - 1 if alike and lengths[-1] == 0 else None
            found.append(None if place is None else (number, place))
    return found


@pytest.mark.parametrize("teacher", ["bytes", "bytes_other_calls", "own", "own_other_calls"])
def test_units_of_turns_equal_their_slow_twin(played, request_of, voices, receiver, teacher):
    """They stand where one own token is one of the teacher's, in the turn of which they were told."""
    rng, unit = np.random.default_rng(5), receiver.id_of(b"y", opens=False)
    seen = set()
    for number in range(40):
        group = played(drawn(rng), drawn(rng), ending=CUT if number % 4 == 0 else "done")
        _, request = request_of(group)
        split, scores = request.answers[0].num_scores, scores_of(request, voices[teacher], seed=number)
        for answer, of_answer in zip(group.answers, (scores[:split], scores[split:]), strict=True):
            told_units = [None if rng.random() < 0.3 else units_of(score, n) for n, score in enumerate(of_answer)]
            trace = teacher_trace(answer, of_answer, "f", receiver, told_units)
            expected = slow_places(answer, of_answer, voices["own"], voices[teacher])
            expected = [None if one is None or told_units[one[0]] is None else one for one in expected]
            seen |= {one is None for one in expected}
            if trace is None or trace.units is None:
                assert set(expected) <= {None}
                continue
            for one, ids, nats in zip(expected, trace.units.token_ids, trace.units.logprobs, strict=True):
                assert ids[np.isfinite(nats)].tolist() == ([] if one is None else [unit])
                assert nats[np.isfinite(nats)].tolist() == (
                    [] if one is None else [pytest.approx(-1.0 - one[0] - one[1] / 100)]
                )
    assert seen == {True, False}


def test_equal_tokenizers_and_calls_score_token_by_token(played, request_of, voices, receiver):
    """Bit for bit: no span joins two tokens, nothing is dropped."""
    group = played(LOOKED_UP, LOOKED_UP)
    scores = scores_of(request_of(group)[1], voices["own"])
    trace = teacher_trace(group.answers[0], scores[:2], "f", receiver)
    assert trace.logprobs.tobytes() == b"".join(score.logprobs for score in scores[:2])
    assert trace.spans.tolist() == list(range(trace.logprobs.size))
    assert trace.aligned.dropped_tokens.tolist() == [0]


@pytest.mark.parametrize("teacher", ["bytes", "own"])
@pytest.mark.parametrize("ending", ["done", CUT])
def test_an_episode_of_one_turn_is_scored_as_the_answer(played, request_of, voices, receiver, teacher, ending):
    """Bit for bit, and the batch that the recorder gets too."""
    text = "reverse: yah copy"
    group = played([own(text)], [own(text)], ending=ending)
    scores = scores_of(request_of(group)[1], voices[teacher])
    (episode, _), reason = group.answers, FinishReason.LENGTH if ending == CUT else FinishReason.STOP
    plain = structs.replace(episode, segments=[], ending="", completion=text.encode(), finish_reason=reason)
    found, expected = (teacher_trace(one, scores[:1], "f", receiver) for one in (episode, plain))
    assert (found.logprobs.tobytes(), found.spans.tobytes()) == (expected.logprobs.tobytes(), expected.spans.tobytes())
    for field in fields(AlignedBatch):
        one, other = getattr(found.aligned, field.name), getattr(expected.aligned, field.name)
        assert np.array_equal(one, other), field.name
        assert field.name == "reject_reason" or one.dtype == other.dtype, field.name


def test_a_call_that_the_teacher_writes_otherwise_has_no_score(played, request_of, voices, receiver):
    """Its content has one; the teacher's call and its end are booked as dropped, and the next turn is scored whole."""
    group = played(LOOKED_UP, LOOKED_UP)
    scores = scores_of(request_of(group)[1], voices["bytes_other_calls"])
    trace = teacher_trace(group.answers[0], scores[:2], "f", receiver)
    first = group.answers[0].segments[0].num_tokens
    content = len(voices["own"].rest(b"hay", is_begun=False, is_ended=False))
    assert np.isfinite(trace.logprobs).tolist() == [n < content or n >= first for n in range(trace.logprobs.size)]
    call = len(voices["bytes_other_calls"].text([LOOKED_UP[0]])) - len("hay")
    assert trace.aligned.dropped_tokens.tolist() == [call + 1]


def test_a_token_across_the_end_of_the_content_has_no_score(peer, receiver):
    """ "copy:| hay" has its content "copy: h" end within a token: what the teacher gave behind "copy:" is dropped."""
    codec, teacher = DirectRequestCodec(receiver, "ay{name}{arguments}"), DirectRequestCodec(peer)
    answer = codec.played([own("copy: h", CALL)])
    given = GivenAnswer(completion=b"", finish_reason=FinishReason.STOP, turns=shared_turns(answer))
    scores = scores_of(SimpleNamespace(answers=[given]), teacher)
    trace = teacher_trace(answer, scores, "f", receiver)
    ends = np.cumsum([len(receiver.completion_bytes([token])) for token in unpack_array(answer.token_ids, "i4")])
    assert 5 in ends
    assert 7 not in ends
    assert np.isfinite(trace.logprobs).tolist() == (ends <= 5).tolist()
    assert trace.aligned.dropped_tokens.tolist() == [len(unpack_array(scores[0].byte_lengths, "i4")) - 5]


def test_what_is_no_text_ends_what_is_scored_of_its_turn(played, request_of, voices, receiver):
    """The message has a mark in its place, and the teacher scores that; own tokens before it have their scores."""
    text, half = "reverse: \ufffd yah", voices["own"].rest("é".encode(), is_begun=False, is_ended=False)[:1]
    group = played(LOOKED_UP, [own(text), told("7"), own("h")])
    scores = scores_of(request_of(group)[1], voices["bytes"])[2:]
    begun = voices["own"].rest(b"reverse: ", is_begun=False, is_ended=False)
    first = np.concatenate([begun, half, voices["own"].rest(b" yah", is_begun=False, is_ended=True)])
    answer = group.answers[1]
    rest = unpack_array(answer.token_ids, "i4")[answer.segments[0].num_tokens :]
    segments = [structs.replace(answer.segments[0], num_tokens=first.size), *answer.segments[1:]]
    ids, sampled = np.concatenate([first, rest]), first.size + segments[2].num_tokens
    torn = structs.replace(
        answer,
        token_ids=pack_array(ids, "i4"),
        logprobs=pack_array([-1.0] * sampled, "f4"),
        segments=segments,
    )
    trace = teacher_trace(torn, scores, "f", receiver)
    assert np.isfinite(trace.logprobs).tolist() == [n < begun.size or n >= first.size for n in range(sampled)]
    expected = unpack_array(scores[0].logprobs, "f4")[: len(b"reverse: ")].astype(float).sum()
    assert trace.aligned.span_logprob[: trace.spans[begun.size - 1] + 1].sum() == pytest.approx(expected)


def test_nothing_that_a_teacher_sends_ends_the_learner(receiver, voices):
    """Arrays that fit the text or do not: a trace, a reason, or none."""
    rng = np.random.default_rng(1)
    seen = set()
    for number in range(1500):
        said = [own(content) for content in rng.choice(["", "h", "reverse: yah", "naïve"], size=2)]
        answer = voices["own"].played([said[0], told("7"), said[1]], ending=CUT if number % 3 == 0 else "done")
        scores = []
        for message in said:
            lengths = rng.integers(0, 4, rng.integers(0, 5))
            if lengths.size and rng.random() < 0.7:
                lengths[:] = 0
                lengths[rng.integers(lengths.size)] = len(message.content.encode())
            scores.append(
                TokenTrace(
                    byte_lengths=pack_array(lengths, "i4"),
                    logprobs=pack_array(-rng.exponential(size=lengths.size), "f4"),
                    special=pack_array(rng.integers(0, 2, lengths.size), "u1"),
                    written=bytes(rng.integers(0, 2)),
                )
            )
        seen.add(type(teacher_trace(answer, scores, "f", receiver)).__name__)
    assert seen == {"TeacherTrace", "Rejected", "NoneType"}


@pytest.mark.parametrize(("lengths", "special"), [([0], [0]), ([0, 0], [0, 1]), ([], [])])
def test_a_score_of_an_empty_turn_is_dropped_whatever_it_holds(receiver, voices, lengths, special):
    """An end alone stands for no text: nothing that a peer tells of it can be laid on it, or end the learner."""
    answer = voices["own"].played([own(""), told("7"), own("hay")])
    empty = TokenTrace(
        byte_lengths=pack_array(lengths, "i4"),
        logprobs=pack_array([-1.0] * len(lengths), "f4"),
        special=pack_array(special, "u1"),
    )
    trace = teacher_trace(answer, [empty, None], "f", receiver)
    if lengths == [0, 0]:  # a special and an end: the end is scored
        assert np.isfinite(trace.logprobs).tolist() == [True] + [False] * (answer.num_sampled_tokens - 1)
    else:
        assert trace in (None, Rejected("lengths"))


def test_a_turn_without_a_score_costs_itself(played, request_of, voices, receiver):
    """The others keep theirs; where all are missing, the answer has none."""
    group = played(LOOKED_UP, LOOKED_UP)
    second = scores_of(request_of(group)[1], voices["bytes"])[1]
    trace = teacher_trace(group.answers[0], [None, second], "f", receiver)
    size = group.answers[0].segments[0].num_tokens
    assert np.isnan(trace.logprobs).tolist() == [n < size for n in range(trace.logprobs.size)]
    assert trace.aligned.flags.tolist() == [Flag(0)]
    assert teacher_trace(group.answers[0], [None, None], "f", receiver) is None


def test_a_turn_whose_score_lies_costs_the_answer(played, request_of, voices, receiver):
    """As a value, with its reason; a digest of another text is no lie: the content is what is left."""
    group = played(LOOKED_UP, LOOKED_UP)
    first, second, *_ = scores_of(request_of(group)[1], voices["bytes"])
    torn = structs.replace(second, logprobs=second.logprobs[:-4])
    assert teacher_trace(group.answers[0], [first, torn], "f", receiver) == Rejected("shape")
    other = structs.replace(first, written=b"?")
    trace = teacher_trace(group.answers[0], [other, second], "f", receiver)
    assert np.isnan(trace.logprobs).any()


def test_a_request_holds_turns_and_what_they_began_with(played, request_of):
    """Of each episode its turns up to the policy's last, as structure; the scores are counted by turn."""
    group = played(LOOKED_UP, [own("copy: hay")], ending=CUT)
    _, request = request_of(group)
    assert request.opening == OPENING
    assert [one.messages for one in request.answers[0].turns] == [(message,) for message in LOOKED_UP[:3]]
    assert [one.num_scores for one in request.answers] == [2, 1]
    assert {one.completion for one in request.answers} == {b""}
    assert {one.finish_reason for one in request.answers} == {FinishReason.LENGTH}


def test_a_request_about_answers_of_one_turn_costs_no_byte_more(build, make, receiver):
    """Its map has the keys that it always had."""
    (request,) = build("rlad").publish(make.sampled(receiver, [1, 0]), make.author())
    assert (request.opening, request.answers[0].turns) == (UNSET, [])
    assert b"opening" not in encode(request)
    assert b"turns" not in encode(request)


def test_rows_of_episodes_have_the_teachers_logprobs(played, request_of, make, voices, step_of):
    """[S] beside the own ones; scores that are too few for the turns are none."""
    group = played(LOOKED_UP, [own("copy: hay")])
    regime, request = request_of(group)
    scores = scores_of(request, voices["bytes"])
    absorbed = step_of(regime, [group], [make.score(request_id("own", group.ticket), scores)])
    assert absorbed.counts["sharing/scored_rows"] == 2
    for row in absorbed.examples:
        assert (
            row.teacher_logprobs.size
            == row.teacher_spans.size
            == row.num_trained_tokens
            < row.answer_token_ids.size + 1
        )
        assert np.isfinite(row.teacher_logprobs).all()
    again = structs.replace(group, ticket="again")
    few = step_of(regime, [again], [make.score(request_id("own", "again"), scores[:-1])])
    assert few.counts["sharing/absent_rows"] == 2
    assert [row.teacher_logprobs for row in few.examples] == [None, None]


def test_episodes_with_more_text_than_may_cross_are_not_sent(played, request_of):
    """Over all turns together."""
    long = [own("x" * (MAX_COMPLETION_BYTES // 2)), told("7"), own("y" * (MAX_COMPLETION_BYTES // 2))]
    assert request_of(played([own("hay")], long))[1] is None
