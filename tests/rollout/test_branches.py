"""Episodes whose agent rewrites the conversation or gives text without roles: rows of what the policy is shown."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from mrl.alignment.receiver import load_receiver
from mrl.config.policy_tables import ObjectiveTable, PromptTable
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import FinishedAnswer, Sampling
from mrl.engines.token_sampling import answer_seeds
from mrl.learner.forward import ForwardSettings
from mrl.learner.packing import pack
from mrl.learner.ranks.world import World
from mrl.learner.step import Updater
from mrl.models.load_policy import load_tokenizer
from mrl.models.row_attention import use_row_attention
from mrl.models.turn_renderer import TurnRenderer
from mrl.processes.episode_setup import PeerEpisodeRenderer, read_turn
from mrl.records.codec import pack_array
from mrl.records.episodes import MAX_LAST_CHARS, Message, ToolCall, ToolSpec
from mrl.records.experience import SharedTurn
from mrl.records.finish import FinishReason
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.records.version import Version
from mrl.rollout.episode import EpisodeRequest, EpisodeRules, PlayedEpisode
from mrl.rollout.episode_engine import EpisodeEngine, EpisodeSetup
from mrl.rollout.raw_prompts import given_row, spelled_turn
from mrl.rollout.turn_replay import TurnCodec
from mrl.sharing.context import SharingContext
from mrl.sharing.own_objective import own_objective
from mrl.sharing.regimes import build_regime
from mrl.tasks.environments.contract import EnvironmentTurn, PolicyTurn, RawPrompt
from mrl.tasks.environments.tool_syntax import NONE, syntax_of
from tests.support.episode_rows import rows_of
from tests.support.forgetful_template import END, FORGETFUL, OPEN

VOCAB, TURN_TOKENS, BOUND_S = 400, 40, 120.0
ADD = ToolSpec("add", "Adds.", '{"type":"object"}')
CALL = ToolCall.of("add", {"a": 1})


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str, *calls: ToolCall) -> Message:
    return Message("assistant", text, tool_calls=calls)


def told(*messages: Message) -> EnvironmentTurn:
    """The conversation goes on."""
    return EnvironmentTurn(messages)


def branch(*messages: Message, tools: tuple[ToolSpec, ...] = ()) -> EnvironmentTurn:
    """It is another one from here on."""
    return EnvironmentTurn(messages, tools=tools, begins_row=True)


def bare(text: str | None, *token_ids: int) -> EnvironmentTurn:
    """Text without roles, or ids."""
    return EnvironmentTurn(bare=RawPrompt(text, token_ids), wants_tokens=True)


def done(reward: float = 1.0) -> EnvironmentTurn:
    return EnvironmentTurn(done=True, reward=reward, reason="done")


BRIEF = Message("system", "be brief")
COMPACTED = (BRIEF, user("so far: hay"), assistant("<think>hm</think>yah"), user("three"))
SCRIPT = (
    told(user("one")),
    told(user("two")),
    branch(*COMPACTED, tools=(ADD,)),
    told(Message("tool", "7", name="add")),
    branch(user("four")),
    done(),
)
"""Two turns, two behind a rewritten conversation with a tool, and one behind a second, of a sub-agent say."""
SHOWN = (((user("one"),), ()), (COMPACTED, (ADD,)), ((user("four"),), ()))
"""What each of the three rows begins with."""


class Scripted:
    """An agent that says what it is told to; what is a function makes that of the turn before."""

    def __init__(self, turns: Sequence[EnvironmentTurn | Callable[[PolicyTurn], EnvironmentTurn]], reward: float):
        self._turns, self._reward = iter(turns), reward
        self.first = self._next()
        self.heard = []

    def step(self, turn):
        """The next."""
        self.heard.append(turn)
        return self._next()

    def finish(self, reason, turn=None):
        """The reward."""
        return _at_once(EnvironmentTurn(done=True, reward=self._reward, reason=reason))

    def close(self):
        """Nothing."""

    def _next(self):
        turn = next(self._turns)
        return _at_once(turn if isinstance(turn, EnvironmentTurn) else turn(self.heard[-1]))


def _at_once(turn: EnvironmentTurn) -> "Future[EnvironmentTurn]":
    future: Future[EnvironmentTurn] = Future()
    future.set_result(turn)
    return future


@pytest.fixture
def make_folder(tmp_path, tiny_model):
    """A policy of random weights, with a chat template that forgets or with another one, or without any."""

    def make(template=FORGETFUL):
        from mrl.models.tokenizers import train_byte_level

        tokenizer = train_byte_level(["one two three four so far hay yah add user assistant"] * 3, VOCAB - 2)
        tokenizer.add_special_tokens({"eos_token": END, "additional_special_tokens": [OPEN]})
        tokenizer.chat_template = template or None
        tokenizer.save_pretrained(tmp_path / "model")
        tiny_model(seed=2, vocab_size=VOCAB).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return make


@pytest.fixture
def folder(make_folder):
    """With a template that forgets."""
    return make_folder()


@pytest.fixture
def ends_early(monkeypatch):
    """Turns of the policy end by themselves, after three tokens at most."""
    real = EmbeddedEngine.collect

    def collect(self, timeout_s):
        ended = []
        for one in real(self, timeout_s):
            said = one.generation
            size = min(3, said.token_ids.size)
            span = type(said.versions[0])(size, said.versions[0].version)
            short = type(said)(said.token_ids[:size], said.logprobs[:size], [span], FinishReason.STOP)
            ended.append(FinishedAnswer(one.request_id, one.index, short))
        return ended

    monkeypatch.setattr(EmbeddedEngine, "collect", collect)


class Played(list):
    """Episodes that a script has played, with what the policy was shown and the agent heard."""

    player: EpisodeEngine
    agents: list[Scripted]
    with_tools: list[bool]


@pytest.fixture
def play(ends_early):
    """Plays one episode of each script; all of one request begin alike."""
    players = []

    def play(folder, *scripts, history="sampled", can_call=True, max_turns=9, given=(), **limits) -> Played:
        end = load_tokenizer(folder).eos_token_id
        renderer = TurnRenderer(folder, PromptTable(history=history), eos_ids=[end])
        syntax, found = syntax_of(renderer.template), Played()
        found.with_tools = []

        def read(text, is_cut, tools):
            found.with_tools.append(bool(tools))
            return read_turn(syntax if tools else NONE, text, is_cut=is_cut)

        words = PeerEpisodeRenderer(renderer, end, TURN_TOKENS, 10_000)
        found.agents = [Scripted(script or SCRIPT, float(number)) for number, script in enumerate(scripts)]
        waiting = iter(found.agents)
        engine = EmbeddedEngine(folder, Sampling(1.0, TURN_TOKENS, (end,)), device="cpu", max_running=8)
        engine.label(Version(0, 1))
        bounds = {"row_tokens": 10_000, "pass_tokens": 10_000, "max_tokens": 10_000} | limits
        setup = EpisodeSetup(
            open=lambda prompt_id: next(waiting),
            rules=lambda prompt_id: EpisodeRules(max_turns, bounds["max_tokens"], failed_reward=-1.0),
            codec=TurnCodec(
                renderer,
                read,
                words.turn,
                can_call,
                so_far=lambda text, _: text,
                spelled=lambda token_id: renderer.name(token_id).encode(),
            ),
            max_turn_tokens=TURN_TOKENS,
            row_tokens=bounds["row_tokens"],
            pass_tokens=bounds["pass_tokens"],
        )
        found.player = EpisodeEngine(engine, setup)
        players.append(found.player)
        seeds = answer_seeds(1, "a", "7", 0, len(scripts))
        found.player.submit([EpisodeRequest("r", np.zeros(0, np.int32), seeds, prompt_id="7", given=given)])
        until_s, ended = time.monotonic() + BOUND_S, []
        while len(ended) < len(scripts) and time.monotonic() < until_s:
            ended += found.player.collect(1.0)
        found.extend(one.generation for one in sorted(ended, key=lambda one: one.index))
        return found

    yield play
    for player in players:
        player.close()


def rendered(folder, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
    """A conversation, to be answered, by transformers alone."""
    tokenizer = load_tokenizer(folder)
    chat = [
        {"role": one.role, "content": one.content}
        | ({"tool_calls": [{"function": {"name": c.name, "arguments": c.values}} for c in one.tool_calls]})
        for one in messages
    ]
    given = {"tools": [tool.as_chat() for tool in tools]} if tools else {}
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **given)
    return tokenizer(text)["input_ids"]


def answer_of(played: PlayedEpisode, reward: float = 0.0) -> Answer:
    """What the learner gets of it."""
    return Answer(
        token_ids=pack_array(played.token_ids, "i4"),
        logprobs=pack_array(played.logprobs, "f4"),
        versions=played.versions,
        completion=b"",
        finish_reason=played.finish_reason,
        reward=reward,
        segments=played.segments,
        ending=played.ending,
    )


@pytest.mark.parametrize("history", ["sampled", "template"])
def test_each_branch_is_a_row_of_what_the_template_renders(folder, play, history):
    """With its tools; turns that go on stand behind a bridge, and each was sampled behind all of its row."""
    found = play(folder, SCRIPT, history=history)
    (played,) = found
    assert (played.ending, played.verdict.reward) == ("done", 1.0)
    shown = rows_of(played)
    assert [shown[0], shown[2], shown[4]] == [rendered(folder, *one) for one in SHOWN]
    renderer = TurnRenderer(folder, eos_ids=[load_tokenizer(folder).eos_token_id])
    for before, behind, new in ((0, 1, user("two")), (2, 3, Message("tool", "7", name="add"))):
        turn = [one for one, segment in zip(parts_of(played), played.segments, strict=True) if segment.is_sampled]
        bridge = renderer.bridge(turn[before].tolist(), (), [new]).tolist()
        assert shown[behind] == [*shown[before], *turn[before].tolist(), *bridge]
    assert marks_of(played) == [(False, False), (True, True), (False, False), (True, True)]
    assert found.with_tools == [False, False, True, True, False], "how each turn is read"
    kept = [one.messages for one in played.segments if one.is_rewritten]
    assert kept == [COMPACTED, (user("four"),)]
    assert answer_of(played).is_rewritten


def test_what_was_sampled_in_a_row_has_the_log_probs_of_that_row(folder, play):
    """By one plain forward over each row alone: given turns of the assistant are context as anything that is given."""
    found = play(folder, SCRIPT)
    (played,) = found
    number = 0
    for shown, turn in zip(rows_of(played), turns_of(played), strict=True):
        (scored,) = found.player.score([[*shown, *turn.tolist()]])
        size = turn.size
        np.testing.assert_allclose(scored[-size:], played.logprobs[number : number + size], atol=1e-4)
        number += size
    assert number == played.logprobs.size == sum(span.num_tokens for span in played.versions)


def parts_of(played: PlayedEpisode) -> list[np.ndarray]:
    """Ids of each segment."""
    return np.split(played.token_ids, np.cumsum([one.num_tokens for one in played.segments])[:-1])


def marks_of(played: PlayedEpisode) -> list[tuple[bool, bool]]:
    """Of each stretch that was given and takes tokens: whether it begins a row, and one that was rewritten."""
    return [(one.begins_row, one.is_rewritten) for one in played.segments if one.num_tokens and not one.is_sampled]


def turns_of(played: PlayedEpisode) -> list[np.ndarray]:
    """Ids of each turn of the policy."""
    return [ids for ids, one in zip(parts_of(played), played.segments, strict=True) if one.is_sampled]


def test_a_branch_begins_anew_for_reasoning_too(folder, play):
    """What its row does not show is not dropped again; what it shows goes when the template drops it."""
    no_more = (told(user("one")), branch(*COMPACTED), told(user("on")), told(user("on")), done())
    thinking = (user("q"), assistant("<think>kept</think>so", CALL), Message("tool", "7", name="add"))
    later = (told(user("one")), branch(*COMPACTED), branch(*thinking, tools=(ADD,)), told(user("and?")), done())
    (first,), (second,) = play(folder, no_more, history="template"), play(folder, later, history="template")
    assert marks_of(first) == [(True, True), (False, False), (False, False)]
    assert marks_of(second) == [(True, True), (True, True), (True, False)]
    tokenizer = load_tokenizer(folder)
    assert "kept" in tokenizer.decode(rows_of(second)[2])
    assert "kept" not in tokenizer.decode(rows_of(second)[3])
    said = tokenizer.decode(turns_of(second)[2].tolist()).removesuffix(END)
    assert rows_of(second)[3] == rendered(folder, [*thinking, assistant(said), user("and?")], (ADD,))


def test_limits_hold_for_each_row_and_for_all_of_them(folder, play):
    """A branch that leaves no room for a turn ends the episode, whose reward is asked for."""
    (whole,) = play(folder, SCRIPT)
    longest = max(len(shown) for shown in rows_of(whole)) + TURN_TOKENS
    assert play(folder, SCRIPT, row_tokens=longest)[0].ending == "done"
    assert play(folder, SCRIPT, row_tokens=longest - 1)[0].ending == "max_tokens"
    behind = whole.token_ids.size - turns_of(whole)[-1].size + TURN_TOKENS
    in_all = whole.prompt_token_ids.size + behind
    for bound, size in (("pass_tokens", in_all), ("max_tokens", behind)):
        assert play(folder, SCRIPT, **{bound: size})[0].ending == "done"
        (short,) = play(folder, SCRIPT, **{bound: size - 1})
        assert (short.ending, short.verdict.reward) == ("max_tokens", 0.0)
        assert [one.is_sampled for one in short.segments if one.num_tokens][-1], "what nobody answers takes no tokens"
        assert (short.segments[-1].num_tokens, short.segments[-1].begins_row) == (0, False)
        assert answer_of(short).has_sound_rows
    assert play(folder, SCRIPT, max_turns=4)[0].ending == "max_turns"


def test_an_episode_that_ends_at_its_first_branch_is_none_that_was_rewritten(folder, play):
    """It is one row, and peers may have it."""
    (played,) = play(folder, (told(user("one")), branch(user("other")), done()), max_turns=1)
    assert played.ending == "max_turns"
    assert not answer_of(played).is_rewritten
    assert [one.messages for one in played.segments if not one.is_sampled] == [(user("other"),)]


def test_what_the_template_refuses_fails_the_episode_with_its_words(make_folder, play):
    """As its first messages would."""
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    (played,) = play(make_folder(refuses + FORGETFUL), SCRIPT)
    assert (played.ending, played.verdict.reward) == ("wrong_type", -1.0)
    assert "no system here" in played.verdict.words


def test_tools_that_come_with_a_branch_have_to_be_callable(folder, play):
    """A template without calls would have the policy fail for ever, unsaid."""
    (played,) = play(folder, SCRIPT, can_call=False)
    assert played.ending == "wrong_type"
    assert "shows no tool call format that mrl knows" in played.verdict.words


def test_without_a_template_turns_in_a_branch_are_spelled_as_own_ones(make_folder, play):
    """A line for each message, and behind each turn its end; calls in the policy's own syntax."""
    folder = make_folder("")
    rewritten = (
        user("one"),
        BRIEF,
        assistant("yah", CALL),
        Message("tool", "7", name="add"),
        assistant("hay"),
        user("on"),
    )
    (played,) = play(folder, (told(user("one")), branch(*rewritten, tools=(ADD,)), done()))
    assert played.ending == "done"
    shown = load_tokenizer(folder).decode(rows_of(played)[1])
    assert shown == f'one\nbe brief\nyah\ncall add {{"a":1}}{END}7\nhay{END}on\n'


def test_without_a_template_a_row_that_begins_with_a_turn_begins_as_any_other(make_folder, play):
    """As behind a window that slides: what tokenizers put before a text stands before it."""
    folder = make_folder("")
    tokenizer = load_tokenizer(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    (played,) = play(folder, (told(user("one")), branch(assistant("yah"), user("on")), done()))
    assert load_tokenizer(folder).decode(rows_of(played)[1]) == f"{END}yah{END}on\n"


def test_a_branch_of_more_bytes_than_its_row_has_tokens_is_not_spelled(folder, play, monkeypatch):
    """Tokenizers take seconds for a long word, and all episodes of the worker wait."""
    monkeypatch.setattr(TurnCodec, "row", lambda *_: pytest.fail("spelled"))
    (played,) = play(folder, (told(user("one")), branch(user("x" * 3300)), done()), row_tokens=200)
    assert (played.ending, played.verdict.reward) == ("max_tokens", 0.0)
    assert not answer_of(played).is_rewritten


def test_a_branch_that_grows_beyond_what_a_message_holds_fails_its_episode_alone(folder, play):
    """Where reasoning is looked for, its place is marked."""
    thought = assistant("</think>" + "x" * ((1 << 20) - 8))
    script = (told(user("one")), branch(user("a"), thought, user("b")), done())
    (played,) = play(folder, script, history="template", row_tokens=1 << 18)
    assert (played.ending, "at most 1,048,576" in played.verdict.words) == ("wrong_type", True)


def test_a_turn_that_own_words_cannot_say_is_told(make_folder, play):
    """Without a template: one longer than own turns may be."""
    (played,) = play(make_folder(""), (told(user("one")), branch(assistant("x" * 500), user("on")), done()))
    assert (played.ending, "cannot be written in the policy's tokens: too_long" in played.verdict.words) == (
        "wrong_type",
        True,
    )


def test_a_long_conversation_is_kept_in_part_for_people(folder, play):
    """Its row has all of it."""
    many = [user(f"{place} x") for place in range(600)]
    long = [user("one "), *[user("far " * (1 << 17))] * 2]
    (played,) = play(folder, (told(user("one")), branch(*many), branch(*long), done()), row_tokens=300_000)
    assert rows_of(played)[1] == rendered(folder, many)
    first, second = (one.messages for one in played.segments if one.begins_row or not one.is_sampled)
    assert [one.content for one in first] == [one.content for one in (*many[:128], *many[-128:])]
    assert [len(one.content) for one in second] == [4, MAX_LAST_CHARS, MAX_LAST_CHARS]


def test_the_learner_takes_an_episode_with_branches_as_each_of_its_rows_alone(folder, play, tiny_model):
    """Loss and gradient are those of plain forwards over single rows, whose sampled tokens count as one answer's."""
    played = play(folder, SCRIPT, SCRIPT, SCRIPT)
    rewards = [1.0, 0.0, 0.5]
    group = ScoredGroup(
        ticket="0.0",
        prompt_id="7",
        task="t",
        prompt_token_ids=pack_array(played[0].prompt_token_ids, "i4"),
        answers=[answer_of(one, reward) for one, reward in zip(played, rewards, strict=True)],
    )
    objective = own_objective(ObjectiveTable(), max_answer_tokens=64)
    context = SharingContext("own", objective, load_receiver(folder), peers=(), others=())
    regime = build_regime({"regime": "independent"}, context)
    absorbed = regime.absorb([group], step=0, rng=np.random.default_rng(0))
    assert [row.num_rows for row in absorbed.examples] == [3, 3, 3]
    plain, model = tiny_model(seed=2, vocab_size=VOCAB), tiny_model(seed=2, vocab_size=VOCAB)
    use_row_attention(model)
    updater = Updater(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        regime.components,
        World(0, 1, torch.device("cpu")),
        forward=ForwardSettings(1.0),
        max_grad_norm=1e9,
        reference=None,
    )
    batches = pack(absorbed.examples, regime.components, microbatch_tokens=256)
    values, _ = updater.update(batches, None, absorbed.denominators, update_index=0, num_rows=3)

    advantages = (np.array(rewards) - np.mean(rewards)) / np.std(rewards, ddof=1)
    total = torch.zeros(())
    for one, advantage in zip(played, advantages, strict=True):
        terms, start = [], 0
        for shown, turn in zip(rows_of(one), turns_of(one), strict=True):
            logits = plain(torch.tensor([[*shown, *turn.tolist()]])).logits[0].log_softmax(-1)
            of_turn = logits[len(shown) - 1 : -1].gather(-1, torch.from_numpy(turn.astype(np.int64))[:, None])[:, 0]
            ratio = (of_turn - of_turn.detach()).exp()
            behind = torch.from_numpy(one.logprobs[start : start + turn.size])
            terms.append(-advantage * ratio * (of_turn.detach() - behind).exp())
            start += turn.size
        total = total + torch.cat(terms).mean() / 3
    total.backward()
    assert values["loss/total"] == pytest.approx(total.item(), abs=1e-5)
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own.grad, expected.grad, atol=1e-4 * float(expected.grad.abs().max()))


def test_tokens_of_a_turn_are_told_where_they_are_asked_for(folder, play):
    """As they are in the row that is trained on, with the log-probabilities that they were sampled with."""
    script = [EnvironmentTurn((user("one"),), wants_tokens=True), told(user("two")), done()]
    found = play(folder, script, history="sampled")
    (played,), (agent,) = found, found.agents
    first, second = agent.heard
    size = played.segments[0].num_tokens
    assert [one.token_id for one in first.sampled] == played.token_ids[:size].tolist()
    assert [one.logprob for one in first.sampled] == played.logprobs[:size].tolist()
    names = load_tokenizer(folder).convert_ids_to_tokens(played.token_ids[:size].tolist())
    assert [one.spelled.decode() for one in first.sampled] == [name or "" for name in names]
    assert any(names)
    assert second.sampled == ()


def ids_of(turn: PolicyTurn) -> list[int]:
    """Of what was sampled."""
    return [one.token_id for one in turn.sampled]


def test_text_that_repeats_a_row_goes_on_in_it_and_other_text_begins_one(folder, play):
    """By text where all of the row was told as text, by ids in any row; what was sampled stays as it was sampled."""
    tokenizer = load_tokenizer(folder)
    other, four = tokenizer("other")["input_ids"], rendered(folder, [user("four")], (ADD,))
    script = (
        bare("one two"),
        lambda turn: bare(f"one two{turn.text} three"),
        bare("other"),
        lambda turn: bare(None, *other, *ids_of(turn), 5),
        replace(branch(user("four"), tools=(ADD,)), wants_tokens=True),
        lambda turn: bare(None, *four, *ids_of(turn), 6),
        done(),
    )
    found = play(folder, script)
    (played,) = found
    assert played.ending == "done", played.verdict.words
    shown, turns = rows_of(played), [turn.tolist() for turn in turns_of(played)]
    assert shown == [
        tokenizer("one two")["input_ids"],
        [*shown[0], *turns[0], *tokenizer(" three")["input_ids"]],
        other,
        [*other, *turns[2], 5],
        four,
        [*four, *turns[4], 6],
    ]
    given = [one for one in played.segments if one.num_tokens and not one.is_sampled]
    assert [one.begins_row for one in given] == [False, True, False, True, False]
    assert [one.is_bare for one in played.segments if one.is_sampled] == [True] * 4 + [False, True]
    assert [one.messages[0].content for one in given] == [
        " three",
        "other",
        tokenizer.decode([5]),
        "four",
        tokenizer.decode([6]),
    ]
    assert found.with_tools == [False] * 4 + [True, False], "text without roles has no tools"
    assert answer_of(played).is_bare
    number = 0
    for behind, turn in zip(shown, turns, strict=True):
        (scored,) = found.player.score([[*behind, *turn]])
        np.testing.assert_allclose(scored[-len(turn) :], played.logprobs[number : number + len(turn)], atol=1e-4)
        number += len(turn)


def test_what_ended_a_turn_has_to_be_said_again_by_whoever_goes_on(folder):
    """Else the policy would see it and its agent would not know; a row that is repeated as it is begins anew, too."""
    end = load_tokenizer(folder).eos_token_id
    renderer = TurnRenderer(folder, eos_ids=[end])
    prompt, turn = renderer.plain("one"), np.array([*renderer.plain(" two").tolist(), end], dtype=np.int32)
    row, spelled = np.concatenate([prompt, turn]), "one" + spelled_turn(turn, renderer)
    assert spelled == f"one two{END}"

    def given(text, *token_ids):
        found = given_row(RawPrompt(text, token_ids), renderer, lambda: row, spelled)
        return found.token_ids.tolist(), found.begins_row, found.spelled

    on = f"one two{END} three"
    assert given(on) == (renderer.plain(" three").tolist(), False, on)
    for text in ("one two three", spelled, "one"):
        assert given(text) == (renderer.plain(text).tolist(), True, text)
    assert given(None, *row.tolist(), 7) == ([7], False, None)
    for ids in (row.tolist(), row[:-1].tolist(), [*row[:-1].tolist(), 7, 7]):
        assert given(None, *ids) == (ids, True, None)
    assert given_row(RawPrompt(on), renderer, lambda: row, None).begins_row, "what the row spells is not known"


@pytest.mark.parametrize(
    ("script", "limits", "ending", "words"),
    [
        ([bare(None, 5, 9999)], {}, "wrong_type", "a token id that the policy does not have: 9999"),
        ([told(user("one")), bare(None, 9999)], {}, "wrong_type", "a token id that the policy does not have: 9999"),
        ([bare("x" * 3300)], {"row_tokens": 200}, "too_long", "the first text is longer than a row may be"),
        ([bare(None, *[5] * 201)], {"row_tokens": 200}, "too_long", "the first text is longer than a row may be"),
        ([bare("one"), bare("x" * 3300)], {"row_tokens": 200}, "max_tokens", ""),
        ([bare("one"), bare("two " * 60)], {"row_tokens": 80}, "max_tokens", ""),
    ],
)
def test_text_that_is_none_of_the_policys_or_too_long_ends_the_episode(folder, play, script, limits, ending, words):
    """As messages do."""
    (played,) = play(folder, script, **limits)
    assert (played.ending, played.verdict.words) == (ending, played.verdict.words)
    assert words in played.verdict.words


def test_an_agent_without_messages_does_not_go_on_from_a_peers_turns(folder, play):
    """They stand behind messages."""
    turns = (
        SharedTurn(is_sampled=True, messages=(assistant("hay"),)),
        SharedTurn(is_sampled=False, messages=(user("on"),)),
    )
    (opened,) = play(folder, (bare("one"),), given=turns)
    (answered,) = play(folder, (told(user("one")), bare("on")), given=turns)
    (rewritten,) = play(folder, (told(user("one")), branch(user("on"))), given=turns)
    assert [one.ending for one in (opened, answered, rewritten)] == ["unequal"] * 3
    (same,) = play(folder, (told(user("one")), told(user("on")), done()), given=turns)
    assert same.ending == "done"
