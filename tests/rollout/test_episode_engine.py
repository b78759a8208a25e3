"""Episodes between a real engine and real environment processes."""

import time
from concurrent.futures import Future
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from mrl.config.policy_tables import PromptTable
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import FinishedAnswer, GenerationRequest, Sampling
from mrl.engines.token_sampling import answer_seeds
from mrl.models.load_policy import load_tokenizer
from mrl.models.turn_renderer import TurnRenderer
from mrl.records.episodes import Message, Opening, ToolCall
from mrl.records.experience import SharedTurn
from mrl.records.finish import FinishReason
from mrl.records.version import Version
from mrl.rollout import episode_engine
from mrl.rollout.episode import EpisodeRequest, EpisodeRules, PlayedEpisode
from mrl.rollout.episode_engine import EpisodeEngine, EpisodeSetup
from mrl.rollout.turn_replay import TurnCodec
from mrl.tasks.environments.contract import EnvironmentTurn, PolicyTurn
from mrl.tasks.environments.environment_pool import EnvironmentPool

VOCAB, TURN_TOKENS, BOUND_S = 400, 5, 120.0


@pytest.fixture(autouse=True)
def environment_modules(monkeypatch):
    """Environment processes find the modules of the tests."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.fixture
def folder(tmp_path, tiny_model):
    """A policy of random weights that reads and writes by bytes."""
    from mrl.models.tokenizers import train_byte_level

    train_byte_level(["answer yah one two three"] * 3, VOCAB).save_pretrained(tmp_path / "model")
    tiny_model(seed=2, vocab_size=VOCAB).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def environments():
    """The processes of one environment, ended behind the test."""
    name = "tests.support.played_environments:Counting"
    with closing(EnvironmentPool(name, processes=2, wall_s=60.0, cpu_s=60.0)) as pool:
        yield pool


@pytest.fixture
def make_player(folder, environments):
    """An engine that plays episodes of the rows that tests give by prompt id."""

    def make(
        rows=None, *, max_turns=8, max_tokens=1000, row_tokens=10_000, in_step=False, can_call=True
    ) -> EpisodeEngine:
        tokenizer = load_tokenizer(folder)
        sampling = Sampling(1.0, TURN_TOKENS, (tokenizer.eos_token_id,))
        engine = EmbeddedEngine(folder, sampling, device="cpu", max_running=8)
        engine.label(Version(0, 1))
        setup = EpisodeSetup(
            open=lambda prompt_id: environments.open(int(prompt_id), (rows or {}).get(prompt_id, {})),
            rules=lambda prompt_id: EpisodeRules(max_turns, max_tokens, failed_reward=-1.0),
            codec=voice_of(folder, can_call=can_call),
            max_turn_tokens=TURN_TOKENS,
            row_tokens=row_tokens,
            in_step=in_step,
            tells_opening=True,
        )
        return EpisodeEngine(engine, setup)

    return make


def voice_of(folder, *, can_call=True) -> TurnCodec:
    """Of a policy without a template, which says and reads texts as they are."""
    end = load_tokenizer(folder).eos_token_id
    renderer = TurnRenderer(folder, PromptTable(), eos_ids=[end])
    return TurnCodec(
        renderer,
        read=lambda text, is_cut, tools: (PolicyTurn(text), Message(role="assistant", content=text)),
        say=lambda messages: renderer.turn(messages[0].content, eos_id=end),
        can_call=can_call,
        so_far=lambda text, _: text,
        spelled=lambda token_id: renderer.name(token_id).encode(),
    )


def request(prompt_id: str, size: int = 2, name: str = "", given: tuple[SharedTurn, ...] = ()) -> EpisodeRequest:
    nothing = np.zeros(0, np.int32)
    return EpisodeRequest(
        name or f"r{prompt_id}", nothing, answer_seeds(1, "a", prompt_id, 0, size), prompt_id=prompt_id, given=given
    )


def given_turns(*pairs: tuple[str, str]) -> tuple[SharedTurn, ...]:
    """What a peer said, and what its environment said to that."""
    turns = []
    for said, told in pairs:
        turns.append(SharedTurn(is_sampled=True, messages=(Message("assistant", said),)))
        turns.append(SharedTurn(is_sampled=False, messages=(Message("user", told),)))
    return tuple(turns)


TWO_TURNS = given_turns(("one", "heard one"), ("two", "heard one two"))


def collected(player: EpisodeEngine, count: int) -> dict[tuple[str, int], PlayedEpisode]:
    found: list[FinishedAnswer] = []
    until_s = time.monotonic() + BOUND_S
    while len(found) < count and time.monotonic() < until_s:
        found += player.collect(1.0)
    assert len(found) == count
    return {(one.request_id, one.index): one.generation for one in found}


def test_what_was_sampled_is_what_the_policy_sees_in_every_later_turn(make_player, always_ends, folder):
    """Log-probs equal those of one plain forward over the whole row, bridges between the turns included."""
    with closing(make_player()) as player:
        player.submit([request("7"), request("8")])
        found = collected(player, 4)
        for played in found.values():
            row = np.concatenate([played.prompt_token_ids, played.token_ids])
            (told,) = player.score([row.tolist()])
            behind = np.array(told)[played.prompt_token_ids.size - 1 :]
            is_sampled = np.concatenate([np.full(s.num_tokens, s.is_sampled) for s in played.segments])
            np.testing.assert_allclose(behind[is_sampled], played.logprobs, atol=1e-4)
            assert [segment.is_sampled for segment in played.segments] == [True, False] * 3
            assert sum(span.num_tokens for span in played.versions) == played.logprobs.size
            assert (played.ending, played.finish_reason) == ("done", FinishReason.STOP)
    assert [found[f"r{seed}", n].verdict.reward for seed in (7, 8) for n in (0, 1)] == [7.0, 7.0, 8.0, 8.0]
    assert not np.array_equal(found["r7", 0].token_ids, found["r7", 1].token_ids), "each has a seed of its own"


def test_turns_stand_in_the_row_as_they_were_sampled(make_player, always_ends, folder):
    """Between them the environment's words and nothing else; its last words take no tokens."""
    tokenizer = load_tokenizer(folder)
    with closing(make_player()) as player:
        player.submit([request("7", 1)])
        played = collected(player, 1)["r7", 0]
    texts, start = [], 0
    for segment in played.segments:
        texts.append(tokenizer.decode(played.token_ids[start : start + segment.num_tokens].tolist()))
        start += segment.num_tokens
    assert tokenizer.decode(played.prompt_token_ids.tolist()) == "seed 7\n"
    assert played.opening == Opening((Message("user", "seed 7"),))
    assert [text for text, segment in zip(texts, played.segments, strict=True) if not segment.is_sampled] == [
        "left 2\n",
        "left 1\n",
        "",
    ]
    assert played.verdict.extracted == texts[-2].removesuffix(tokenizer.eos_token), "what majorities are counted of"
    assert [m.content for s in played.segments if not s.is_sampled for m in s.messages] == [
        "left 2",
        "left 1",
        "left 0",
    ]
    assert start == played.token_ids.size


def test_a_turn_that_is_cut_ends_the_episode(make_player):
    """As its environment rewards it, which is told of it, and as an answer that was cut."""
    with closing(make_player({"7": {"turns": 99, "counts_letters": True}})) as player:
        player.submit([request("7", 8)])
        found = collected(player, 8).values()
    cut = [one for one in found if one.ending == "cut"]
    assert cut, "random tokens seldom end by themselves within five"
    for played in cut:
        assert played.finish_reason is FinishReason.LENGTH
        assert played.verdict.reward == len(played.segments[-1].messages[0].content) > 0
        assert played.segments[-1].is_sampled
        assert played.segments[-1].num_tokens == TURN_TOKENS


@pytest.mark.parametrize(
    ("limits", "ending"),
    [({"max_turns": 2}, "max_turns"), ({"max_tokens": 13}, "max_tokens"), ({"row_tokens": 20}, "max_tokens")],
)
def test_limits_of_the_task_end_an_episode_with_its_reward(make_player, always_ends, limits, ending):
    """The row ends with what the policy sampled last."""
    with closing(make_player(**limits)) as player:
        player.submit([request("7", 1)])
        played = collected(player, 1)["r7", 0]
    assert (played.ending, played.verdict.reward) == (ending, 7.0)
    assert [s.is_sampled for s in played.segments if s.num_tokens][-1]
    assert (played.segments[-1].is_sampled, played.segments[-1].num_tokens) == (False, 0)
    assert played.finish_reason is FinishReason.LENGTH


def at_once(turn: EnvironmentTurn) -> "Future[EnvironmentTurn]":
    future: Future[EnvironmentTurn] = Future()
    future.set_result(turn)
    return future


class Debating:
    """Goes on for so many turns; its reward comes when all of its `others` have had theirs."""

    def __init__(self, num_turns):
        self._left, self._reward, self.others = num_turns, Future(), []
        self.first = at_once(EnvironmentTurn((Message("user", "go"),)))

    @property
    def is_over(self):
        """Whether it has had its turns."""
        return self._left <= 0

    def step(self, turn):
        """The next message."""
        self._left -= 1
        for one in (self, *self.others):
            if all(each.is_over for each in (one, *one.others)):
                one._reward.set_result(EnvironmentTurn(done=True, reward=1.0, reason="max_turns"))
        return at_once(EnvironmentTurn((Message("user", "on"),)))

    def finish(self, reason, turn=None):
        """The reward, some day."""
        return self._reward

    def close(self):
        """Nothing."""


def test_who_waits_for_its_reward_alone_keeps_no_other_from_its_turn(folder, always_ends):
    """In step, too: the reward may hang on turns of others, as where an agent plays with several policies."""
    sessions = {"1": Debating(1), "3": Debating(3)}
    sessions["1"].others, sessions["3"].others = [sessions["3"]], [sessions["1"]]
    end = load_tokenizer(folder).eos_token_id
    engine = EmbeddedEngine(folder, Sampling(1.0, TURN_TOKENS, (end,)), device="cpu", max_running=8)
    engine.label(Version(0, 1))
    setup = EpisodeSetup(
        open=sessions.get,
        rules=lambda prompt_id: EpisodeRules(int(prompt_id), 1000, failed_reward=-1.0),
        codec=voice_of(folder),
        max_turn_tokens=TURN_TOKENS,
        row_tokens=10_000,
        in_step=True,
    )
    with closing(EpisodeEngine(engine, setup)) as player:
        player.submit([request("1", 1), request("3", 1)])
        found, until_s = [], time.monotonic() + BOUND_S / 4
        while len(found) < 2 and time.monotonic() < until_s:
            found += player.collect(1.0)
    assert [one.generation.verdict.reward for one in found] == [1.0, 1.0]


@pytest.fixture
def always_ends(monkeypatch):
    """Turns of the policy end by themselves, after two tokens at most."""
    real = EmbeddedEngine.collect

    def collect(self, timeout_s):
        ended = []
        for one in real(self, timeout_s):
            generation = one.generation
            size = min(2, generation.token_ids.size)
            spans = [type(generation.versions[0])(size, generation.versions[0].version)]
            short = type(generation)(generation.token_ids[:size], generation.logprobs[:size], spans, FinishReason.STOP)
            ended.append(FinishedAnswer(one.request_id, one.index, short))
        return ended

    monkeypatch.setattr(EmbeddedEngine, "collect", collect)


@pytest.mark.parametrize(("fails", "has_turn"), [("step", True), ("reset", False), ("differs", False)])
def test_an_environment_that_fails_costs_its_episodes_alone(make_player, always_ends, fails, has_turn):
    """They have the reward of failures and say why; the others end as they would have."""
    with closing(make_player({"7": {"fails": fails}})) as player:
        player.submit([request("7"), request("8")])
        found = collected(player, 4)
    failed = [found["r7", n] for n in (0, 1) if found["r7", n].verdict.failure]
    assert failed
    for played in failed:
        assert played.verdict.reward == -1.0
        assert played.verdict.words
        assert bool(played.token_ids.size) is has_turn
    assert [found["r8", n].verdict.reward for n in (0, 1)] == [8.0, 8.0]


def test_a_first_message_without_room_for_a_turn_is_told(make_player):
    """It would be longer than a pass of the learner, which the memory plan has set room aside for."""
    with closing(make_player({"7": {"first": 90}}, row_tokens=60)) as player:
        player.submit([request("7", 1)])
        played = collected(player, 1)["r7", 0]
    assert "leaves 0 for the episode: less than one turn" in played.verdict.words
    assert not played.token_ids.size


def test_what_an_environment_says_at_the_end_is_kept_in_part(make_player, always_ends):
    """It takes no tokens, so nothing else bounds it, and a group of such answers has to fit into a message."""
    with closing(make_player({"7": {"last": 500_000}})) as player:
        player.submit([request("7", 1)])
        played = collected(player, 1)["r7", 0]
    (message,) = played.segments[-1].messages
    assert len(message.content) == 2000
    assert played.verdict.reward == 7.0


def test_a_heartbeat_tells_who_has_the_word(make_player, always_ends):
    """The environments first; and nobody is awaited before and behind."""
    with closing(make_player()) as player:
        told = [player.doing]
        player.submit([request("7")])
        told.append(player.doing)
        collected(player, 2)
        assert [*told, player.doing] == ["sampling", "awaiting environments", "sampling"]


def test_without_weights_to_serve_a_turn_waits_for_them(make_player):
    """As where a broadcast came apart: the worker gets new ones, and the episodes go on."""
    with closing(make_player()) as player:
        player.submit([request("7", 1)])
        player._waiting[0].awaited.result(BOUND_S)
        player._engine._version = None
        assert player.collect(0.05) == []
        player.label(Version(0, 2))
        played = collected(player, 1)["r7", 0]
    assert {span.version for span in played.versions} == {Version(0, 2)}


def test_tools_that_nobody_can_call_are_told(make_player):
    """A template without calls would have the policy fail for ever, unsaid."""
    name = "tests.support.played_environments:Asking"
    pool = EnvironmentPool(name, processes=1, wall_s=60.0, cpu_s=60.0)
    with closing(pool), closing(make_player(can_call=False)) as player:
        object.__setattr__(player._setup, "open", lambda prompt_id: pool.open(int(prompt_id), {}))
        player.submit([request("7", 1)])
        played = collected(player, 1)["r7", 0]
    assert "shows no tool call format that mrl knows; set policies.X.prompt.family" in played.verdict.words
    assert not played.token_ids.size


def test_every_turn_has_a_seed_of_its_own(make_player, always_ends):
    """The first one that of the episode, so that a single turn is sampled as an answer would be."""
    with closing(make_player()) as player:
        submit, seeds = player._engine.submit, []

        def recorded(requests):
            seeds.extend(int(seed) for one in requests for seed in one.seeds)
            submit(requests)

        player._engine.submit = recorded
        asked = request("7", 4)
        player.submit([asked])
        collected(player, 4)
    assert len(seeds) == len(set(seeds)) == 12
    assert {int(seed) for seed in asked.seeds} <= set(seeds)


def test_an_episode_that_is_given_up_from_outside_leaves_nothing_to_train_on(make_player, always_ends, environments):
    """Whatever the policy has said in it, and it is no failure of the environment's words."""
    with closing(make_player()) as player:
        player.submit([request("7")])
        while not any(episode.num_turns for episode in player._waiting):
            player.collect(0.1)
        environments.close()
        for played in collected(player, 2).values():
            assert (played.ending, played.verdict.failure) == ("given_up", "given_up")
            assert (played.token_ids.size, played.logprobs.size, played.versions, played.segments) == (0, 0, [], [])


def test_what_is_aborted_is_heard_of_no_more(make_player):
    """Its name may not be used again; others go on."""
    with closing(make_player()) as player:
        player.submit([request("7"), request("8")])
        player.collect(0.1)
        player.abort(["r7"])
        assert {name for name, _ in collected(player, 2)} == {"r8"}
        assert player.collect(0.0) == []


def test_what_has_ended_is_there_whatever_is_aborted_beside_it(make_player, always_ends):
    """An episode that ended between two calls is collected by the second."""
    with closing(make_player()) as player:
        player.submit([request("7"), request("8")])
        until_s = time.monotonic() + BOUND_S
        while len(player._ended) < 4 and time.monotonic() < until_s:
            player._hear()
            for one in player._engine.collect(0.1):
                player._said(player._turns.pop((one.request_id, one.index)), one.generation)
        player.abort(["r7"])
        assert {name for name, _ in collected(player, 2)} == {"r8"}


def test_other_requests_pass_through(make_player):
    """An answer to a prompt of its own is sampled as without episodes beside it."""
    plain = GenerationRequest("plain", np.arange(5, 9, dtype=np.int32), answer_seeds(1, "a", "p", 0, 1))
    with closing(make_player()) as player:
        player.submit([plain, request("7")])
        found = collected(player, 3)
    assert not isinstance(found["plain", 0], PlayedEpisode)
    assert isinstance(found["r7", 0], PlayedEpisode)


def test_others_are_sampled_on_while_environments_take_their_time(make_player, monkeypatch):
    """The engine's time is theirs; environments alone are waited for when there are none."""
    waits = []
    monkeypatch.setattr(episode_engine, "wait", lambda awaited, *bound: waits.append(len(awaited)))
    with closing(make_player()) as player:
        player.submit([request("7", 1)])
        player._waiting[0].awaited = Future()
        prompt = np.array([5, 6], dtype=np.int32)
        player.submit([GenerationRequest(name, prompt, np.array([3, 4], dtype=np.uint64)) for name in "ab"])
        found = []
        while len(found) < 4:
            found += player.collect(0.02)
        assert waits == []
        assert (player.collect(0.0), waits) == ([], [1])
        player.submit([GenerationRequest("c", prompt, np.array([3], dtype=np.uint64))])
        player.abort(["c"])
        assert (player.collect(0.0), len(waits)) == ([], 2)


def test_in_step_the_same_seeds_give_the_same_bits(make_player, always_ends):
    """Whatever the environments' timing: all have answered before any turn is sampled."""
    rows = []
    for _ in range(2):
        with closing(make_player(in_step=True)) as player:
            player.submit([request(str(n), 4) for n in range(4)])
            rows.append(collected(player, 16))
    for name in rows[0]:
        one, other = rows[0][name], rows[1][name]
        assert one.token_ids.tobytes() == other.token_ids.tobytes()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


def test_an_engine_that_starts_anew_has_forgotten_its_episodes(make_player):
    """As it forgets its answers: the groups are sampled again."""
    with closing(make_player()) as player:
        player.submit([request("7")])
        player.restart()
        player.label(Version(0, 2))
        assert player.collect(0.0) == []
        player.submit([request("7", name="again")])
        found = collected(player, 2)
    assert all(span.version == Version(0, 2) for one in found.values() for span in one.versions)
    assert {name for name, _ in found} == {"again"}
    assert torch.isfinite(torch.from_numpy(np.concatenate([one.logprobs for one in found.values()]))).all()
    assert all(a.is_sampled != b.is_sampled for one in found.values() for a, b in pairwise(one.segments))


@pytest.fixture
def listens(make_player):
    """A player whose environment says again all that it was told."""
    name = "tests.support.played_environments:Listening"
    with closing(EnvironmentPool(name, processes=1, wall_s=60.0, cpu_s=60.0)) as pool:

        def make(rows=None, **how):
            player = make_player(**how)
            opened = lambda prompt_id: pool.open(int(prompt_id), (rows or {}).get(prompt_id, {}))  # noqa: E731
            object.__setattr__(player._setup, "open", opened)
            return player

        yield make


def test_a_peers_turns_are_played_first_and_stand_in_the_prompt(listens, always_ends, folder):
    """As the policy itself would say them; behind them all is as in any episode, log-probs of one forward included."""
    tokenizer = load_tokenizer(folder)
    end = tokenizer.eos_token
    with closing(listens()) as player:
        player.submit([request("7", given=TWO_TURNS), request("8")])
        found = collected(player, 4)
        for played in (found["r7", 0], found["r7", 1]):
            said = tokenizer.decode(played.prompt_token_ids.tolist())
            assert said == f"seed 7\none{end}heard one\ntwo{end}heard one two\n"
            row = np.concatenate([played.prompt_token_ids, played.token_ids])
            (told,) = player.score([row.tolist()])
            behind = np.array(told)[played.prompt_token_ids.size - 1 :]
            is_sampled = np.concatenate([np.full(s.num_tokens, s.is_sampled) for s in played.segments])
            np.testing.assert_allclose(behind[is_sampled], played.logprobs, atol=1e-4)
            assert [segment.is_sampled for segment in played.segments] == [True, False] * 2, "four turns in all"
            assert played.segments[1].messages[0].content.startswith("heard one two "), "one environment heard all"
            assert (played.ending, played.verdict.reward, played.given) == ("done", 7.0, TWO_TURNS)
    assert [segment.is_sampled for segment in found["r8", 0].segments] == [True, False] * 4


@pytest.mark.parametrize(
    ("given", "says", "words"),
    [
        (given_turns(("one", "heard ONE")), "", "is 'user: heard one', but the peer got 'user: heard ONE'"),
        (given_turns(*[(f"{n}", f"heard {' '.join('0123'[: n + 1])}") for n in range(4)]), "", "the end"),
        (given_turns(("one", "heard one")), "never the same", "but the peer got 'user: heard one'"),
    ],
)
def test_an_environment_that_does_not_say_the_same_is_gone_on_with_nowhere(listens, given, says, words):
    """Nothing is sampled, whatever the other episodes beside it do."""
    with closing(listens({"7": {"says": says}})) as player:
        player.submit([request("7", given=given), request("8")])
        found = collected(player, 4)
    for played in (found["r7", 0], found["r7", 1]):
        assert not played.token_ids.size
        assert not played.logprobs.size
        assert (played.ending, played.verdict.failure) == ("unequal", "unequal")
        assert words in played.verdict.words
    assert found["r8", 0].token_ids.size


def test_calls_that_own_words_cannot_say_are_told(listens):
    """What was read of the own words would be another turn than the peer's."""
    call = Message("assistant", "", tool_calls=(ToolCall("ask", "{}"),))
    turns = (SharedTurn(is_sampled=True, messages=(call,)), TWO_TURNS[1])
    with closing(listens()) as player:
        player.submit([request("7", 1, given=turns)])
        played = collected(player, 1)["r7", 0]
    assert (played.ending, played.token_ids.size) == ("unsaid", 0)
    assert "changes in the policy's tokens" in played.verdict.words


@pytest.mark.parametrize(
    ("limits", "ending", "num_own"), [({"max_turns": 3}, "max_turns", 1), ({"max_tokens": 45}, "max_tokens", 1)]
)
def test_given_turns_count_against_the_limits_of_the_task(listens, always_ends, limits, ending, num_own):
    """An episode is no longer because a peer began it."""
    with closing(listens(**limits)) as player:
        player.submit([request("7", 1, given=TWO_TURNS)])
        played = collected(player, 1)["r7", 0]
    assert played.ending == ending
    assert sum(segment.is_sampled for segment in played.segments) == num_own


def test_given_turns_without_room_behind_them_are_told(listens):
    """As a first message without room is."""
    with closing(listens(max_tokens=20)) as player:
        player.submit([request("7", 1, given=TWO_TURNS)])
        played = collected(player, 1)["r7", 0]
    assert (played.ending, played.token_ids.size) == ("too_long", 0)
    assert "first message with the peer's turns" in played.verdict.words


def test_in_step_given_turns_give_the_same_bits(listens, always_ends):
    """Beside episodes that have their first turn meanwhile."""
    rows = []
    for _ in range(2):
        with closing(listens(in_step=True)) as player:
            player.submit([request("7", 3, given=TWO_TURNS), request("8", 3), request("9", 3, given=TWO_TURNS[:2])])
            rows.append(collected(player, 9))
    for name in rows[0]:
        assert rows[0][name].token_ids.tobytes() == rows[1][name].token_ids.tobytes()
        assert rows[0][name].logprobs.tobytes() == rows[1][name].logprobs.tobytes()
