"""Turns of streaming agents as they grow: what is told of them costs little, and what was given up is forgotten."""

from concurrent.futures import Future
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from mrl.engines.engine import Generation, GenerationRequest, PartialAnswer
from mrl.records.episodes import Message
from mrl.records.finish import FinishReason
from mrl.records.version import Version
from mrl.rollout.episode import EpisodeRequest, EpisodeRules
from mrl.rollout.episode_engine import EpisodeEngine, EpisodeSetup
from mrl.tasks.environments.contract import EnvironmentTurn


class Growing:
    """An engine whose answers grow as the test says, and never end."""

    version = Version(0, 1)

    def __init__(self):
        self.submitted, self.grew, self.aborted = [], [], set()

    def submit(self, requests):
        self.submitted += requests

    def collect(self, timeout_s):
        return []

    def grown(self):
        told, self.grew = self.grew, []
        return told

    def abort(self, request_ids):
        self.aborted |= set(request_ids)


def grown(name, size, index=0):
    ids, logprobs = np.arange(size, dtype=np.int32) % 26 + 97, np.zeros(size, np.float32)
    return PartialAnswer(name, index, Generation(ids, logprobs, [], FinishReason.ABORT))


@pytest.fixture
def engine():
    return Growing()


@pytest.fixture
def told():
    return []


@pytest.fixture
def player(engine, told):
    """Two episodes of one request whose agents stream, in their first turn."""
    first: Future[EnvironmentTurn] = Future()
    first.set_result(EnvironmentTurn((Message("user", "go"),), stream="s"))
    renderer = Mock(opening=lambda messages, tools: np.array([1, 2], np.int32), text=lambda ids: bytes(ids).decode())
    setup = EpisodeSetup(
        open=lambda prompt_id: SimpleNamespace(first=first, close=lambda: None),
        rules=lambda prompt_id: EpisodeRules(8, 100_000, failed_reward=0.0),
        codec=Mock(renderer=renderer, so_far=lambda text, has_tools: text),
        max_turn_tokens=8192,
        row_tokens=100_000,
        tell=told.append,
    )
    playing = EpisodeEngine(engine, setup)
    seeds = np.zeros(2, np.uint64)
    playing.submit([EpisodeRequest("r", np.zeros(0, np.int32), seeds, prompt_id="7")])
    playing.collect(0.0)
    return playing


def test_a_long_turn_is_told_in_few_pieces(player, engine, told):
    """Token by token at first; all of it is spelled each time."""
    (turn,) = engine.submitted
    for size in range(1, 4097):
        engine.grew = [grown(turn.request_id, size)]
        player.collect(0.0)
    text = "".join(piece.text for piece in told)
    assert [len(piece.text) for piece in told[:32]] == [1] * 32
    assert len(told) < 250
    assert 4096 * 31 / 32 <= len(text) <= 4096
    assert text == bytes(grown("", len(text)).generation.token_ids.tolist()).decode()
    assert [piece.start for piece in told[1:]] == np.cumsum([len(piece.text) for piece in told[:-1]]).tolist()


def test_what_grew_of_others_is_theirs_and_of_nobody_forgotten(player, engine, told):
    """A turn that was given up may have grown just before."""
    (turn,) = engine.submitted
    player.submit([GenerationRequest("plain", np.zeros(1, np.int32), np.zeros(1, np.uint64), streams=True)])
    engine.grew = [grown("plain", 3), grown("given up", 3)]
    player.collect(0.0)
    engine.grew = [grown("plain", 4), grown(turn.request_id, 2, index=1)]
    assert [one.generation.token_ids.size for one in player.grown()] == [3, 4]
    assert [piece.text for piece in told] == ["ab"]
    assert player.grown() == []
