"""Small real models and values that tests of several rooms share."""

import gc
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks a hub but one of its own
# A busy machine is slow for longer than any time limit on one example.
settings.register_profile("mrl", deadline=None)
settings.load_profile("mrl")
# What is imported and collected stays: to look through it for garbage, again and again, takes a fifth of all.
gc.disable()

LATER = ("thorough", "system", "engines")
"""What tools/test.sh runs by its mark alone; a file with such tests says `mark.thorough`, or another, in full."""


@cache
def _marks_in(path: Path) -> frozenset[str]:
    text = path.read_text()
    return frozenset(name for name in LATER if f"mark.{name}" in text)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file without a test of the wanted mark is not imported: to import all takes longer than to run many."""
    wanted, _, rest = config.option.markexpr.partition(" and ")
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if rest and wanted in LATER and is_test and wanted not in _marks_in(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Wherever all are collected, no test has a mark of which its file does not tell."""
    for item in items:
        for name in LATER:
            if item.get_closest_marker(name) and name not in _marks_in(item.path):
                raise pytest.UsageError(f"{item.nodeid}: the file has to say mark.{name} in full")


def pytest_collection_finish() -> None:
    """From here on garbage is looked for, in what the tests themselves make."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _path_as_before() -> Iterator[None]:
    """Folders in which a test lets its process find modules are not those of the tests behind."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A command that sets up the logging of its process leaves none of it to the tests behind."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    if not structlog.is_configured():
        return
    root.handlers = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture
def temporary() -> Iterator[dict[str, str]]:
    """The environment, with a temporary folder in which also processes that are killed leave nothing."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:  # paths of sockets have to be short
        yield {**os.environ, "TMPDIR": folder}


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., object]:
    """A factory of real, randomly initialised transformers of about 50k parameters, the same for the same seed."""

    def make(family: str = "qwen3", *, seed: int = 0, vocab_size: int = 64, tied: bool = True) -> object:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(seed)
        shape = {
            "vocab_size": vocab_size,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 64,
            "tie_word_embeddings": tied,
            "initializer_range": 0.3,
        }
        if family == "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
        return LlamaForCausalLM(LlamaConfig(**shape)).eval()

    return make
