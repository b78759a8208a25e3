#!/usr/bin/env python3
"""The cost of a turn, for those who write environments: episodes beside answers of one turn, at equal sampled tokens.

Episodes go the way of a run: the embedded engine, wrapped as a worker wraps it, and real environment processes. A Qwen3
of 0.9 M parameters with random weights samples with one thread; every turn has the same length, and answers of one turn
are as long as the turns of an episode together. All episodes are handed in at once. Two environments play: one answers
at once, the other takes 50 ms for each turn, as an environment that asks a service does. A third begins with a long
message, once with engine rows that keep its computed prefix between turns, once without, so that it is read again at
every turn; no more than 256 of these episodes are played at once, since spare rows take memory. The ways take turns,
and the best round of each counts. CPU seconds are of this process and its environments.

    .venv/bin/python tools/bench_episodes.py [--rounds N] [--groups N]

Prints a table; the last line is JSON. Ends with 1 when an environment of 50 ms more than halves the pace of an instant
one: while one episode waits, others have to be sampled.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from bench_peers.process import tree_cpu_s
from bench_row import Row, end, print_rows
from transformers import Qwen3Config, Qwen3ForCausalLM

from mrl.alignment.receiver import load_receiver
from mrl.config.load import validate
from mrl.config.schema import RunConfig
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Engine, FinishedAnswer, GenerationRequest, Sampling
from mrl.engines.token_sampling import answer_seeds
from mrl.models.tokenizers import train_byte_level
from mrl.processes.episode_setup import with_episodes
from mrl.records.finish import FinishReason
from mrl.records.version import Version
from mrl.rollout.episode import EpisodeRequest
from mrl.tasks.environments.gateway_location import GatewayLocation
from mrl.tasks.pool import TaskPool, build_pool

GROUP_SIZE, TURNS, TURN_TOKENS, PROMPT_TOKENS = 8, 4, 12, 8
PAUSES_S = {"instant": 0.0, "50 ms": 0.05}
SINGLE = "one turn"
LONG_WORDS, MOST_LONG_GROUPS = 150, 32
KEPT, READ_AGAIN = "long prompt, kept", "long prompt, read again"
REQUIRED = {"50 ms": (">=0.5", "instant")}
Seconds = tuple[float, float]
"""Seconds by the clock, and of processors."""


class Figures(NamedTuple):
    """Seconds of one episode in the best round of one way."""

    wall_s: float
    cpu_s: float


class Ending:
    """The embedded engine, with turns that end by themselves when they have their full length."""

    def __init__(self, engine: EmbeddedEngine, *, keeps: bool) -> None:
        """Wrap an engine. `keeps`: whether it keeps what it computes of an episode until the next turn."""
        self._engine, self._keeps = engine, keeps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See Engine."""
        self._engine.submit(requests if self._keeps else [replace(one, conversations=()) for one in requests])

    def collect(self, timeout_s: float) -> list[FinishedAnswer]:
        """See Engine; every answer has stopped by itself."""
        return [
            FinishedAnswer(
                one.request_id,
                one.index,
                type(one.generation)(
                    one.generation.token_ids, one.generation.logprobs, one.generation.versions, FinishReason.STOP
                ),
            )
            for one in self._engine.collect(timeout_s)
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=32, help=f"start states at once, of {GROUP_SIZE} episodes each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where environment processes look for the environment
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        make_policy(folder)
        ways = {SINGLE: Single(folder)} | {name: Played(folder, pause_s) for name, pause_s in PAUSES_S.items()}
        longer = {"words": LONG_WORDS, "rows": 2 * min(args.groups, MOST_LONG_GROUPS) * GROUP_SIZE}
        ways |= {KEPT: Played(folder, 0.0, **longer), READ_AGAIN: Played(folder, 0.0, **longer, keeps=False)}
        for way in ways.values():
            closing.callback(way.close)
        figures = measure(ways, rounds=args.rounds, groups=args.groups)
    rows = rows_of(figures)
    print_rows(rows)
    return end("episodes", rows)


def make_policy(folder: Path) -> None:
    """Make a policy of random weights, without a chat template, so that prompts are lines."""
    tokenizer = train_byte_level(["turn more one two three"] * 3, 400)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512}
    config = Qwen3Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **shape)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_engine(folder: Path, tokens: int, rows: int = 256) -> EmbeddedEngine:
    """Make an engine whose answers have exactly this number of tokens."""
    engine = EmbeddedEngine(folder, Sampling(1.0, tokens, ()), device="cpu", max_running=rows)
    engine.label(Version(0, 1))
    return engine


class Single:
    """Way of answers of one turn, as long as the turns of an episode together."""

    def __init__(self, folder: Path) -> None:
        self._engine: Engine = make_engine(folder, TURNS * TURN_TOKENS)

    def requests(self, groups: int, number: int) -> list[GenerationRequest]:
        """Requests of a round."""
        prompt = np.arange(PROMPT_TOKENS, dtype=np.int32) + 7
        return [GenerationRequest(f"{number}/{one}", prompt, _seeds(str(one), number)) for one in range(groups)]

    def play(self, requests: Sequence[GenerationRequest]) -> None:
        """Sample all requests to their ends. Raises RuntimeError for another number of tokens than was meant."""
        play(self._engine, requests)

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


class Played(Single):
    """Way of episodes, in an environment that may pause at each turn."""

    def __init__(
        self, folder: Path, pause_s: float, *, words: int = 0, rows: int = 256, keeps: bool = True, **task: Any
    ) -> None:
        """Make engine and environment.

        pause_s: of the environment at each turn; words: before the first turn; rows: of the engine; task: other keys of
        the task's table.
        """
        config, receiver = config_of(folder, pause_s, words=words, **task), load_receiver(folder)
        self._pool: TaskPool = build_pool(config.tasks, config.pool, meeting=GatewayLocation(folder, "qwen"))
        ending: Any = Ending(make_engine(folder, TURN_TOKENS, rows), keeps=keeps)
        self._engine = with_episodes(ending, config, "qwen", self._pool, receiver)

    def requests(self, groups: int, number: int) -> list[GenerationRequest]:
        """Requests of a round, each start state once."""
        ids = [self._pool.prompt_at(place).prompt_id for place in range(groups)]
        nothing = np.zeros(0, np.int32)
        return [
            EpisodeRequest(f"{number}/{one}", nothing, _seeds(one, number), prompt_id=one) for one in dict.fromkeys(ids)
        ]

    def close(self) -> None:
        """End the engine and the environments."""
        self._engine.close()
        self._pool.close()


def config_of(folder: Path, pause_s: float, *, words: int = 0, **changes: Any) -> RunConfig:
    """Make the configuration of a run of one policy and the paced environment."""
    reset = {"turns": TURNS, "pause_s": pause_s} | ({"words": words} if words else {})
    task = {"source": "environment", "dataset": "paced_environment:Paced", "max_turns": TURNS + 1}
    return validate(
        {
            "run": {"name": "bench", "steps": 1, "folder": str(folder)},
            "pool": {"train_prompts": 0, "held_out_prompts": 1},
            "tasks": {"paced": task | {"options": {"size": 2000, "reset": reset}} | changes},
            "policies": {"qwen": {"model": str(folder), "rollout": {"max_new_tokens": TURN_TOKENS}}},
        },
        where="bench_episodes",
    )


def play(engine: Engine, requests: Sequence[GenerationRequest]) -> None:
    """Sample all requests to their ends. Raises RuntimeError for another number of tokens than was meant."""
    engine.submit(requests)
    left, tokens = sum(request.seeds.size for request in requests), 0
    wanted = left * TURNS * TURN_TOKENS
    while left:
        for one in engine.collect(1.0):
            left, tokens = left - 1, tokens + one.generation.logprobs.size
    if tokens != wanted:
        raise RuntimeError(f"{tokens} tokens were sampled; {wanted} were meant: an environment failed")


def measure(ways: dict[str, Any], *, rounds: int, groups: int) -> dict[str, Figures]:
    """Measure the best round of each way, after a round that starts processes."""
    best: dict[str, Figures] = {}
    for number in range(rounds + 1):
        for name, way in ways.items():
            requests = way.requests(min(groups, MOST_LONG_GROUPS) if name in (KEPT, READ_AGAIN) else groups, number)
            num_episodes = sum(request.seeds.size for request in requests)
            begin_s, begin_cpu_s = time.perf_counter(), tree_cpu_s()
            way.play(requests)
            took = Figures((time.perf_counter() - begin_s) / num_episodes, (tree_cpu_s() - begin_cpu_s) / num_episodes)
            if number:
                best[name] = Figures(*map(min, zip(took, best.get(name, took), strict=True)))
    return best


def rows_of(figures: dict[str, Figures]) -> list[Row]:
    """Rows of episodes per second beside answers of one turn, of the cost of a turn, and of the required paces."""
    rows, single = [], figures[SINGLE]
    for name, found in figures.items():
        pace, cost = (single.wall_s / found.wall_s, found.cpu_s / single.cpu_s) if name != SINGLE else (None, None)
        against = SINGLE if name != SINGLE else ""
        rows.append(Row(f"{name}: a second", 1 / found.wall_s, "1/s", against, pace))
        rows.append(Row(f"{name}: CPU", 1000 * found.cpu_s, "ms", against, cost))
    kept_s, again_s = figures[KEPT].cpu_s, figures[READ_AGAIN].cpu_s
    rows.append(Row(f"{KEPT}: CPU of an episode", 1000 * kept_s, "ms", READ_AGAIN, kept_s / again_s))
    for name in PAUSES_S:
        turn_ms = 1000 * (figures[name].cpu_s - single.cpu_s) / TURNS
        rows.append(Row(f"{name}: CPU of a turn beyond its tokens", turn_ms, "ms"))
    for name, (required, other) in REQUIRED.items():
        ratio = figures[other].wall_s / figures[name].wall_s
        rows.append(Row(f"{name}: pace", 1 / figures[name].wall_s, "1/s", other, ratio, required))
    return rows


def _seeds(name: str, number: int) -> np.ndarray:
    return answer_seeds(1, "qwen", name, number, GROUP_SIZE)


if __name__ == "__main__":
    sys.exit(main())
