"""A peer's episode in own tokens is the row that the policy would have had, had it said the same."""

import numpy as np
import pytest

from mrl.config.policy_tables import PromptTable
from mrl.models.load_policy import load_tokenizer
from mrl.models.turn_spelling import TurnSpelling
from mrl.processes.episode_wiring import OwnWords, read_turn
from mrl.records.episodes import Message, ToolCall
from mrl.records.experience import SharedTurn
from mrl.rollout.replaying import OwnVoice, TurnReplay
from mrl.tasks.environments.contract import EnvironmentTurn
from mrl.tasks.environments.tool_syntax import HERMES, NONE, PLAIN, syntax_of

CALL = ToolCall(name="look_up", arguments='{"key":"b"}')
CHATML = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

HERMES_TEMPLATE = "{# arguments #}" + CHATML.replace("<call>", "<tool_call>").replace("</call>", "</tool_call>")


def own(content, *calls):
    return SharedTurn(is_sampled=True, messages=(Message(role="assistant", content=content, tool_calls=calls),))


def given(content, role="user"):
    return SharedTurn(is_sampled=False, messages=(Message(role=role, content=content),))


@pytest.fixture
def folder(tmp_path, tiny_model):
    from mrl.models.tokenizers import train_byte_level

    train_byte_level(["answer yah one two three"] * 3, 400).save_pretrained(tmp_path / "p")
    tiny_model(vocab_size=400).save_pretrained(tmp_path / "p")
    return tmp_path / "p"


@pytest.fixture
def words(folder):
    tokenizer = load_tokenizer(folder)

    def make(template="", *, max_turn_tokens=99, max_episode_tokens=999) -> OwnWords:
        spelling = TurnSpelling(folder, PromptTable(chat_template=template), eos_ids=[tokenizer.eos_token_id])
        return OwnWords(spelling, tokenizer.eos_token_id, max_turn_tokens, max_episode_tokens)

    return make


@pytest.mark.parametrize("template", ["", CHATML])
def test_turns_of_the_peer_are_marked_and_closed(words, folder, template):
    """Each as the peer's text and the own EOS; between them the own bridge."""
    tokenizer = load_tokenizer(folder)
    found = words(template).spell([own("4"), given("higher"), own("6")])

    sampled = [tokenizer.decode(part.tolist()) for part in _parts(found.token_ids, found.is_sampled, True)]
    bridges = [tokenizer.decode(part.tolist()) for part in _parts(found.token_ids, found.is_sampled, False)]
    eos = tokenizer.eos_token
    assert sampled == [f"4{eos}", f"6{eos}"]
    assert bridges == ["\n[user]higher</s>\n[assistant]" if template and eos == "</s>" else bridges[0]]
    assert "higher" in bridges[0]
    assert eos not in bridges[0] or template


def _parts(ids, is_sampled, wanted):
    edges = np.flatnonzero(np.diff(is_sampled)) + 1
    starts = [0, *edges]
    return [part for part, at in zip(np.split(ids, edges), starts, strict=True) if is_sampled[at] == wanted]


def test_calls_are_said_in_the_own_syntax(words, folder):
    """As the template writes them."""
    tokenizer = load_tokenizer(folder)
    found = words(CHATML).spell([own("hm", CALL), given("7", "tool"), own("7")])
    (first, _) = _parts(found.token_ids, found.is_sampled, True)
    assert '<call>{"name": "look_up", "arguments": {"key": "b"}}</call>' in tokenizer.decode(first.tolist())


def test_a_model_without_a_template_calls_by_a_line(words, folder):
    """As its warm start has taught it."""
    found = words().spell([own("hm", CALL)])
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(found.token_ids.tolist()) == 'hm\ncall look_up {"key":"b"}' + tokenizer.eos_token


@pytest.mark.parametrize(
    ("template", "turns", "limits", "why"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", [own("", CALL)], {}, "tool_calls"),
        ("", [given("higher"), own("6")], {}, "malformed"),
        ("", [SharedTurn(is_sampled=True, messages=())], {}, "malformed"),
        ("", [own("x" * 50)], {"max_turn_tokens": 20}, "too_long"),
        ("", [own("4"), given("y" * 50), own("6")], {"max_episode_tokens": 40}, "too_long"),
        (
            "{% for m in messages %}{{ raise_exception('no') if m.content == 'z' else m.content }}{% endfor %}",
            [own("4"), given("z"), own("6")],
            {},
            "no_bridge",
        ),
    ],
)
def test_what_cannot_be_said_has_a_reason(words, template, turns, limits, why):
    """An expected outcome; nothing is cut, for nobody has verified a part."""
    assert words(template, **limits).spell(turns) == why


@pytest.mark.parametrize(("template", "syntax"), [("", PLAIN), (HERMES_TEMPLATE, HERMES)])
def test_a_peers_calls_are_played_again_in_the_own_syntax(words, template, syntax):
    """What the environment gets was said in own tokens, and is the peer's call; its answer has the own bridge."""
    voice_of = words(template)

    def read(text, is_cut, has_tools):
        return read_turn(syntax_of(template), text, is_cut=is_cut)

    assert syntax_of(template) is syntax
    voice = OwnVoice(voice_of.spelling, read, voice_of.turn, can_call=True)
    replay = TurnReplay([own("", CALL), given("7", "tool"), own("so"), given("on")], voice, has_tools=True)

    turn = replay.next_turn()
    assert turn.tool_calls == (CALL,)
    assert ("<tool_call>" in turn.text) == bool(template)
    assert replay.heard(EnvironmentTurn(given("7", "tool").messages)) is None
    assert replay.next_turn().text == "so"
    assert not replay.is_over
    assert replay.heard(EnvironmentTurn(given("on").messages)) is None
    assert replay.is_over
    expected = voice_of.spell([own("", CALL), given("7", "tool"), own("so"), given("on")])
    assert np.concatenate(replay.parts).tolist() == expected.token_ids.tolist(), "as the learner has tried it"


def test_calls_in_a_way_that_is_not_read_are_not_played(words):
    """The environment would take them for words."""
    voice_of = words(CHATML)
    voice = OwnVoice(
        voice_of.spelling, lambda text, is_cut, _: read_turn(NONE, text, is_cut=is_cut), voice_of.turn, can_call=False
    )
    end = TurnReplay([own("", CALL), given("7", "tool")], voice, has_tools=True).next_turn()
    assert isinstance(end, EnvironmentTurn)
    assert (end.reason, end.done) == ("unsaid", True)


@pytest.mark.parametrize("messages", [(), (Message("user", "a"),), (Message("assistant", "a" * 500),)])
def test_a_turn_that_is_none_of_a_policys_ends_the_replay(words, messages):
    """Whatever the record says: the worker goes on."""
    voice_of = words()
    voice = OwnVoice(voice_of.spelling, lambda *_: pytest.fail("not said"), voice_of.turn, can_call=True)
    turns = [SharedTurn(is_sampled=True, messages=messages), given("7")]
    assert TurnReplay(turns, voice, has_tools=False).next_turn().reason == "unsaid"
