"""Episodes of peers' groups: what crosses of their turns, and how a receiver aligns them, turn by turn."""

import tracemalloc
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from msgspec import structs

from mrl.alignment.aligned_batch import AlignedBatch
from mrl.records.chosen_experts import ChosenExperts
from mrl.records.codec import encode, pack_array, unpack_array
from mrl.records.episodes import CUT, EpisodeSegment
from mrl.records.experience import MAX_COMPLETION_BYTES, Received, SharedAnswer
from mrl.records.finish import FinishReason
from mrl.sharing.own_traces import digest_of
from mrl.sharing.peer_rollouts import peer_rewards
from mrl.sharing.peer_traces import behaviour_of, ended_text, peer_traces
from mrl.sharing.peer_turns import NOTHING_SHARED, UNTRACED
from tests.support.drawn_episodes import CALL, OTHER_CALLS, drawn, own, told

PROMPT = np.array([1, 2, 3], np.int32)


GUESSED = [own("copy: hay"), told("higher"), own("reverse: yah"), told("right")]
LOOKED_UP = [own("hay", CALL), told("7"), own("reverse: 7")]


@pytest.fixture
def share(make, voices):
    """The record of a group of episodes that a peer of this voice has played."""

    def share(source, *episodes, **played):
        codec = voices[source]
        group = make.group([0.0] * len(episodes))
        answers = [
            codec.played(said, reward=float(n % 2), seed=n, **played) if isinstance(said, list) else said
            for n, said in enumerate(episodes)
        ]
        return make.rollout(structs.replace(group, answers=answers), codec.receiver).record

    return share


@pytest.fixture
def context(make_context, voices):
    """Of the receiver, which has words for episodes."""
    return lambda **how: replace(make_context(**how), renderer=voices["own"])


@pytest.fixture
def read(context):
    """The one answer of a record in own tokens."""

    def read(record, *, needs_trace=True, **how):
        ((trace,),) = peer_traces([record], context(**how), needs_trace=needs_trace)
        return trace

    return read


def slow_row(answer, codec, *, source):
    """Token by token: [T] own ids, [T] whether sampled, and for each own token in a span (its number, its log-prob)."""
    ids, sampled, spans = [], [], []
    num_spans = 0
    for turn in answer.turns:
        if not turn.is_sampled:
            part = codec.bridge(turn.messages).tolist()
            ids += part
            sampled += [False] * len(part)
            continue
        is_last = turn is answer.turns[-1]
        is_ended = not is_last or answer.finish_reason is FinishReason.STOP
        lengths, logprobs = unpack_array(turn.trace.byte_lengths, "i4"), unpack_array(turn.trace.logprobs, "f4")
        peer_ends = np.cumsum(lengths).tolist()
        written_by_peer, text = source.text(turn.messages), codec.text(turn.messages)
        content = turn.messages[0].content.encode()
        common = text if written_by_peer == text else content
        end = len(common) if written_by_peer == text else max([e for e in peer_ends if e <= len(content)], default=0)
        own_parts = [common[:end]] if written_by_peer == text else [common[:end], text[end:]]
        part, aligned = [], []
        for number, piece in enumerate(own_parts):
            found = codec.rest(piece, is_begun=False, is_ended=is_ended and number == len(own_parts) - 1).tolist()
            part += found
            aligned += [number == 0] * len(found)
        place, own_ends = 0, []
        for token in part:
            place += len(codec.receiver.completion_bytes([token]))
            own_ends.append(place)
        common_ends = sorted({e for e in own_ends if e in peer_ends and 0 < e <= end})
        for token, own_end, is_aligned in zip(part, own_ends, aligned, strict=True):
            if not is_aligned:
                spans.append(None)
            elif token in codec.receiver.eos_ids:
                spans.append((num_spans + len(common_ends), float(logprobs[-1])))
            else:
                at = next(n for n, e in enumerate(common_ends) if e >= own_end)
                start = common_ends[at - 1] if at else 0
                inside = [
                    float(x)
                    for x, e, n in zip(logprobs, peer_ends, lengths, strict=True)
                    if start < e <= common_ends[at] and n
                ]
                spans.append((num_spans + at, sum(inside)))
        num_spans = 1 + max([num_spans - 1, *(one[0] for one in spans if one)])
        ids += part
        sampled += [True] * len(part)
    iterator = iter(spans)
    of_row = [next(iterator) if is_own else None for is_own in sampled]
    return ids, sampled, of_row


@pytest.mark.parametrize("source", ["bytes", "bytes_other_calls", "own", "own_other_calls"])
def test_an_aligned_episode_equals_its_slow_twin(share, read, voices, source):
    """Ids, what is sampled, what is aligned, spans and log-probs, over drawn episodes, ended and cut ones."""
    rng = np.random.default_rng(7)
    for number in range(40):
        said = drawn(rng)
        record = share(source, said, ending=CUT if number % 4 == 0 else "done")
        (answer,) = record.answers
        trace = read(record)
        ids, sampled, of_row = slow_row(answer, voices["own"], source=voices[source])
        if trace.rejected:
            assert (trace.rejected, any(of_row)) == (NOTHING_SHARED, False)
            continue
        assert trace.row.token_ids.tolist() == ids
        assert trace.row.is_sampled.tolist() == sampled
        assert trace.row.is_aligned.tolist() == [one is not None for one in of_row]
        behaviour, spans = behaviour_of(trace.aligned)
        assert spans.tolist() == [one[0] for one in of_row if one]
        assert behaviour.tolist() == pytest.approx([one[1] for one in of_row if one], rel=1e-6)
        assert trace.aligned.peer_logprob == pytest.approx(
            trace.aligned.span_logprob.sum() + trace.aligned.dropped_logprob
        )


def test_equal_tokenizers_pass_bit_for_bit(share, read, voices):
    """Each sampled token is a span, with the log-prob that its policy had; the row is that of the peer."""
    answer = voices["own"].played(LOOKED_UP, seed=3)
    trace = read(share("own", answer))
    example = trace.example(PROMPT, component="c", behaviour=behaviour_of(trace.aligned)[0])
    assert pack_array(example.answer_token_ids, "i4") == answer.token_ids
    assert pack_array(example.behaviour_logprobs, "f4") == answer.logprobs
    assert example.is_trained.tolist() == answer.is_sampled.tolist()
    assert behaviour_of(trace.aligned)[1].tolist() == list(range(answer.num_sampled_tokens))


@pytest.mark.parametrize("source", ["own", "bytes"])
@pytest.mark.parametrize("ending", ["done", CUT])
@pytest.mark.parametrize("room", [99, 4])
def test_an_episode_of_one_turn_is_the_answer_of_one_turn(make, share, read, voices, source, ending, room):
    """Bit for bit: the batch, and the row that is trained on; also where the own limit cuts it."""
    text = "reverse: yah copy"
    episode = voices[source].played([own(text)], ending=ending, seed=5)
    plain = structs.replace(
        episode,
        segments=[],
        ending="",
        completion=text.encode(),
        finish_reason=FinishReason.LENGTH if ending == CUT else FinishReason.STOP,
    )
    for needs_trace in (True, False):
        found, expected = (
            read(share(source, one), needs_trace=needs_trace, max_answer_tokens=room) for one in (episode, plain)
        )
        assert found.rejected == expected.rejected
        assert (found.rejected == "cut") is (room == 4 and not needs_trace)
        for field in fields(AlignedBatch):
            one, other = (getattr(trace.examined.batch, field.name) for trace in (found, expected))
            assert np.array_equal(one, other), field.name
            assert field.name == "reject_reason" or one.dtype == other.dtype, field.name
        if found.rejected:
            continue
        rows = []
        for trace in (found, expected):
            behaviour, spans = behaviour_of(trace.aligned)
            rows.append(trace.example(PROMPT, component="c", behaviour=behaviour, spans=spans))
        for name in ("answer_token_ids", "weights", "behaviour_logprobs", "behaviour_spans"):
            assert getattr(rows[0], name).tobytes() == getattr(rows[1], name).tobytes(), name
        assert rows[0].is_trained is rows[1].is_trained is None
        assert ended_text(found.aligned, found.row.turn_spans)[1] == ended_text(expected.aligned)[1]


def test_an_answer_of_one_turn_costs_no_byte_more(share, voices):
    """Its map has the keys that it always had."""
    plain = structs.replace(voices["own"].played([own("hay")]), segments=[], ending="", completion=b"hay")
    body = encode(share("own", plain))
    assert b"turns" not in body
    assert b"written" not in body


def test_turns_cross_as_structure_and_each_with_its_trace(share, voices):
    """Up to the policy's last; a digest where more than the content was sampled; the environment's have neither."""
    record = share("bytes", LOOKED_UP, GUESSED)
    looked_up, guessed = record.answers
    assert [turn.is_sampled for turn in guessed.turns] == [True, False, True]
    assert [turn.messages for turn in looked_up.turns] == [(message,) for message in LOOKED_UP]
    assert (looked_up.completion, looked_up.trace, looked_up.finish_reason) == (b"", None, FinishReason.STOP)
    first, between, last = looked_up.turns
    assert unpack_array(first.trace.byte_lengths, "i4").sum() == len(voices["bytes"].text([LOOKED_UP[0]]))
    assert first.trace.written == digest_of(voices["bytes"].text([LOOKED_UP[0]]))
    assert (between.trace, last.trace.written) == (None, b"")
    assert unpack_array(last.trace.byte_lengths, "i4").sum() == len("reverse: 7")
    logprobs = b"".join(turn.trace.logprobs for turn in looked_up.turns if turn.is_sampled)
    assert logprobs == voices["bytes"].played(LOOKED_UP, seed=0).logprobs


def test_calls_that_are_written_otherwise_are_dropped_and_not_trained(share, read, voices):
    """Content is aligned; the peer's call and its end are booked as dropped, and the own ones are context."""
    alike, other = read(share("bytes", LOOKED_UP)), read(share("bytes_other_calls", LOOKED_UP))
    assert alike.aligned.dropped_tokens == 0
    call = OTHER_CALLS.format(name=CALL.name, arguments=CALL.arguments)
    assert other.aligned.dropped_tokens == len(call) + 1
    logprobs = unpack_array(voices["bytes_other_calls"].played(LOOKED_UP).logprobs, "f4").astype(float)
    assert other.aligned.dropped_logprob == pytest.approx(logprobs[3 : 3 + len(call) + 1].sum())
    assert other.aligned.peer_logprob == pytest.approx(logprobs.sum())
    receiver = voices["own"].receiver
    sampled = other.row.token_ids[other.row.is_sampled]
    assert receiver.completion_bytes(sampled) == voices["own"].text([LOOKED_UP[0]]) + b"reverse: 7"
    example = other.example(PROMPT, component="c")
    assert receiver.completion_bytes(example.trained_token_ids) == b"hayreverse: 7"
    assert example.num_trained_tokens == other.num_tokens < other.num_sampled_tokens
    untraced = read(share("bytes_other_calls", LOOKED_UP), needs_trace=False)
    assert untraced.example(PROMPT, component="c").trained_token_ids.tolist() == sampled.tolist()


def test_spans_never_cross_a_turn(share, read):
    """Not even where both tokenizers would join the two texts."""
    trace = read(share("bytes", [own("rever"), told("7"), own("se: yah")]))
    _, spans = behaviour_of(trace.aligned)
    turn = np.cumsum(np.diff(np.append(False, trace.row.is_aligned).astype(int)) > 0)[trace.row.is_aligned]
    assert set(spans[turn == 1].tolist()).isdisjoint(spans[turn == 2].tolist())
    assert set(turn.tolist()) == {1, 2}


@pytest.mark.parametrize("source", ["own", "bytes"])
def test_the_end_of_every_turn_is_left_out_of_means(share, read, voices, source):
    """As the end of an answer is; the row ends with its last text."""
    answer = voices[source].played(GUESSED[:3])
    sizes = [one.num_tokens for one in answer.segments if one.is_sampled]
    logprobs = np.full(sum(sizes), -2.0)
    logprobs[np.cumsum(sizes) - 1] = -50.0
    trace = read(share(source, structs.replace(answer, logprobs=pack_array(logprobs, "f4"))))
    kept, mean = ended_text(trace.aligned, trace.row.turn_spans)
    assert mean == -2.0
    example = trace.example(PROMPT, component="c", kept=kept)
    receiver = voices["own"].receiver
    assert not np.isin(example.trained_token_ids, receiver.eos_ids).any()
    assert receiver.completion_bytes(example.trained_token_ids) == b"copy: hayreverse: yah"
    assert example.answer_token_ids.size == trace.row.token_ids.size - 1


def _tokens(value, dtype):
    """So many as there are."""
    return lambda size: pack_array([value] * size, dtype)


@pytest.mark.parametrize(
    ("field", "lie", "fault"),
    [
        ("logprobs", _tokens(0.5, "f4"), "logprobs"),
        ("logprobs", _tokens(np.nan, "f4"), "logprobs"),
        ("logprobs", lambda _: b"abc", "type"),
        ("special", lambda _: b"", "shape"),
        ("special", _tokens(1, "u1"), "lengths"),
        ("byte_lengths", lambda size: pack_array([1 << 30] + [0] * (size - 1), "i4"), "lengths"),
        ("byte_lengths", _tokens(-1, "i4"), "lengths"),
        ("byte_lengths", lambda _: b"abc", "type"),
    ],
)
@pytest.mark.parametrize("source", ["bytes", "bytes_other_calls"])
def test_a_lying_turn_costs_the_episode_its_ratio(share, read, source, field, lie, fault):
    """Its text may be imitated, where none is formed; the reason is that of the lie."""
    record = share(source, [own("copy: hay", CALL), told("7"), own("hay")])
    (answer,) = record.answers
    first = answer.turns[0]
    lying = structs.replace(first.trace, **{field: lie(len(first.trace.special))})
    turns = [structs.replace(first, trace=lying), *answer.turns[1:]]
    trace = read(_of(record, turns=turns))
    assert trace.rejected == trace.examined.trace_fault == fault
    assert not read(_of(record, turns=turns), needs_trace=False).rejected


def test_lengths_that_no_text_has_take_no_memory(share, read):
    """What a peer claims is bounded before anything of that size is made."""
    record = share("bytes_other_calls", [own("copy: hay", CALL), told("7"), own("hay")])
    first, *others = record.answers[0].turns
    size = len(first.trace.special)
    lying = structs.replace(first.trace, byte_lengths=pack_array([2**31 - 1] * size, "i4"))
    tracemalloc.start()
    trace = read(_of(record, turns=[structs.replace(first, trace=lying), *others]))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert trace.rejected == "lengths"
    assert peak_bytes < 1 << 24


def _of(record, **changes):
    return structs.replace(record, answers=[structs.replace(record.answers[0], **changes)])


def test_what_cannot_be_used_has_a_reason(share, read, context, voices):
    """Form, size, own words, alignment, and nothing that both write alike."""
    record = share("bytes", LOOKED_UP)
    turns = record.answers[0].turns
    silent = [structs.replace(one, trace=None) for one in turns]
    assert read(_of(record, turns=turns[:2])).rejected == "malformed"
    assert read(_of(record, turns=turns[1:])).rejected == "malformed"
    assert read(_of(record, turns=silent)).rejected == UNTRACED
    assert read(_of(record, turns=silent), needs_trace=False).rejected == ""
    long = structs.replace(turns[1], messages=(told("x" * MAX_COMPLETION_BYTES),))
    assert read(_of(record, turns=[turns[0], long, turns[2]])).rejected == "size"
    assert read(record, max_answer_tokens=2).rejected == "too_long"
    only_call = share("bytes_other_calls", [own("", CALL), told("7"), own("", CALL)])
    assert read(only_call).rejected == NOTHING_SHARED
    assert read(only_call, needs_trace=False).rejected == ""
    nothing = structs.replace(turns[2], messages=(own(""),), trace=None)
    assert read(_of(record, turns=[*turns[:2], nothing])).rejected == "empty"
    for word in ("tool_calls", "no_bridge"):
        voices["own"].refuses = word
        assert read(record).rejected == word
    ((trace,),) = peer_traces([record], replace(context(), renderer=None), needs_trace=True)
    assert trace.rejected == "no_spelling"


def test_more_text_than_may_cross_gives_its_reward_alone(share, read):
    """The other answers of its group cross."""
    long = [own("h" * 10), told("x" * MAX_COMPLETION_BYTES), own("hay")]
    record = share("bytes", long, GUESSED)
    assert [len(one.turns) for one in record.answers] == [0, 3]
    assert [one.reward for one in record.answers] == [0.0, 1.0]
    assert read(structs.replace(record, answers=record.answers[:1])).rejected == "withheld"


def test_content_that_the_ids_do_not_begin_with_has_no_trace(share, voices):
    """As a turn whose special tokens are part of its text."""
    answer = voices["bytes"].played(GUESSED)
    first = structs.replace(answer.segments[0], messages=(own("copy"),))
    other = structs.replace(answer.segments[0], messages=(own("else"),))
    cut, none = (
        share("bytes", structs.replace(answer, segments=[one, *answer.segments[1:]])).answers[0].turns[0]
        for one in (first, other)
    )
    assert (cut.trace is not None, cut.trace.written) == (True, digest_of(b"copy: hay"))
    assert none.trace is None


def test_a_text_before_a_stop_string_is_aligned_up_to_it(share, read, voices):
    """What was sampled behind it is dropped."""
    answer = voices["bytes"].played(GUESSED[:3])
    first = structs.replace(answer.segments[0], messages=(own("copy"),))
    trace = read(share("bytes", structs.replace(answer, segments=[first, *answer.segments[1:]])))
    trained = trace.example(PROMPT, component="c").trained_token_ids
    assert voices["own"].receiver.completion_bytes(trained) == b"copyreverse: yah"
    assert trace.aligned.dropped_tokens == len(": hay") + 1


@pytest.mark.parametrize("name", ["prp", "hacpo", "graft"])
def test_regimes_train_on_peers_episodes(build, context, make, share, step_of, record, voices, name):
    """Rows of the sampled tokens alone; lengths that divide count these; the recorder measures them."""
    regime = build(name, context())
    group = make.group([0.0, 0.0])
    mine = structs.replace(group, answers=[voices["own"].played(GUESSED, reward=0.0, seed=n) for n in (8, 9)])
    heard = Received(share("bytes", LOOKED_UP, GUESSED), 0)
    if name == "graft":
        regime.parameters = regime.parameters.model_copy(update={"balance": False})
    found = step_of(regime, [mine], [heard])
    rows = [one for one in found.examples if one.source == "peer"]
    assert len(rows) == 2
    for row in rows:
        assert row.num_trained_tokens == row.is_trained.sum() == row.behaviour_logprobs.size == row.advantages.size
        assert row.answer_token_ids.size == row.is_trained.size
        assert row.is_trained[-1]
    assert found.counts["sharing/peer_tokens"] == sum(row.num_trained_tokens for row in rows)
    has_ends = [bool(np.isin(row.trained_token_ids, voices["own"].receiver.eos_ids).any()) for row in rows]
    assert has_ends == [name != "hacpo"] * 2
    told_of = record(
        regime, found, {n: np.full(one.num_trained_tokens, -1, np.float32) for n, one in enumerate(found.examples)}
    )
    assert told_of["align/rows/peer"] == 2
    assert told_of["align/receiver_tokens/peer"] == sum(row.examined.batch.row_offsets[-1] for row in rows[:1])
    assert ("align/gap_nats_per_byte/peer" in told_of) is (name != "hacpo")


def test_a_row_of_hacpo_is_the_mean_over_what_both_wrote_in_turns(build, context, make, share, step_of, lab, voices):
    """Its gradient is that of the formula: s = exp(mean log pi - mean log peer), ends and context left out."""
    regime, model = build("hacpo", context(), lower=0.0, alpha=0.0), lab.model()
    group = structs.replace(make.group([0.0]), answers=[voices["own"].played(GUESSED, reward=0.0)])
    told_of = share("bytes_other_calls", LOOKED_UP, GUESSED)
    sure = [
        structs.replace(turn, trace=structs.replace(turn.trace, logprobs=bytes(len(turn.trace.logprobs))))
        if turn.is_sampled
        else turn
        for turn in told_of.answers[0].turns
    ]
    answers = [structs.replace(told_of.answers[0], turns=sure, reward=1.0), told_of.answers[1]]
    found = step_of(regime, [group], [Received(structs.replace(told_of, answers=answers), 0)])
    row = next(one for one in found.examples if one.source == "peer")
    assert not row.behaviour_logprobs.any()
    assert row.advantages[0] > 0

    def surrogate(model):
        logprobs = model.logprobs(row.prompt_token_ids, row.answer_token_ids)
        ratio = logprobs[torch.from_numpy(row.is_trained)].mean().exp()
        return -ratio * float(row.advantages[0]) / found.denominators["cross"]

    alone = replace(found, examples=[row])
    lab.assert_same(lab.gradient(alone, regime, model), lab.score_of(model, surrogate))


def test_turns_that_are_nothing_but_their_ends_stay_whole(share, read, voices):
    """They are all that was sampled."""
    trace = read(share("own", [own(""), told("7"), own("")]))
    kept, mean = ended_text(trace.aligned, trace.row.turn_spans)
    logprobs = unpack_array(voices["own"].played([own(""), told("7"), own("")]).logprobs, "f4")
    assert (kept.tolist(), mean) == ([True, True], pytest.approx(logprobs.mean()))


def test_special_tokens_that_open_a_call_are_dropped_with_it(share, read):
    """Those without bytes that stand behind the content."""
    record = share("bytes_other_calls", LOOKED_UP)
    first = record.answers[0].turns[0]
    arrays = {"byte_lengths": (0, "i4"), "logprobs": (-9.0, "f4"), "special": (1, "u1")}
    opened = {
        name: pack_array(np.insert(unpack_array(getattr(first.trace, name), dtype), len("hay"), value), dtype)
        for name, (value, dtype) in arrays.items()
    }
    marked = structs.replace(first, trace=structs.replace(first.trace, **opened, token_ids=None))
    trace = read(_of(record, turns=[marked, *record.answers[0].turns[1:]]))
    plain = read(record)
    assert trace.aligned.span_logprob.tolist() == plain.aligned.span_logprob.tolist()
    assert trace.aligned.dropped_tokens == plain.aligned.dropped_tokens + 1
    assert trace.aligned.dropped_logprob == pytest.approx(plain.aligned.dropped_logprob - 9.0)


def test_own_episodes_lose_the_end_of_every_turn_under_hacpo(build, context, make, step_of, voices):
    """In the row, its behaviour, its experts, and what divides."""
    played = [voices["own"].played(GUESSED, reward=float(n), seed=n) for n in range(2)]
    places = [np.arange(answer.num_sampled_tokens, dtype=np.uint8)[:, None] for answer in played]
    answers = [structs.replace(one, experts=ChosenExperts.packed(at)) for one, at in zip(played, places, strict=True)]
    group = structs.replace(make.group([0.0, 1.0]), answers=answers)
    found = step_of(build("hacpo", context(aggregation="token_mean")), [group])
    whole = step_of(build("hacpo", context(aggregation="token_mean"), own_eos=True), [group])
    for one in (found, whole):
        assert one.denominators["policy_gradient"] == sum(row.num_trained_tokens for row in one.examples)
    eos = voices["own"].receiver.eos_ids
    for row, full in zip(found.examples, whole.examples, strict=True):
        assert np.isin(full.trained_token_ids, eos).sum() == 2
        kept = ~np.isin(full.trained_token_ids, eos)
        assert row.trained_token_ids.tolist() == full.trained_token_ids[kept].tolist()
        assert row.behaviour_logprobs.tolist() == full.behaviour_logprobs[kept].tolist()
        assert row.experts.tolist() == full.experts[kept].tolist()
        assert row.weights.tolist() == [1.0] * kept.sum()
        assert row.answer_token_ids.tolist() == full.answer_token_ids[:-1].tolist()


def test_a_row_that_is_nothing_but_an_end_goes_with_it_under_hacpo(build, context, make, step_of, voices):
    """What is left of the episode are the rows before; one with text in it stays."""
    eos = voices["own"].receiver.eos_id
    parts = [("hay", True, False), ("7", False, True), ("yah", True, False), ("8", False, True), ("", True, False)]
    ids = [[*[5] * len(text), *[eos] * is_sampled] for text, is_sampled, _ in parts]
    segments = [
        EpisodeSegment(num_tokens=len(part), is_sampled=is_sampled, messages=(), begins_row=begins)
        for part, (_, is_sampled, begins) in zip(ids, parts, strict=True)
    ]
    num_sampled = sum(one.num_tokens for one in segments if one.is_sampled)
    answers = [
        structs.replace(
            voices["own"].played(GUESSED, reward=float(n), seed=n),
            token_ids=pack_array(np.concatenate(ids), "i4"),
            logprobs=pack_array(np.full(num_sampled, -1.0), "f4"),
            segments=segments,
        )
        for n in range(2)
    ]
    assert all(answer.has_sound_rows for answer in answers)
    found = step_of(build("hacpo", context()), [structs.replace(make.group([0.0, 1.0]), answers=answers)])
    for row in found.examples:
        assert row.answer_token_ids.tolist() == [*ids[0], *ids[1], *ids[2][:-1]]
        assert row.row_starts.tolist() == [len(ids[0])]


def test_a_group_of_both_kinds_keeps_its_order(share, context, voices):
    """Answers stand as in the record."""
    plain = structs.replace(voices["bytes"].played([own("hay")]), segments=[], ending="", completion=b"hay")
    record = share("bytes", GUESSED, plain, LOOKED_UP)
    (traces,) = peer_traces([record], context(), needs_trace=True)
    assert [trace.answer for trace in traces] == record.answers
    assert [trace.row is None for trace in traces] == [False, True, False]
    assert not any(trace.rejected for trace in traces)
    assert traces[0].completion.startswith(b"assistant: copy: hay")
    assert isinstance(traces[0].answer, SharedAnswer)


def test_overlong_episodes_lose_reward_by_all_that_was_sampled(share, context):
    """As own ones do, calls that are not trained on included."""
    record = share("bytes_other_calls", LOOKED_UP)
    of = context(overlong_buffer_tokens=60, overlong_penalty=1.0, max_answer_tokens=64)
    ((trace,),) = peer_traces([record], of, needs_trace=True)
    assert trace.num_sampled_tokens > trace.num_tokens
    expected = of.objective.penalised(np.zeros(1), [int(trace.row.is_sampled.sum())], [64])
    assert peer_rewards([trace], of).tolist() == expected.tolist() != [0.0]


def test_an_answer_of_one_turn_beside_episodes_is_overlong_by_its_own_limit(share, voices, context):
    """That of a turn; episodes may be as long as all their turns together."""
    plain = structs.replace(voices["bytes"].played([own("hay")]), segments=[], ending="", completion=b"hay", reward=0.0)
    of = context(overlong_buffer_tokens=1, overlong_penalty=0.5, max_answer_tokens=64)
    ((trace, episode),) = peer_traces([share("bytes", plain, GUESSED)], of, needs_trace=True)
    of = replace(of, objective=replace(of.objective, max_turn_tokens=trace.num_sampled_tokens))
    assert peer_rewards([trace, episode], of).tolist() == [-0.5, episode.reward]


def test_a_turn_is_split_behind_a_whole_character(share, read, voices):
    """Of a character that the peer's tokens cut, the content before it is aligned; the own row has all of it."""
    answer = voices["bytes_other_calls"].played([own("yah caf\u00e9", CALL), told("7"), own("hay")])
    record = share("bytes_other_calls", answer)
    first = record.answers[0].turns[0]
    lengths = unpack_array(first.trace.byte_lengths, "i4").copy()
    end = len("yah caf\u00e9".encode())
    lengths[end - 1 : end + 1] = 0, 2  # one token for the second half of the character and the call's first byte
    torn = structs.replace(first.trace, byte_lengths=pack_array(lengths, "i4"), token_ids=None)
    turns = [structs.replace(first, trace=torn), *record.answers[0].turns[1:]]
    trace = read(_of(record, turns=turns))
    trained = voices["own"].receiver.completion_bytes(trace.example(PROMPT, component="c").trained_token_ids)
    assert (trace.rejected, trained) == ("", b"yah cafhay")
    sampled = voices["own"].receiver.completion_bytes(trace.row.token_ids[trace.row.is_sampled])
    assert sampled.startswith("yah caf\u00e9<look_up".encode())


def test_a_cut_turn_is_not_closed(share, read, voices):
    """Also where its call is written otherwise, and all of the turn is imitated."""
    record = share("bytes_other_calls", [own("hay"), told("7"), own("hay", CALL)], ending=CUT)
    trace = read(record, needs_trace=False)
    assert np.isin(trace.row.token_ids, voices["own"].receiver.eos_ids).sum() == 1
    assert trace.row.token_ids[-1] not in voices["own"].receiver.eos_ids
