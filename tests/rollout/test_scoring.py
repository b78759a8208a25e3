"""A scorer says what its policy gives to foreign texts, in bytes and nats, and leaves out what it cannot say."""

import msgspec
import numpy as np
import pytest
import torch

from mrl.alignment.flags import Rejected
from mrl.alignment.peer_answer import validate
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Sampling
from mrl.errors import EngineLost
from mrl.metrics.telemetry import Telemetry
from mrl.records.codec import unpack_array
from mrl.records.episodes import Message, Opening, ToolCall, ToolSpec
from mrl.records.experience import (
    ExperienceRecord,
    GivenAnswer,
    Received,
    ScoreRecord,
    ScoreRequestRecord,
    SharedTurn,
    TokenTrace,
)
from mrl.records.finish import FinishReason
from mrl.records.version import Version
from mrl.rollout.frozen import FROZEN, FrozenLoop
from mrl.rollout.peer_scoring import Scorer
from mrl.rollout.sampling import Sampler
from mrl.sharing.own_traces import digest_of
from mrl.tasks.pool import TaskPool
from tests.support.plain_voice import DirectRequestCodec
from tests.support.retokenizing import retokenize

PROMPT_IDS = np.array([3, 5, 9], dtype=np.int32)


class Wire:
    """The exchange: what is asked, and what was said."""

    def __init__(self) -> None:
        self.asked: list[Received] = []
        self.said: list[ExperienceRecord] = []

    def take(self) -> list[Received]:
        asked, self.asked = self.asked, []
        return asked

    def publish(self, records: list[ExperienceRecord]) -> None:
        self.said += records

    def losses(self) -> dict[str, float]:
        return {"exchange/too_large": 0.0}


@pytest.fixture
def make_scorer(tiny_model, pool, receiver, tmp_path, monkeypatch):
    """A scorer at a version, its wire and its model; it serves all that is asked, on a busy machine too."""
    monkeypatch.setattr("mrl.rollout.peer_scoring.SERVE_S", 100.0)

    def make(*, step: int = 0, temperature: float = 0.7, keeps_step: bool = False, **episodes):
        model = tiny_model(vocab_size=1000)
        model.save_pretrained(tmp_path / "model")
        (tmp_path / "model" / "tokenizer.json").write_text("{}")
        sampling = Sampling(temperature, 8, tuple(receiver.eos_ids))
        engine = EmbeddedEngine(tmp_path / "model", sampling, device="cpu", max_running=4)
        engine.label(Version(0, step))
        sampler = Sampler("teacher", 1, engine, pool, lambda text: PROMPT_IDS, receiver.completion_bytes)
        wire = Wire()
        scorer = Scorer(sampler, receiver, wire, max_answer_tokens=64, keeps_step=keeps_step, **episodes)
        return scorer, wire, model

    return make


def request(pool: TaskPool, *texts: tuple[bytes, bool], number: int = 0, step: int = 0, **fields) -> Received:
    record = ScoreRequestRecord(
        record_id=f"student:0.{number}:score",
        source="student",
        oldest=Version(0, step),
        newest=Version(0, step),
        fingerprint="f",
        prompt_id=fields.pop("prompt_id", pool.prompt_at(0).prompt_id),
        task="trim",
        created_unix_s=0.0,
        scorer=fields.pop("scorer", "teacher"),
        answers=fields.pop("answers", None)
        or [GivenAnswer(completion=text, finish_reason=reason_of(finished)) for text, finished in texts],
        **fields,
    )
    return Received(record, 0)


def reason_of(finished: bool) -> FinishReason:
    return FinishReason.STOP if finished else FinishReason.LENGTH


def believed(trace: TokenTrace | None, completion: bytes, finished: bool):
    assert trace is not None
    answer = validate(
        completion=completion,
        byte_lengths=trace.byte_lengths,
        logprobs=trace.logprobs,
        special=trace.special,
        finish_reason=reason_of(finished),
        fingerprint="f",
    )
    assert not isinstance(answer, Rejected), answer
    return answer


def test_scores_are_the_policys_own_logprobs_of_the_text_at_its_temperature(make_scorer, pool, receiver):
    """Each answer, one forward by itself: the ids of the text behind the prompt, divided by the temperature."""
    scorer, wire, model = make_scorer(temperature=0.7)
    texts = [(b"answer yah", True), (b"one two thr", False), ("zwölf ✓".encode(), True)]
    wire.asked = [request(pool, *texts)]

    assert scorer.serve() == 1
    (said,) = wire.said
    assert isinstance(said, ScoreRecord)
    assert (said.receiver, said.request_id, said.source) == ("student", "student:0.0:score", "teacher")
    assert said.fingerprint == receiver.fingerprint
    for (text, finished), trace in zip(texts, said.scores, strict=True):
        answer = believed(trace, text, finished)
        assert answer.ends_with_eos == finished
        ids = retokenize(receiver, text, finished=finished, max_tokens=64).token_ids
        row = torch.tensor(np.concatenate([PROMPT_IDS, ids]).astype(np.int64))
        with torch.no_grad():
            logprobs = (model(row[None]).logits[0] / 0.7).log_softmax(-1)
        expected = logprobs[2:-1].gather(-1, row[3:, None]).squeeze(-1).numpy()
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)


def test_the_likeliest_units_come_beside_the_score(make_scorer, pool, receiver):
    """Of every place of every answer that can be said, as bytes, at the policy's temperature; to whoever asks."""
    scorer, wire, model = make_scorer()
    texts = [(b"answer one", True), (b"\xff", False), (b" three", False)]
    wire.asked = [request(pool, *texts, num_units=3), request(pool, *texts, number=1)]
    scorer.serve()
    said, plain = wire.said
    assert plain.units is msgspec.UNSET
    assert [told is None for told in said.units] == [score is None for score in said.scores]
    for (text, finished), told in zip(texts, said.units, strict=True):
        if told is None:
            continue
        ids = retokenize(receiver, text, finished=finished, max_tokens=64).token_ids
        row = torch.tensor(np.concatenate([PROMPT_IDS, ids]).astype(np.int64))
        with torch.no_grad():
            likeliest = (model(row[None]).logits[0, 2:-1] / 0.7).log_softmax(-1).topk(3)
        places, nats = (
            unpack_array(data, kind).reshape(-1, 3) for data, kind in ((told.places, "i4"), (told.logprobs, "f4"))
        )
        assert len(places) == len(ids)
        for place, (token_ids, values) in enumerate(zip(likeliest.indices.tolist(), likeliest.values, strict=True)):
            units = [receiver.unit_of(one, opens=place == 0) for one in token_ids]
            assert [None if at < 0 else told.units[at] for at in places[place]] == units
            kept = [unit is not None for unit in units]
            np.testing.assert_allclose(nats[place][kept], values[kept], atol=1e-4)


OPENING = Opening((Message("user", "guess"),), (ToolSpec("look_up", "Looks.", '{"type":"object"}'),))
CALLING = Message("assistant", "one", tool_calls=(ToolCall("look_up", '{"key":"b"}'),))
PLAYED = (CALLING, Message("user", "7"), Message("assistant", "yah"))


def episode(*messages: Message, finished: bool = True) -> GivenAnswer:
    turns = [SharedTurn(is_sampled=one.role == "assistant", messages=(one,)) for one in messages]
    return GivenAnswer(completion=b"", finish_reason=reason_of(finished), turns=turns)


@pytest.mark.parametrize("finished", [True, False])
def test_an_episode_is_scored_as_the_policy_itself_would_say_it(make_scorer, pool, receiver, finished):
    """Opening and turns in own words, one forward of the whole row; a score for each turn, none for what is told."""
    codec = DirectRequestCodec(receiver)
    scorer, wire, model = make_scorer(temperature=0.7, renderer=codec)
    wire.asked = [request(pool, answers=[episode(*PLAYED, finished=finished)], opening=OPENING, prompt_id="of no task")]

    assert scorer.serve() == 1
    (said,) = wire.said
    first, last = (
        believed(one, text, end)
        for one, text, end in zip(said.scores, (codec.text([CALLING]), b"yah"), (True, finished), strict=True)
    )
    assert (said.scores[0].written, said.scores[1].written) == (digest_of(codec.text([CALLING])), b"")
    parts = [
        codec.opening(OPENING),
        codec.rest(codec.text([CALLING]), is_begun=False, is_ended=True),
        codec.bridge([PLAYED[1]]),
        codec.rest(b"yah", is_begun=False, is_ended=finished),
    ]
    row, ends = torch.tensor(np.concatenate(parts).astype(np.int64)), np.cumsum([part.size for part in parts])
    with torch.no_grad():
        logprobs = (model(row[None]).logits[0] / 0.7).log_softmax(-1)
    expected = logprobs[:-1].gather(-1, row[1:, None]).squeeze(-1).numpy()
    np.testing.assert_allclose(first.logprobs, expected[ends[0] - 1 : ends[1] - 1], atol=1e-4)
    np.testing.assert_allclose(last.logprobs, expected[ends[2] - 1 :], atol=1e-4)
    assert scorer.totals.tokens == parts[1].size + parts[3].size


@pytest.mark.parametrize(
    ("answer", "refuses"),
    [
        (episode(*PLAYED), "tool_calls"),
        (episode(*PLAYED), "no_bridge"),
        (episode(*PLAYED), "no_opening"),
        (episode(Message("user", "7")), ""),
        (episode(), ""),
        (episode(Message("assistant", "x" * 200_000), PLAYED[1], Message("assistant", "y" * 200_000)), ""),
        (episode(PLAYED[0], PLAYED[1], Message("assistant", "")), ""),
    ],
)
def test_an_episode_that_cannot_be_said_has_no_scores_and_the_others_have(make_scorer, pool, receiver, answer, refuses):
    """One place for each of its turns: a peer counts on it. Nothing that a peer sends ends the worker."""
    codec = DirectRequestCodec(receiver)
    codec.refuses = refuses
    scorer, wire, _ = make_scorer(renderer=codec)
    good = episode(Message("assistant", "yah"))
    finished = answer.num_scores != 2 or bool(refuses) or len(answer.turns[0].messages[0].content) > 9
    answer = answer if finished else msgspec.structs.replace(answer, finish_reason=FinishReason.LENGTH)
    wire.asked = [request(pool, answers=[answer, good], opening=OPENING)]

    assert scorer.serve() == 1

    *refused, last = wire.said[0].scores
    assert refused == [None] * answer.num_scores
    assert (last is None) is bool(refuses in ("no_opening", "no_bridge", "tool_calls"))


def test_an_episode_that_its_author_withholds_is_none_that_was_refused(make_scorer, pool, receiver):
    """One that cannot be said is, turn by turn."""
    withheld = msgspec.structs.replace(episode(*PLAYED), turns=[])
    for codec, num_refused in ((DirectRequestCodec(receiver), 0), (None, 2)):
        scorer, wire, _ = make_scorer(renderer=codec)
        wire.asked = [request(pool, answers=[withheld, episode(*PLAYED)], opening=OPENING)]
        assert scorer.serve() == 1
        assert wire.said[0].scores[0] is None
        assert scorer.values()["scoring/refused_answers"] == num_refused


def test_an_episode_longer_than_the_policy_s_rows_has_no_scores(make_scorer, pool, receiver):
    """Its opening counts; one that fits has them."""
    codec = DirectRequestCodec(receiver)
    opening, row = codec.opening(OPENING).size, codec.rest(b"yah", is_begun=False, is_ended=True).size
    for room, is_scored in ((opening + row, True), (opening + row - 1, False), (opening - 1, False)):
        scorer, wire, _ = make_scorer(renderer=codec, row_tokens=room)
        wire.asked = [request(pool, answers=[episode(Message("assistant", "yah"))], opening=OPENING)]
        assert scorer.serve() == 1
        assert [trace is not None for trace in wire.said[0].scores] == [is_scored]


def test_who_has_no_episodes_gives_them_no_scores(make_scorer, pool):
    """A teacher whose own tasks are of one turn."""
    scorer, wire, _ = make_scorer()
    wire.asked = [request(pool, answers=[episode(*PLAYED)], opening=OPENING)]

    assert scorer.serve() == 1
    assert wire.said[0].scores == [None, None]


def test_what_own_tokens_cannot_say_has_no_score_and_the_rest_has(make_scorer, pool):
    """A text cut inside a character, an empty one, and one that is too long."""
    scorer, wire, _ = make_scorer()
    wire.asked = [request(pool, ("é".encode()[:1], False), (b"", True), (b"q" * 5000, True), (b"one", True))]

    scorer.serve()

    (said,) = wire.said
    assert [trace is None for trace in said.scores] == [True, True, True, False]
    assert (scorer.totals.refused, scorer.totals.requests) == (2, 1), "no text is none to refuse"


def test_a_score_does_not_depend_on_what_else_is_asked(make_scorer, pool):
    """The same request alone and between others: equal bits."""
    scorer, wire, _ = make_scorer()
    wire.asked = [request(pool, (b"one two", True), (b"x", False), number=1)]
    scorer.serve()
    wire.asked = [request(pool, (b"answer " * n, True), number=n) for n in (3, 1, 5)]
    scorer.serve()

    scores = [said.scores for said in wire.said if said.request_id == "student:0.1:score"]
    alone = [unpack_array(trace.logprobs, "f4") for trace in scores[0]]
    assert len(alone) == 2
    wire.said.clear()
    wire.asked = [request(pool, (b"answer", True)), request(pool, (b"one two", True), (b"x", False), number=1)]
    scorer.serve()
    again = [unpack_array(trace.logprobs, "f4") for trace in wire.said[1].scores]
    assert all(np.array_equal(one, other) for one, other in zip(alone, again, strict=True))


def test_requests_of_a_step_to_come_wait_for_its_version(make_scorer, pool):
    """Where steps are kept, an engine at step 1 leaves a request of step 2, and answers it at step 2."""
    scorer, wire, _ = make_scorer(step=1, keeps_step=True)
    wire.asked = [request(pool, (b"a", True), number=2, step=2), request(pool, (b"a", True), number=1, step=1)]

    assert scorer.serve() == 1
    assert [said.request_id for said in wire.said] == ["student:0.1:score"]
    scorer._sampler.engine.label(Version(0, 2))
    assert scorer.serve() == 1
    assert [(said.oldest, said.newest) for said in wire.said] == [(Version(0, step),) * 2 for step in (1, 2)]


def test_requests_to_others_and_about_unknown_prompts_are_not_answered(make_scorer, pool):
    """Neither ends the worker; the second is counted."""
    scorer, wire, _ = make_scorer()
    wire.asked = [request(pool, (b"a", True), scorer="other"), request(pool, (b"a", True), prompt_id="trim:none")]

    scorer.serve()

    assert wire.said == []
    assert scorer.totals.dropped == 1
    assert scorer.values().items() >= {"scoring/dropped_requests": 1, "exchange/too_large": 0.0}.items()


def test_nothing_is_scored_under_weights_that_are_not_proved_yet(make_scorer, pool):
    """They may come between two requests: the second one waits for the proof, and bears the right version."""
    scorer, wire, _ = make_scorer()
    engine, proved = scorer._sampler.engine, {Version(0, 0)}
    publish = wire.publish

    def publish_and_load(records) -> None:
        publish(records)
        engine.label(Version(0, 1))

    wire.publish = publish_and_load
    wire.asked = [request(pool, (b"a", True), number=number) for number in range(2)]

    assert scorer.serve(proved.__contains__) == 1
    assert scorer.serve(proved.__contains__) == 0
    proved.add(Version(0, 1))
    assert scorer.serve(proved.__contains__) == 1

    assert [said.newest for said in wire.said] == [Version(0, 0), Version(0, 1)]


def test_a_score_in_the_middle_of_which_new_weights_came_is_made_again(make_scorer, pool, monkeypatch):
    """Nobody could say which version it is of."""
    scorer, wire, _ = make_scorer()
    score_answers, updates = EmbeddedEngine.score_answers, [Version(0, 1)]

    def updated_once(self, asked):
        scored = score_answers(self, asked)
        if updates:
            self.label(updates.pop())
        return scored

    monkeypatch.setattr(EmbeddedEngine, "score_answers", updated_once)
    wire.asked = [request(pool, (b"a", True))]

    assert scorer.serve() == 1
    assert [said.newest for said in wire.said] == [Version(0, 1)]
    assert scorer.totals.requests == 1


def test_an_answer_that_the_engine_does_not_take_has_no_score_and_the_others_have(make_scorer, pool, monkeypatch):
    """A server refuses what is longer than its context; it would do so for ever."""
    scorer, wire, _ = make_scorer()
    score_answers = EmbeddedEngine.score_answers
    monkeypatch.setattr(EmbeddedEngine, "score_answers", lambda self, asked: [None, *score_answers(self, asked)[1:]])
    wire.asked = [request(pool, (b"long", True), (b"a", True))]

    assert scorer.serve() == 1

    assert [trace is None for trace in wire.said[0].scores] == [True, False]
    assert scorer.totals.refused == 1


def test_a_request_that_takes_the_engine_down_again_is_dropped_and_the_others_are_answered(
    make_scorer, pool, monkeypatch
):
    """As a long text does where a server has no memory for its scores: a third engine would be lost as well."""
    scorer, wire, _ = make_scorer()
    score_answers = EmbeddedEngine.score_answers

    def lost_with_two(self, asked):
        if len(asked.answers) == 2:
            raise EngineLost("out of memory")
        return score_answers(self, asked)

    monkeypatch.setattr(EmbeddedEngine, "score_answers", lost_with_two)
    wire.asked = [request(pool, (b"one", True), (b"two", True)), request(pool, (b"one", True), number=1)]

    for _ in range(2):
        with pytest.raises(EngineLost):
            scorer.serve()
    assert scorer.serve() == 1

    assert [said.request_id for said in wire.said] == ["student:0.1:score"]
    assert scorer.values()["scoring/dropped_requests"] == 1


def test_a_request_under_way_when_the_engine_is_lost_is_answered_when_it_is_back(make_scorer, pool, monkeypatch):
    """It is taken off the list only with its answer; a frozen policy's worker starts its engine anew."""
    scorer, wire, _ = make_scorer()
    engine = scorer._sampler.engine
    wire.asked = [request(pool, (b"yah", True))]
    score_answers, losses = EmbeddedEngine.score_answers, [EngineLost("gone")]

    def lost_once(self, asked):
        if losses:
            raise losses.pop()
        return score_answers(self, asked)

    monkeypatch.setattr(EmbeddedEngine, "score_answers", lost_once)
    telemetry = Telemetry("worker/teacher/0", "teacher", lambda record: True)
    FrozenLoop(scorer, engine, telemetry).run(lambda: bool(wire.said))

    assert [record.request_id for record in wire.said] == ["student:0.0:score"]
    assert engine.version == FROZEN
