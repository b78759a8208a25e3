"""Episodes on every engine, vLLM and SGLang being real servers: mrl's own games, played by a policy with a template.

They are wired as in a worker: the engine plays what `with_episodes` makes of a configuration.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from mrl.alignment.receiver import Receiver, load_receiver
from mrl.config.load import validate
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Engine, EngineUsage, FinishedAnswer, GenerationRequest, Sampling
from mrl.engines.environment import engine_python
from mrl.engines.server_backend import Launch, ServerBackend
from mrl.engines.server_engine import ServerEngine
from mrl.engines.server_timeouts import ServerTimeouts
from mrl.engines.sglang import SGLang
from mrl.engines.token_sampling import answer_seeds
from mrl.engines.vllm import VLLM
from mrl.models.load_policy import load_policy, load_tokenizer
from mrl.processes.episode_setup import read_turn, with_episodes
from mrl.records.direct_requests import TurnChunk
from mrl.records.episodes import Message
from mrl.records.rollouts import sampled_places
from mrl.records.version import Version
from mrl.rollout.episode import EpisodeRequest, PlayedEpisode
from mrl.tasks.environments.contract import EnvironmentTurn, PolicyTurn
from mrl.tasks.environments.environment_pool import EpisodeSession
from mrl.tasks.environments.tool_syntax import HERMES, NONE
from mrl.tasks.pool import TaskPool, build_pool
from tests.support.engine_rig import Rig, Weights, full_forward
from tests.support.talking_policy import END, OPEN, talking_policy

pytestmark = pytest.mark.timeout(600)
TOLERANCE_NATS = 1e-4
TEMPERATURE = 0.9
TURN_TOKENS = 48
GROUP_SIZE = 4
DIALECTS: dict[str, type[ServerBackend] | None] = {"embedded": None, "vllm": VLLM, "sglang": SGLang}
SERVERS = [pytest.param(name, marks=pytest.mark.engines) for name, backend in DIALECTS.items() if backend]
EMBEDDED = pytest.param("embedded", marks=pytest.mark.thorough)
TABLES: dict[str, Any] = {
    "pool": {"train_prompts": 24, "held_out_prompts": 2},
    "tasks": {
        "higher_lower": {"source": "environment", "dataset": "higher_lower", "max_turns": 4},
        "lookup": {"source": "environment", "dataset": "lookup", "max_turns": 3},
    },
}


@pytest.fixture(scope="session")
def talking(tmp_path_factory) -> Weights:
    """A policy that knows the form of both games."""
    return talking_policy(tmp_path_factory.mktemp("talking") / "a", steps=150)


@pytest.fixture(scope="session")
def changed(talking, tmp_path_factory) -> Weights:
    """The same policy after something like a step of training."""
    folder, model = tmp_path_factory.mktemp("talking") / "b", load_policy(talking.folder).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(1.0 + 0.05 * torch.randn(tensor.shape))
    load_tokenizer(talking.folder).save_pretrained(folder)
    model.save_pretrained(folder)
    return Weights(folder, model)


@pytest.fixture(scope="module", params=[EMBEDDED, *SERVERS])
def rig(request, talking, tmp_path_factory) -> Iterator[Rig]:
    """An engine that was started once, on the policy's folder."""
    receiver = load_receiver(talking.folder)
    sampling = Sampling(TEMPERATURE, TURN_TOKENS, tuple(receiver.eos_ids))
    if (kind := DIALECTS[request.param]) is None:
        engine: Engine = EmbeddedEngine(talking.folder, sampling, device="cpu", max_running=64)
    else:
        backend = kind()
        python = engine_python(backend.name, device="cpu")
        launch = Launch(python, talking.folder, "127.0.0.1", 0, "cpu", "float32", 1, 64, 512, 0)
        log = tmp_path_factory.mktemp(backend.name) / "server.log"
        engine = ServerEngine(
            backend, sampling, launch=launch, log=log, bounds=ServerTimeouts(start_s=400.0, load_s=60.0)
        )
    with closing(engine):
        yield Rig(engine, TEMPERATURE)


class Watched:
    """The engine within, of which is known how many turns it has in flight."""

    def __init__(self, engine: Engine, on_turns: Callable[[int, int], None]) -> None:
        """`on_turns(came, left)` hears of every time that turns came, before anybody sees them."""
        self._engine, self._on_turns, self._left = engine, on_turns, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._left += sum(request.seeds.size for request in requests)
        self._engine.submit(requests)

    def collect(self, timeout_s: float) -> list[FinishedAnswer]:
        found = self._engine.collect(timeout_s)
        self._left -= len(found)
        if found:
            self._on_turns(len(found), self._left)
        return found


class Streamed:
    """A pool whose environments want the turns of every other episode of a group as they grow, as agents may."""

    def __init__(self, pool: TaskPool) -> None:
        self._pool, self._opened = pool, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def open_episode(self, prompt_id: str) -> "StreamedSession":
        place = self._opened[prompt_id]
        self._opened[prompt_id] += 1
        return StreamedSession(self._pool.open_episode(prompt_id), f"{prompt_id} {place}" if place % 2 else "")


class StreamedSession:
    """An episode of it: whatever is said to the policy asks for its answer under this name."""

    def __init__(self, session: EpisodeSession, stream: str) -> None:
        self._session, self._stream = session, stream
        self.first, self.close = self._asked(session.first), session.close

    def step(self, turn: PolicyTurn) -> "Future[EnvironmentTurn]":
        return self._asked(self._session.step(turn))

    def finish(self, reason: str, turn: PolicyTurn | None = None) -> "Future[EnvironmentTurn]":
        return self._asked(self._session.finish(reason, turn))

    def _asked(self, said: "Future[EnvironmentTurn]") -> "Future[EnvironmentTurn]":
        found: Future[EnvironmentTurn] = Future()
        said.add_done_callback(lambda one: found.set_result(replace(one.result(), stream=self._stream)))
        return found


@dataclass
class Played:
    """Episodes, and what they were played with."""

    rig: Rig
    pool: TaskPool
    receiver: Receiver
    found: dict[tuple[str, int], PlayedEpisode] = field(default_factory=dict)
    """By prompt and place in its group."""

    def turns(self, episode: PlayedEpisode, *, is_sampled: bool) -> list[tuple[np.ndarray, tuple[Message, ...]]]:
        """[T] ids of each stretch of one kind that has tokens, with what it says."""
        ends = np.cumsum([segment.num_tokens for segment in episode.segments])
        parts = np.split(episode.token_ids, ends)
        return [
            (part, segment.messages)
            for part, segment in zip(parts, episode.segments, strict=False)
            if segment.is_sampled == is_sampled and segment.num_tokens
        ]


@pytest.fixture
def play(rig, talking, tmp_path) -> Callable[..., Played]:
    """Plays some groups of both games to their ends."""

    def make(
        *,
        sync: bool = False,
        groups: int = 16,
        on_turns: Callable[[int, int], None] | None = None,
        tell: Callable[[TurnChunk], None] | None = None,
    ) -> Played:
        run = {"name": "r", "steps": 9, "folder": str(tmp_path), "sync": sync}
        rollout = {"max_new_tokens": TURN_TOKENS}
        policy = {"model": str(talking.folder), "rollout": rollout}
        config = validate({"run": run, "policies": {"qwen": policy}, **TABLES}, where="test")
        receiver = load_receiver(talking.folder)
        with closing(build_pool(config.tasks, config.pool)) as pool:
            engine: Any = Watched(rig.engine, on_turns or (lambda came, left: None))
            heard: Any = pool if tell is None else Streamed(pool)
            player = with_episodes(engine, config, "qwen", heard, receiver, tell=tell)
            asked = {f"r{place}-{len(rig.served)}-{sync}": pool.prompt_at(place).prompt_id for place in range(groups)}
            player.submit([episodes(name, prompt_id) for name, prompt_id in asked.items()])
            came = Rig(player, TEMPERATURE).collect(groups * GROUP_SIZE)
            played = Played(rig, pool, receiver)
            played.found = {(asked[one.request_id], one.index): one.generation for one in came}
            for (prompt_id, _), episode in played.found.items():
                check_replayed(pool, prompt_id, episode, played)
        assert len(played.found) == groups * GROUP_SIZE
        return played

    return make


def episodes(name: str, prompt_id: str) -> EpisodeRequest:
    return EpisodeRequest(
        name, np.zeros(0, np.int32), answer_seeds(1, "qwen", prompt_id, 0, GROUP_SIZE), prompt_id=prompt_id
    )


def is_lookup(episode: PlayedEpisode, played: Played) -> bool:
    return "Look up" in played.receiver.completion_bytes(episode.prompt_token_ids).decode()


def texts(played: Played, parts: Iterable[np.ndarray]) -> list[str]:
    tokenizer = load_tokenizer(next(iter(played.rig.served.values())).folder)
    return [tokenizer.decode(part.tolist(), clean_up_tokenization_spaces=False) for part in parts]


def check_replayed(pool: TaskPool, prompt_id: str, episode: PlayedEpisode, played: Played) -> None:
    """A second environment of the same start state says and rewards the same to the texts of the sampled tokens."""
    session, said = pool.open_episode(prompt_id), []
    turn = session.first.result(60)
    sampled = played.turns(episode, is_sampled=True)
    for text in texts(played, [part for part, _ in sampled]):
        assert text.count(END) <= 1, "nothing is sampled behind the end of a turn"
        is_cut = not text.endswith(END)
        syntax = HERMES if is_lookup(episode, played) else NONE
        own, _ = read_turn(syntax, text.removesuffix(END), is_cut=is_cut)
        turn = session.finish("cut").result(60) if is_cut else session.step(own).result(60)
        said += turn.messages
    if not turn.done:
        turn = session.finish(episode.ending).result(60)
    assert [m for s in episode.segments if not s.is_sampled for m in s.messages] == said
    assert (episode.verdict.reward, episode.verdict.failure) == (turn.reward, "")
    session.close()


def check_row(played: Played, episode: PlayedEpisode) -> None:
    """Turns and bridges stand where the segments say, and every sampled token has its version's log-probability."""
    shape = [segment.is_sampled for segment in episode.segments if segment.num_tokens]
    assert shape[0]
    assert shape[-1]
    assert all(one != other for one, other in pairwise(shape))
    is_sampled = sampled_places(episode.segments)
    assert is_sampled.size == episode.token_ids.size
    assert is_sampled.sum() == episode.logprobs.size == sum(span.num_tokens for span in episode.versions)

    for part, messages in played.turns(episode, is_sampled=True):
        (text,), (message,) = texts(played, [part]), messages
        assert message.role == "assistant"
        assert (text.removesuffix(END) == message.content) or message.tool_calls
        assert all(word in text for call in message.tool_calls for word in (call.name, *call.values))
    for part, messages in played.turns(episode, is_sampled=False):
        said = "".join(f"{OPEN}{one.role}\n{one.content}{END}\n" for one in messages)
        assert texts(played, [part]) == [f"\n{said}{OPEN}assistant\n"], "the bridge is what the template says"
    system = f'{OPEN}system\nlookup: <tool_call>{{"name": ..., "arguments": ...}}</tool_call>{END}\n'
    (prompt,) = texts(played, [episode.prompt_token_ids])
    assert prompt.startswith(f"{system * is_lookup(episode, played)}{OPEN}user\n")
    assert prompt.endswith(f"{END}\n{OPEN}assistant\n")

    row = [*episode.prompt_token_ids.tolist(), *episode.token_ids.tolist()]
    behind = slice(episode.prompt_token_ids.size - 1, None)
    versions = [span.version for span in episode.versions for _ in range(span.num_tokens)]
    told = {
        version: full_forward([(played.rig.served[version], row)], TEMPERATURE)[behind][is_sampled]
        for version in set(versions)
    }
    expected = [told[version][place] for place, version in enumerate(versions)]
    np.testing.assert_allclose(episode.logprobs, expected, atol=TOLERANCE_NATS, rtol=0)


def test_episodes_are_rows_of_turns_and_bridges_with_the_logprobs_of_a_full_forward(rig, talking, play):
    """Of both games, over several turns: what was sampled, what the template puts between, and what the tool said."""
    version = rig.serve(talking)

    played = play()

    for episode in played.found.values():
        check_row(played, episode)
        assert {span.version for span in episode.versions} == {version}
    guesses = [one for one in played.found.values() if not is_lookup(one, played)]
    lookups = [one for one in played.found.values() if is_lookup(one, played)]
    assert max(len(played.turns(one, is_sampled=True)) for one in guesses) == 4
    roles = [m.role for one in guesses for _, said in played.turns(one, is_sampled=False) for m in said]
    assert set(roles) == {"user"}
    answers = [m for one in lookups for _, said in played.turns(one, is_sampled=False) for m in said]
    assert {m.role for m in answers} == {"tool"}
    assert any(m.content == "nothing" or m.content.isdigit() for m in answers), "a call was read, and the tool ran"
    assert {one.verdict.reward for one in played.found.values()} == {0.0, 1.0}
    assert {one.ending for one in played.found.values()} <= {"done", "cut", "max_turns"}


def test_what_was_computed_for_earlier_turns_is_used_again(rig, talking, play):
    """On a CPU no server keeps rows as short: vLLM has blocks of 128 tokens, and SGLang runs without its tree."""
    rig.serve(talking)
    before = usage(rig.engine)

    played = play()

    now = usage(rig.engine)
    num_turns = [len(played.turns(episode, is_sampled=True)) for episode in played.found.values()]
    assert max(num_turns) == 4
    asked, reused = now.prompt_tokens - before.prompt_tokens, now.reused_prompt_tokens - before.reused_prompt_tokens
    assert asked > 0
    if isinstance(rig.engine, ServerEngine):
        assert 0 <= reused < asked
        prompt = np.arange(300, dtype=np.int32) % 40 + 5
        for name in ("long", "again"):
            rig.engine.submit([GenerationRequest(name, prompt, np.ones(1, np.uint64))])
            rig.collect(1)
        blocks = (usage(rig.engine).reused_prompt_tokens - now.reused_prompt_tokens) / 128
        assert blocks == (2 if isinstance(rig.engine._backend, VLLM) else 0)
    else:
        assert 0.2 < reused / asked < 1


def usage(engine: Engine) -> EngineUsage:
    """As it is now: that of a server may be a second old."""
    if isinstance(engine, ServerEngine):
        return engine._run(engine._backend.usage(engine._link()), 60.0)
    return engine.usage()


def test_turns_are_told_as_they_grow_to_agents_that_stream_them(rig, talking, play):
    """Piece by piece and in order, and nothing that their messages do not begin with; the episodes are as ever."""
    rig.serve(talking)
    pieces = defaultdict[tuple[str, int], list[TurnChunk]](list)

    played = play(tell=lambda piece: pieces[piece.session, piece.num_turns].append(piece))

    told = dict.fromkeys(pieces, "")
    for at, found in pieces.items():
        for piece in found:
            assert (piece.start, bool(piece.text)) == (len(told[at]), True)
            told[at] += piece.text
    said, with_tools = {}, set()
    for (prompt_id, place), episode in played.found.items():
        with_tools |= {f"{prompt_id} {place}"} if is_lookup(episode, played) else set()
        check_row(played, episode)
        turns = [messages[0].content for _, messages in played.turns(episode, is_sampled=True)]
        said |= {(f"{prompt_id} {place}", number): content for number, content in enumerate(turns) if place % 2}
    assert told.keys() <= said.keys(), "the others are told whole"
    assert all(said[at].startswith(text) for at, text in told.items())
    assert max(map(len, pieces.values())) > 1, "a busy server tells several tokens at once, but not all of a turn"
    assert {number for _, number in told} >= {0, 1, 2}, "first turns and later ones"
    assert with_tools & {session for session, _ in told}
    assert all("<tool_call>" not in text for (session, _), text in told.items() if session in with_tools)


def test_weights_that_come_between_two_turns_date_the_turns_behind_them(rig, talking, changed, play):
    """In a run in step: the first turns are of the old version and all later ones of the new, which reads them all."""
    before, after = rig.serve(talking), []

    def update(came: int, left: int) -> None:
        if not left and not after:
            after.append(rig.serve(changed))

    played = play(sync=True, on_turns=update)

    assert after, "the new weights were never loaded"
    for episode in played.found.values():
        check_row(played, episode)
        first, *later = [part.size for part, _ in played.turns(episode, is_sampled=True)]
        assert [(span.num_tokens, span.version) for span in episode.versions] == [
            (size, version) for size, version in ((first, before), (sum(later), *after)) if size
        ]
    assert any(len(episode.versions) == 2 for episode in played.found.values())


@pytest.mark.parametrize("rig", SERVERS, indirect=True)
def test_weights_that_come_in_the_middle_of_turns_date_the_tokens_behind_them(rig, talking, changed, play):
    """While some turns are sampled and others await their environment; every token is that of its own version."""
    before, after = rig.serve(talking), list[Version]()

    def update(came: int, left: int) -> None:
        if left > GROUP_SIZE and not after:
            after.append(rig.serve(changed))

    played = play(on_turns=update)

    for episode in played.found.values():
        check_row(played, episode)
    spans = [[span.version for span in episode.versions] for episode in played.found.values()]
    assert [before, *after] in spans
    assert all(versions == sorted(versions) for versions in spans)
