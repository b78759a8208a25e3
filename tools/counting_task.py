"""A task with long answers of known lengths, counting aloud, and a small policy that can do it, for `bench_async.py`.

The prompt says from where to where. Answers are log-normal in length, of mean 71 and at most 190 tokens. The policy is
warm-started: it can count in both directions, and takes either in half of its answers whatever the prompt asks;
reinforcement learning has to find the right direction.

    .venv/bin/python tools/counting_task.py FOLDER TRAIN_PROMPTS HELD_OUT_PROMPTS

Writes FOLDER/train.jsonl, FOLDER/held_out.jsonl and FOLDER/policy.
"""

import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
from bench_rollout import MAX_TOKENS, long_tail

from mrl.config.policy_tables import MakeTable
from mrl.models.make import make_policy
from mrl.tasks.warm_start_examples import Example

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
RECIPE = MakeTable(
    architecture="qwen3",
    tokenizer="byte_level",
    vocab_size=340,
    hidden_size=64,
    num_layers=2,
    warm_start_steps=500,
    warm_start_batch=32,
    warm_start_lr=4e-3,
)


def answer(direction: str, last: int) -> str:
    """Return the answer that counts from 0 to `last`, or the other way.

    >>> answer("down", 3)
    'down 3 2 1 0'
    """
    numbers = range(last + 1) if direction == "up" else range(last, -1, -1)
    return " ".join([direction, *map(str, numbers)])


def prompt(name: str, direction: str, last: int) -> str:
    """Return a prompt that asks somebody to count."""
    return f"{name} counts {'from zero to' if direction == 'up' else 'to zero from'} {last}"


class Counting:
    """Prompts whose answers have lengths from the long tail; also the examples of the policy's warm start."""

    def __init__(self) -> None:
        tokens = np.cumsum([4, *(1 + len(str(last)) for last in range(1, MAX_TOKENS))])
        """Tokens of the answer up to each number: word, end, and a token for every blank and digit."""
        self._lasts = [int(np.abs(tokens - length).argmin()) for length in long_tail(np.random.default_rng(1), 4096)]
        self._lasts = [min(last, int(np.searchsorted(tokens, MAX_TOKENS, "right")) - 1) for last in self._lasts]

    def ask(self, rng: random.Random) -> tuple[str, str, int]:
        """Draw a prompt, and the direction and number that it asks for."""
        direction, last = rng.choice(["up", "down"]), rng.choice(self._lasts)
        return prompt("".join(rng.choices(ALPHABET, k=3)), direction, last), direction, last

    def draw(self, rng: random.Random, *, practice: bool) -> Example:
        """Draw an example that counts in either direction, whatever the prompt asks."""
        text, _, last = self.ask(rng)
        asked = f"Practice: {last}" if practice else text
        return Example(((asked, answer(rng.choice(["up", "down"]), last)),))

    def write(self, path: Path, how_many: int, seed: int) -> None:
        """Write a file of `how_many` prompts with their right answers, for the runs."""
        rng = random.Random(seed)
        asked = [self.ask(rng) for _ in range(how_many)]
        rows = [{"prompt": text, "reference": answer(direction, last)} for text, direction, last in asked]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(folder: Path) -> None:
    """Make the policy, on all cores."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))

    def tell(step: int, loss: float) -> None:
        if step % 50 == 0:
            print(f"warm start {step}/{RECIPE.warm_start_steps}: {loss:.3f} nats", file=sys.stderr, flush=True)

    make_policy(RECIPE, Counting(), folder, on_step=tell)


def main(words: list[str]) -> int:
    folder, train_prompts, held_out_prompts = Path(words[0]), int(words[1]), int(words[2])
    Counting().write(folder / "train.jsonl", train_prompts, seed=1)
    Counting().write(folder / "held_out.jsonl", held_out_prompts, seed=2)
    make(folder / "policy")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
