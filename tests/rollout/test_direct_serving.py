"""Requests outside of episodes in a worker: their share of places and time, proofs, losses, and answers."""

import re
from collections import deque

import numpy as np
import pytest

from mrl.alignment.receiver import load_receiver
from mrl.engines.engine import FinishedAnswer, Generation, PartialAnswer, TokenScore
from mrl.models.tokenizers import train_byte_level
from mrl.models.turn_renderer import TurnRenderer
from mrl.records.direct_requests import (
    LOST,
    DirectAnswer,
    DirectChunk,
    DirectRefusal,
    DirectRequest,
    WithdrawnRequest,
    WorkerRoom,
)
from mrl.records.episodes import Message
from mrl.records.finish import FinishReason
from mrl.records.version import Version, VersionSpan
from mrl.rollout.direct_codec import DirectRequestCodec
from mrl.rollout.direct_serving import DirectServing
from mrl.rollout.held_out_answers import InFlight
from mrl.tasks.environments.tool_syntax import HERMES

OLD, NEW = Version(0, 3), Version(0, 4)
NOTHING = InFlight(0, 0)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


class Line:
    """A gateway at the other end."""

    def __init__(self):
        self.coming, self.said = deque(), []

    def take(self):
        found = list(self.coming)
        self.coming.clear()
        return found

    def send(self, message):
        self.said.append(message)

    def answers(self):
        """What was said but for rooms."""
        return [one for one in self.said if not isinstance(one, WorkerRoom)]


class ScriptedEngine:
    """Holds what it is handed."""

    def __init__(self):
        self.version, self.held, self.aborted, self.scored = OLD, [], [], []
        self.on_score = lambda: None
        self.growing = []

    def grown(self):
        found, self.growing = self.growing, []
        return found

    def submit(self, requests):
        self.held += requests

    def abort(self, names):
        self.aborted += names

    def score_given(self, token_ids):
        self.scored.append(token_ids)
        self.on_score()
        return [TokenScore(-1.5, [(65, -0.5)]) for _ in token_ids[1:]]


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    """Of a policy with a small byte-level vocabulary."""
    folder = tmp_path_factory.mktemp("voice")
    tokenizer = train_byte_level(["answer yah one two three <tool_call>"] * 3, 400)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "model.safetensors").touch()
    receiver = load_receiver(folder)
    renderer = TurnRenderer(folder, eos_ids=receiver.eos_ids)
    return DirectRequestCodec(
        "qwen", receiver, renderer, HERMES, (b"##",), 0.9, max_new_tokens=16, row_tokens=64, max_prompt_tokens=55
    )


class Rig:
    """A worker's part, with a clock that is set by hand."""

    def __init__(self, codec, *, share=0.25, group_size=4):
        self.line, self.engine, self.now_s, self.codec = Line(), ScriptedEngine(), 0.0, codec
        self.serving = DirectServing(
            self.line, codec, self.engine, share=share, group_size=group_size, clock=lambda: self.now_s
        )

    def ask(self, name, **asked):
        """A request comes."""
        self.line.coming.append(
            DirectRequest(request_id=name, seed=7, **({"text": "one two"} if "messages" not in asked else {}) | asked)
        )

    def serve(self, max_answers=16, in_flight=NOTHING, good=(OLD, NEW)):
        """A turn of the worker's loop; names of what the engine was handed in it."""
        before = len(self.engine.held)
        self.serving.serve(max_answers, in_flight, lambda version: version in good)
        return self.engine.held[before:]

    def end(self, request, text="three", *, reason=FinishReason.STOP, versions=None, ids=None, good=(OLD, NEW)):
        """The engine has sampled this for it."""
        found = self.codec.renderer.plain(text) if ids is None else np.array(ids, dtype=np.int32)
        spans = versions or [VersionSpan(found.size, OLD)]
        generation = Generation(found, np.full(found.size, -0.5, dtype=np.float32), spans, reason)
        return self.serving.arrive([FinishedAnswer(request.request_id, 0, generation)], lambda version: version in good)


@pytest.fixture
def rig(codec):
    return Rig(codec)


def test_they_have_a_bounded_share_of_the_places_that_groups_leave_free(rig):
    """A quarter of sixteen at most; none while groups have all; and answers of others are left alone."""
    for name in "abcdef":
        rig.ask(name)
    assert rig.serve(in_flight=InFlight(16, 0)) == []
    assert rig.line.said == [WorkerRoom("qwen", 4, 3)]
    (first,) = rig.serve(in_flight=InFlight(15, 0))
    assert len(rig.serve(in_flight=InFlight(4, 0, 1))) == 3
    assert rig.serve(in_flight=InFlight(0, 0, 4)) == [], "its share is used"
    stranger = FinishedAnswer(
        "group", 0, Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), [], FinishReason.STOP)
    )
    assert rig.serving.arrive([stranger], lambda version: True) == [stranger]
    rig.end(first)
    assert rig.serving.in_flight == 3
    assert len(rig.serve(in_flight=InFlight(8, 0, 3))) == 1


def test_where_places_hold_one_group_the_two_take_turns(codec):
    """Four places, groups of four: requests while there is no group, and further ones behind the next group."""
    rig = Rig(codec)
    for name in "abcde":
        rig.ask(name)
    assert rig.serve(4, InFlight(4, 0)) == []
    begun = rig.serve(4)
    assert len(begun) == 4
    for request in begun:
        rig.end(request)
    assert rig.serve(4) == []
    rig.serving.departed()
    assert len(rig.serve(4)) == 1


def test_a_request_is_sampled_as_it_asks_within_the_policys_limits(rig):
    """Its own temperature, seed and stop strings beside the policy's; a limit above the policy's is the policy's."""
    rig.ask("a", temperature=0.0, top_p=0.5, max_new_tokens=3, stop=("\n",))
    rig.ask("b", max_new_tokens=1000)
    one, two = rig.serve()
    assert (one.decoding.temperature, one.decoding.top_p, one.decoding.max_new_tokens) == (0.0, 0.5, 3)
    assert one.decoding.stop.texts == (b"##", b"\n")
    assert (two.decoding.temperature, two.decoding.max_new_tokens) == (0.9, 16)
    assert one.seeds.tolist() == [7]
    assert one.prompt_token_ids.tolist() == rig.codec.renderer.plain("one two").tolist()


def test_an_answer_is_told_when_its_versions_are_proved(rig):
    """Before the proof of the newer weights that sampled its end, nobody hears of it; else it is told as it comes."""
    rig.ask("b")
    (request,) = rig.serve()
    rig.end(request)
    assert [answer.request_id for answer in rig.line.answers()] == ["b"]
    rig.ask("a")
    (request,) = rig.serve()
    rig.engine.version = NEW
    rig.end(request, "one## two", versions=[VersionSpan(1, OLD), VersionSpan(3, NEW)], good=[OLD])
    rig.serve(good=[OLD])
    assert len(rig.line.answers()) == 1
    rig.serve()
    _, answer = rig.line.answers()
    assert (answer.request_id, answer.version, answer.text, answer.is_cut) == ("a", 4, "one", False)
    assert b"".join(token.spelled for token in answer.sampled) == b"one## two"
    assert [token.logprob for token in answer.sampled] == [-0.5] * len(answer.sampled)
    assert answer.num_given_tokens == request.prompt_token_ids.size


def test_a_conversation_with_tools_is_rendered_and_read(rig):
    """By the policy's template, calls as structure."""
    talk = (Message("system", "be brief"), Message("user", "one?"))
    tool = '{"function":{"name":"add","parameters":{"type":"object"}},"type":"function"}'
    rig.ask("a", messages=talk, tools=(tool,))
    (request,) = rig.serve()
    assert rig.codec.renderer.text(request.prompt_token_ids.tolist()) == "<system>be brief<user>one?<a>"
    rig.end(request, 'yah<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    rig.serve()
    (answer,) = rig.line.answers()
    assert (answer.text, answer.tool_calls[0].arguments) == ("yah", '{"a":1}')


def test_given_text_is_scored_and_not_sampled(rig):
    """Every token after the first, beside the likeliest one in its place."""
    rig.ask("a", scores_given=True, max_new_tokens=0)
    assert rig.serve() == []
    (answer,) = rig.line.answers()
    assert b"".join(token.spelled for token in answer.given) == b"one two"
    assert [token.logprob for token in answer.given] == [None] + [-1.5] * (len(answer.given) - 1)
    assert {token.likeliest_spelled for token in answer.given[1:]} == {rig.codec.spelled(65)}
    assert (answer.sampled, answer.version) == ((), 3)


def test_scores_and_then_a_token(rig):
    """What is scored may be gone on from."""
    rig.ask("a", scores_given=True, max_new_tokens=1)
    (request,) = rig.serve()
    assert request.decoding.max_new_tokens == 1
    rig.end(request, ids=[65], reason=FinishReason.LENGTH)
    rig.serve()
    (answer,) = rig.line.answers()
    assert (len(answer.sampled), answer.is_cut, len(answer.given) > 1) == (1, True, True)


def test_scoring_beside_groups_has_its_share_of_time(rig):
    """A second of scores is followed by three without; where nothing else is sampled there is no pause."""

    def later():
        rig.now_s += 1.0

    rig.engine.on_score = later
    for name in "abc":
        rig.ask(name, scores_given=True, max_new_tokens=0)
    rig.serve(in_flight=InFlight(4, 0))
    rig.now_s += 2.9
    rig.serve(in_flight=InFlight(4, 0))
    assert len(rig.engine.scored) == 1
    rig.now_s += 0.2
    rig.serve(in_flight=NOTHING)
    rig.serve(in_flight=NOTHING)
    assert len(rig.engine.scored) == 3


def test_scores_over_a_change_of_weights_are_made_again(rig):
    """They are of one version."""

    def changed():
        rig.engine.version = NEW

    rig.engine.on_score = changed
    rig.ask("a", scores_given=True, max_new_tokens=0)
    rig.serve()
    assert rig.line.answers() == []
    rig.serve()
    assert [one.version for one in rig.line.answers()] == [4]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"text": None, "token_ids": (100000,)}, "has no token 100000"),
        ({"text": "one " * 60}, r"tokens; at most 48 \(with this max_tokens\)"),
        ({"text": "one " * 60, "max_new_tokens": 1}, r"tokens; at most 55 \(gateway.max_prompt_tokens\)"),
        ({"text": " " * 769}, "769 bytes; at most 48 tokens of 16 bytes each"),
        ({"text": None, "messages": (Message("user", "x" * 400), Message("user", "é" * 185))}, "770 bytes"),
        ({"text": None, "messages": (Message("user", "x"),), "tools": ("[" + "1," * 400 + "1]",)}, "804 bytes"),
        ({"text": ""}, "prompt: empty"),
        ({"stop_token_ids": (7,)}, "stop_token_ids: 7 is not an end token of qwen; its end tokens: [0-9]+"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_words(rig, asked, words):
    """One line, and nothing reaches the engine."""
    rig.ask("a", **asked)
    assert rig.serve() == []
    (refusal,) = rig.line.answers()
    assert (refusal.code, rig.engine.held) == ("invalid_request", [])
    assert re.search(words, refusal.words)


@pytest.mark.parametrize("text", ["one two", "one " * 60])
def test_a_prompt_is_tokenized_once_for_all_answers_to_it(rig, monkeypatch, text):
    """Other than names and seeds, all is the same; also where it is refused."""
    seen, plain = [], TurnRenderer.plain
    monkeypatch.setattr(TurnRenderer, "plain", lambda self, text: [seen.append(text), plain(self, text)][1])
    for name in "abc":
        rig.ask(name, text=text)
    rig.ask("d", text="three")
    rig.serve()
    assert seen == [text, "three"]


def test_a_worker_whose_places_are_others_now_takes_none(rig):
    """A lease that has lapsed: it says so, scores nothing and hands nothing in."""
    rig.ask("a")
    rig.ask("b", scores_given=True, max_new_tokens=0)
    assert rig.serve(0) == []
    assert (rig.engine.scored, rig.line.said) == ([], [WorkerRoom("qwen", 0, 3)])
    assert len(rig.serve()) == 1
    assert rig.line.said[1] == WorkerRoom("qwen", 4, 3)


def test_what_the_engine_does_not_take_is_refused(rig):
    """A server may know better how long a text may be."""
    rig.ask("a")
    (request,) = rig.serve()
    rig.end(request, ids=[], reason=FinishReason.ABORT)
    rig.serve()
    assert [one.code for one in rig.line.answers()] == ["refused"]


def test_a_lost_engine_gives_everything_back(rig):
    """Waiting, in flight, or not yet proved: another worker may have it; and no room is told until weights are back."""
    rig.ask("a")
    rig.ask("b")
    flying, held = rig.serve()
    rig.end(held, versions=[VersionSpan(1, NEW)], good=[OLD])
    rig.ask("c", scores_given=True, max_new_tokens=0)
    rig.serve(good=[OLD], in_flight=InFlight(16, 0))
    rig.ask("d")
    rig.serve(good=[])
    rig.line.said.clear()
    assert rig.serving.lose() == [flying.request_id]
    assert {(one.request_id, one.code) for one in rig.line.answers()} >= {("a", LOST), ("b", LOST), ("d", LOST)}
    assert rig.line.said[0] == WorkerRoom("qwen", 0, None), "or the gateway would send the same again"
    assert not rig.serving.has_work
    rig.serve()
    assert rig.line.said[-1] == WorkerRoom("qwen", 4, 3)


def test_what_nobody_waits_for_is_forgotten(rig):
    """One request, and with the line all of them; the engine gets rid of what it had."""
    for name in "abc":
        rig.ask(name)
    first, *_ = rig.serve(16, NOTHING)
    rig.line.coming.append(WithdrawnRequest("a"))
    rig.serve()
    assert rig.engine.aborted == [first.request_id]
    assert rig.serving.in_flight == 2
    rig.line.coming.append(WithdrawnRequest(""))
    assert not rig.serving.has_work
    assert len(rig.engine.aborted) == 3


def test_nothing_is_sampled_without_proved_weights(rig):
    """It waits."""
    rig.ask("a")
    assert rig.serve(good=[]) == []
    rig.engine.version = None
    assert rig.serve() == []
    rig.engine.version = OLD
    assert len(rig.serve()) == 1
    assert not any(isinstance(one, DirectRefusal | DirectAnswer) for one in rig.line.said)


def ids_of(rig, *texts):
    """Of each by itself, one behind the other."""
    return np.concatenate([rig.codec.renderer.plain(text) for text in texts])


def grow(rig, request, text, *, versions=None):
    """The engine has sampled so much of an answer that goes on."""
    ids = ids_of(rig, text) if isinstance(text, str) else np.array(text, dtype=np.int32)
    spans = versions or [VersionSpan(ids.size, OLD)]
    generation = Generation(ids, np.full(ids.size, -0.5, dtype=np.float32), spans, FinishReason.ABORT)
    rig.engine.growing.append(PartialAnswer(request.request_id, 0, generation))


def test_an_answer_that_streams_is_told_as_it_grows(rig):
    """What is new of it each time; at its end the whole; of one that does not stream, nothing before."""
    rig.ask("a", streams=True)
    rig.ask("b")
    one, two = rig.serve()
    assert (one.streams, two.streams) == (True, False)
    grow(rig, one, ids_of(rig, "one"))
    rig.serve()
    grow(rig, one, ids_of(rig, "one", " two"))
    rig.serve()
    rig.serve()
    first, second = rig.line.answers()
    assert [(piece.request_id, piece.version, piece.text) for piece in (first, second)] == [
        ("a", 3, "one"),
        ("a", 3, " two"),
    ]
    assert b"".join(token.spelled for token in second.sampled) == b" two"
    assert [token.logprob for token in second.sampled] == [-0.5] * len(second.sampled)
    rig.end(one, "one two three")
    grow(rig, one, ids_of(rig, "one", " two", " three"))
    rig.serve()
    assert [type(one) for one in rig.line.answers()] == [DirectChunk, DirectChunk, DirectAnswer]
    assert rig.line.answers()[2].text == "one two three"


def test_no_piece_is_told_before_the_proof_of_its_weights(rig):
    """What older weights sampled is told meanwhile; the rest at once when the proof is there, with nothing new."""
    rig.ask("a", streams=True)
    (request,) = rig.serve()
    num_old, num_new = ids_of(rig, "one").size, ids_of(rig, " two").size
    grow(rig, request, ids_of(rig, "one", " two"), versions=[VersionSpan(num_old, OLD), VersionSpan(num_new, NEW)])
    rig.serve(good=[OLD])
    rig.serve(good=[OLD])
    assert [(piece.text, piece.version) for piece in rig.line.answers()] == [("one", 3)]
    rig.serve()
    assert [(piece.text, piece.version) for piece in rig.line.answers()] == [("one", 3), (" two", 4)]


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["one#", "one# "], ["one", "one# "]),
        (["one#", "one##"], ["one", "one"]),
        (["one\n", "one\nE", "one\nEx"], ["one", "one", "one\nEx"]),
    ],
)
def test_text_that_a_stop_string_would_take_back_is_not_told(rig, texts, told):
    """Its tokens are: they are in the whole answer, too."""
    rig.ask("a", streams=True, stop=("\nEnd",))
    (request,) = rig.serve()
    said = []
    for text in texts:
        grow(rig, request, text)
        rig.serve()
        said.append("".join(piece.text for piece in rig.line.answers()))
    assert said == told
    sampled = b"".join(token.spelled for piece in rig.line.answers() for token in piece.sampled)
    assert sampled == texts[-1].encode()


def test_half_a_character_is_not_told(rig):
    """Its tokens are bytes; a byte that can begin none is a replacement mark, as in the whole."""
    ids = [rig.codec.receiver.table.pieces.index(bytes([byte])) for byte in "aß€".encode() + b"\xff"]
    rig.ask("a", streams=True)
    (request,) = rig.serve()
    said = []
    for end in range(1, len(ids) + 1):
        grow(rig, request, ids[:end])
        rig.serve()
        said.append(rig.line.answers()[-1].text)
    assert said == ["a", "", "ß", "", "", "€", "\ufffd"]


def test_what_may_be_a_call_is_not_told_before_its_end(rig):
    """The text before it is, and what only looked like one."""
    tool = '{"function":{"name":"add","parameters":{"type":"object"}},"type":"function"}'
    rig.ask("a", streams=True, messages=(Message("user", "one?"),), tools=(tool,))
    (request,) = rig.serve()
    whole = 'yah <tool> <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    for end in range(1, len(whole)):
        grow(rig, request, whole[:end])
        rig.serve()
    assert "".join(piece.text for piece in rig.line.answers()) == "yah <tool> "
    rig.end(request, whole)
    rig.serve()
    answer = rig.line.answers()[-1]
    assert (answer.text, answer.tool_calls[0].arguments) == ("yah <tool> ", '{"a":1}')


def test_what_is_lost_or_withdrawn_is_told_no_more(rig):
    """Also where it waited for a proof."""
    for name in "ab":
        rig.ask(name, streams=True)
    for request in rig.serve():
        grow(rig, request, "one", versions=[VersionSpan(1, NEW)])
    rig.serve(good=[OLD])
    rig.line.coming.append(WithdrawnRequest("a"))
    rig.serving.lose()
    rig.serve()
    assert not any(isinstance(one, DirectChunk) for one in rig.line.said)
