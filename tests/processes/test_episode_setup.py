"""A peer's episode in own tokens is the row that the policy would have had, had it said the same."""

from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from mrl.alignment.receiver import load_receiver
from mrl.config.load import validate
from mrl.config.policy_tables import ObjectiveTable, PromptTable
from mrl.models.load_policy import load_tokenizer
from mrl.models.turn_renderer import TurnRenderer
from mrl.processes.episode_setup import PeerEpisodeRenderer, peer_renderer, read_turn, with_episodes
from mrl.records.codec import pack_array
from mrl.records.episodes import EpisodeSegment, Message, Opening, ToolCall, ToolSpec
from mrl.records.experience import GivenAnswer, SharedTurn, TokenTrace
from mrl.records.finish import FinishReason
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.records.version import Version, VersionSpan
from mrl.rollout.foreign_answers import foreign_episode
from mrl.rollout.turn_replay import TurnCodec, TurnReplay
from mrl.sharing.context import SharingContext
from mrl.sharing.own_objective import own_objective
from mrl.sharing.own_traces import rollout_record
from mrl.sharing.peer_traces import peer_traces
from mrl.sharing.regime import Author
from mrl.sharing.teacher_traces import teacher_trace
from mrl.tasks.environments.contract import EnvironmentTurn
from mrl.tasks.environments.tool_syntax import HERMES, NONE, PLAIN, syntax_of
from mrl.tasks.pool import build_pool

POOL = {"train_prompts": 4, "held_out_prompts": 2}
ROOT = Path(__file__).parents[2]
CALL = ToolCall(name="look_up", arguments='{"key":"b"}')
LOOK_UP = ToolSpec("look_up", "Looks up.", '{"type":"object"}')
CHATML = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

HERMES_TEMPLATE = "{# arguments #}" + CHATML.replace("<call>", "<tool_call>").replace("</call>", "</tool_call>")
ONE_CALL = "{% for m in messages %}{{ raise_exception('one call') if m.tool_calls and m.tool_calls[1:] }}{% endfor %}"
ONE_CALL += HERMES_TEMPLATE


def as_it_is(text, _):
    return text


def unspelled(_):
    pytest.fail("nobody has asked for tokens")


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

    def make(template="", *, max_turn_tokens=99, max_episode_tokens=999) -> PeerEpisodeRenderer:
        renderer = TurnRenderer(folder, PromptTable(chat_template=template), eos_ids=[tokenizer.eos_token_id])
        return PeerEpisodeRenderer(renderer, tokenizer.eos_token_id, max_turn_tokens, max_episode_tokens)

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


@pytest.mark.parametrize(("max_episode_tokens", "bound"), [(0, 600), (500, 500), (6000, 600)])
def test_a_peers_episode_has_the_room_of_one_row(folder, max_episode_tokens, bound):
    """Its task's bound is that of all rows together, and may be more than the model can read."""
    tasks = {"game": {"source": "environment", "dataset": "higher_lower", "max_episode_tokens": max_episode_tokens}}
    policy = {"model": str(folder), "rollout": {"max_new_tokens": 64}, "learner": {"microbatch_tokens": 600}}
    run = {"name": "r", "steps": 1}
    config = validate({"run": run, "pool": POOL, "tasks": tasks, "policies": {"p": policy}}, where="test")
    found = peer_renderer(config, "p", load_receiver(folder))
    assert found is not None
    assert found.max_episode_tokens == bound


@pytest.mark.parametrize(("template", "syntax"), [("", PLAIN), (HERMES_TEMPLATE, HERMES)])
def test_a_peers_calls_are_played_again_in_the_own_syntax(words, template, syntax):
    """What the environment gets was said in own tokens, and is the peer's call; its answer has the own bridge."""
    voice_of = words(template)

    def read(text, is_cut, tools):
        assert tools == [LOOK_UP]
        return read_turn(syntax_of(template), text, is_cut=is_cut)

    assert syntax_of(template) is syntax
    codec = TurnCodec(voice_of.renderer, read, voice_of.turn, can_call=True, so_far=as_it_is, spelled=unspelled)
    replay = TurnReplay([own("", CALL), given("7", "tool"), own("so"), given("on")], codec, [LOOK_UP])

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
    codec = TurnCodec(
        voice_of.renderer,
        lambda text, is_cut, _: read_turn(NONE, text, is_cut=is_cut),
        voice_of.turn,
        can_call=False,
        so_far=as_it_is,
        spelled=unspelled,
    )
    end = TurnReplay([own("", CALL), given("7", "tool")], codec, [LOOK_UP]).next_turn()
    assert isinstance(end, EnvironmentTurn)
    assert (end.reason, end.done) == ("unsaid", True)


@pytest.mark.parametrize("messages", [(), (Message("user", "a"),), (Message("assistant", "a" * 500),)])
def test_a_turn_that_is_none_of_a_policys_ends_the_replay(words, messages):
    """Whatever the record says: the worker goes on."""
    voice_of = words()
    codec = TurnCodec(
        voice_of.renderer,
        lambda *_: pytest.fail("not said"),
        voice_of.turn,
        can_call=True,
        so_far=as_it_is,
        spelled=unspelled,
    )
    turns = [SharedTurn(is_sampled=True, messages=messages), given("7")]
    assert TurnReplay(turns, codec, []).next_turn().reason == "unsaid"


@pytest.fixture
def aligned(words, folder):
    """An episode of a policy of these words in those of another one, whose tokenizer is the same."""

    def aligned(said, template, own_template):
        receiver = load_receiver(folder)
        codec, own_voice = words(template), words(own_template)
        spelled = codec.spell(said)
        edges = np.flatnonzero(np.diff(spelled.is_sampled)) + 1
        sizes = [part.size for part in np.split(spelled.token_ids, edges)]
        segments = [
            EpisodeSegment(num_tokens=size, is_sampled=turn.is_sampled, messages=turn.messages)
            for size, turn in zip(sizes, said, strict=True)
        ]
        num_sampled = int(spelled.is_sampled.sum())
        answer = Answer(
            token_ids=pack_array(spelled.token_ids, "i4"),
            logprobs=pack_array(-np.arange(1, num_sampled + 1) / 8, "f4"),
            versions=[VersionSpan(num_sampled, Version(0, 0))],
            completion=b"",
            finish_reason=FinishReason.STOP,
            reward=1.0,
            segments=segments,
            ending="done",
        )
        group = ScoredGroup(ticket="t", prompt_id="p", task="t", prompt_token_ids=b"", answers=[answer])
        author = Author("peer", receiver.fingerprint, "v", lambda: "r", 0.0)
        record = rollout_record(group, author, receiver, np.zeros(1, np.float32))
        objective = own_objective(ObjectiveTable(), max_answer_tokens=99)
        context = SharingContext("own", objective, receiver, peers=("peer",), renderer=own_voice)
        ((trace,),) = peer_traces([record], context, needs_trace=True)
        return trace, own_voice

    return aligned


@pytest.mark.parametrize("template", ["", HERMES_TEMPLATE])
def test_an_aligned_episode_is_the_row_that_the_policy_would_have_had(aligned, template):
    """Where both write calls alike: all that was sampled is aligned, and the ids are those of its own words."""
    said = [own("hm ", CALL), given("7", "tool"), own("answer 7")]
    trace, codec = aligned(said, template, template)
    spelled = codec.spell(said)
    assert trace.rejected == ""
    assert trace.row.token_ids.tolist() == spelled.token_ids.tolist()
    assert trace.row.is_aligned.tolist() == trace.row.is_sampled.tolist() == spelled.is_sampled.tolist()
    assert trace.aligned.dropped_tokens == 0


@pytest.mark.parametrize(("template", "own_template"), [("", HERMES_TEMPLATE), (HERMES_TEMPLATE, "")])
def test_another_syntax_of_calls_is_context_in_an_aligned_episode(aligned, folder, template, own_template):
    """The own call stands in the row as the template writes it, and has no log-prob of the peer."""
    tokenizer = load_tokenizer(folder)
    said = [own("hm", CALL), given("7", "tool"), own("answer 7")]
    trace, codec = aligned(said, template, own_template)
    eos = tokenizer.eos_token
    assert tokenizer.decode(trace.row.token_ids.tolist()) == tokenizer.decode(codec.spell(said).token_ids.tolist())
    assert tokenizer.decode(trace.row.token_ids[trace.row.is_aligned].tolist()) == f"hmanswer 7{eos}"
    assert trace.aligned.dropped_tokens > 1


def test_the_page_shows_what_is_aligned(aligned, words, folder):
    """Its three lines are what comes of that episode."""
    tokenizer = load_tokenizer(folder)
    said = [own("hm", CALL), given("7", "tool"), own("7")]
    trace, _ = aligned(said, HERMES_TEMPLATE, "")

    def shown(ids) -> str:
        return tokenizer.decode(list(ids)).replace("\n", "⏎").replace(tokenizer.eos_token, "<end>")

    spelled = words(HERMES_TEMPLATE).spell(said)
    trained = trace.row.token_ids[trace.row.is_aligned]
    lines = {
        "the peer sampled": "   ".join(shown(part) for part in _parts(spelled.token_ids, spelled.is_sampled, True)),
        "the own row": shown(trace.row.token_ids),
        "trained on": shown(trained).replace("hm", "hm   "),
    }
    page = (ROOT / "docs" / "episodes.md").read_text(encoding="utf-8")
    for what, line in lines.items():
        assert f"\n{what:<19}{line}\n" in page


def test_the_page_shows_what_a_teacher_scores(words, folder):
    """The own row, the teacher's, and the own tokens that have its log-probs by that."""
    tokenizer, receiver = load_tokenizer(folder), load_receiver(folder)
    said = [own("hm", CALL), given("7", "tool"), own("7")]
    spelled = words(HERMES_TEMPLATE).spell(said)
    parts = np.split(spelled.token_ids, np.flatnonzero(np.diff(spelled.is_sampled)) + 1)
    answer = Answer(
        token_ids=pack_array(spelled.token_ids, "i4"),
        logprobs=pack_array(-np.ones(spelled.is_sampled.sum()), "f4"),
        versions=[],
        completion=b"",
        finish_reason=FinishReason.STOP,
        reward=1.0,
        segments=[
            EpisodeSegment(num_tokens=part.size, is_sampled=turn.is_sampled, messages=turn.messages)
            for part, turn in zip(parts, said, strict=True)
        ],
        ending="done",
    )
    asked = GivenAnswer(completion=b"", finish_reason=FinishReason.STOP, turns=said)
    scored = foreign_episode(asked, receiver, words())
    scores = [
        TokenTrace(
            byte_lengths=pack_array(text.byte_lengths, "i4"),
            logprobs=pack_array(-np.ones(text.token_ids.size), "f4"),
            special=pack_array(receiver.table.is_special(text.token_ids), "u1"),
            written=text.written,
        )
        for text in scored.texts
    ]
    trace = teacher_trace(answer, scores, receiver.fingerprint, receiver)

    def shown(ids) -> str:
        return tokenizer.decode(list(ids)).replace("\n", "⏎").replace(tokenizer.eos_token, "<end>")

    own_ids = spelled.token_ids[spelled.is_sampled]
    lines = {
        "the policy sampled": "   ".join(shown(part) for part in _parts(spelled.token_ids, spelled.is_sampled, True)),
        "the teacher scored": shown(scored.token_ids),
        "has its log-probs": shown(own_ids[np.isfinite(trace.logprobs)]).replace("hm", "hm   "),
    }
    page = (ROOT / "docs" / "episodes.md").read_text(encoding="utf-8")
    for what, line in lines.items():
        assert f"\n{what:<21}{line}\n" in page


def test_an_opening_is_the_prompt_that_the_policy_itself_would_have(words):
    """With its tools; one that the template refuses has none, in a word to count."""
    opening = Opening((Message("user", "guess"),), (ToolSpec("look_up", "Looks.", '{"type":"object"}'),))
    for template in ("", CHATML):
        codec = words(template)
        expected = codec.renderer.opening(opening.messages, [opening.tools[0].as_chat()])
        assert codec.opening(opening).tolist() == expected.tolist()
    assert (
        words(
            "{{ raise_exception('no') if messages|length == 1 and messages[0].content == 'guess' }}" + CHATML
        ).opening(opening)
        == "no_opening"
    )


def test_the_rest_of_a_turn_is_closed_where_the_turn_had_ended(words, folder):
    """One that the token limit cut is not."""
    tokenizer = load_tokenizer(folder)
    ended, cut = (words().rest(b"answer", is_begun=True, is_ended=one).tolist() for one in (True, False))
    assert tokenizer.decode(cut) == "answer"
    assert ended == [*cut, tokenizer.eos_token_id]


@pytest.fixture
def codec(folder, tmp_path):
    """The voice of a policy with this template, in episodes."""

    def make(template, **prompt) -> TurnCodec:
        tables = {
            "run": {"name": "r", "steps": 1, "folder": str(tmp_path)},
            "tasks": {"guess": {"source": "environment", "dataset": "higher_lower"}},
            "policies": {"p": {"model": str(folder), "prompt": {"chat_template": template, **prompt}}},
            "pool": POOL,
        }
        config = validate(tables, where="test")
        with closing(build_pool(config.tasks, config.pool)) as pool:
            return with_episodes(Mock(), config, "p", pool, load_receiver(folder))._setup.codec

    return make


@pytest.mark.parametrize(("template", "num_made"), [(HERMES_TEMPLATE, 2), (ONE_CALL, 1)])
def test_no_more_calls_are_made_than_the_template_has_a_bridge_behind(codec, template, num_made):
    """Llama 3.1 refuses a conversation with two in a turn, which was a fault of the environment then."""
    two = "".join(f'<tool_call>{{"name": "look_up", "arguments": {CALL.arguments}}}</tool_call>' for _ in range(2))
    own_voice = codec(template)
    turn, _ = own_voice.read(two, False, [LOOK_UP])
    assert turn.tool_calls == (CALL,) * num_made
    assert len(turn.tool_calls) + len(turn.broken) == 2
    own_voice.renderer.bridge([], turn.tool_calls, [Message("tool", "7")] * 2)


def test_calls_that_a_template_shows_and_does_not_say_are_none(codec):
    """That of SmolLM3 leaves the turn's calls out, and the tools that it is given."""
    shows = CHATML.replace("m.tool_calls or []", "[]") + '{# <tool_call>{"arguments"} #}'
    assert not codec(shows).can_call
    assert codec(HERMES_TEMPLATE).can_call


@pytest.mark.parametrize(
    ("text", "has_tools", "begins"),
    [
        ("so", False, "so"),
        ("na\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}", False, "na"),
        ("so it en", False, "so it "),
        ("so it ends here", False, "so it "),
        ("so <tool_", False, "so <tool_"),
        ("so <tool_", True, "so "),
        ('so <tool_call>{"na', True, "so "),
    ],
)
def test_of_a_turn_that_goes_on_its_sure_beginning_is_told(codec, text, has_tools, begins):
    """Without half a character, or what may yet be a text that ends it, or a call."""
    assert codec(HERMES_TEMPLATE, stop=["ends"]).so_far(text, has_tools) == begins
