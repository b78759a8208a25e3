"""A tiny recipe and examples that need no data set."""

import random
from dataclasses import dataclass

import pytest

from mrl.config.policy_tables import MakeTable


@dataclass(frozen=True)
class Pair:
    """A supervised example."""

    turns: tuple[tuple[str, str], ...]


class Letters:
    """Words of two letters, to be copied; practice prompts say so differently."""

    def __init__(self, letters: str = "abcd") -> None:
        self._letters = letters

    def draw(self, rng: random.Random, *, practice: bool) -> Pair:
        """One example."""
        word = "".join(rng.choices(self._letters, k=2))
        return Pair(((f"{'Practice' if practice else 'Copy this word'}: {word}", f"copy <answer>{word}</answer>"),))


@pytest.fixture
def examples() -> Letters:
    """Examples of one task."""
    return Letters()


@pytest.fixture
def recipe() -> MakeTable:
    """A recipe that is made in a second."""
    return MakeTable(
        architecture="qwen3",
        tokenizer="byte_level",
        vocab_size=320,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        warm_start_steps=2,
        warm_start_batch=4,
    )
