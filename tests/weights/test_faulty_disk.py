"""A disk that fails below the process: nothing that was acknowledged is lost, and nothing wrong is loaded.

Writes fail, are short, or end the process; after a failed sync what was written last is gone. By seed.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mrl.exchange.limits import Limits
from mrl.exchange.store import Store
from mrl.records.codec import encode
from mrl.weights.checkpoint_store import CheckpointStore
from tests.support.faulty_writers import record

SOURCE = Path(__file__).parents[1] / "support" / "faulty_disk.c"
SEEDS = [(0, 30), pytest.param((1000, 200), marks=pytest.mark.thorough)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled here."""
    compiler = shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no gcc")
    made = tmp_path_factory.mktemp("faulty") / "faulty.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", made, SOURCE, "-ldl"], check=True)
    return made


@pytest.fixture
def run(library: Path, tmp_path: Path) -> Callable[..., dict[int, list[int]]]:
    """Lets writers meet the disk; seed -> what they were told is safe."""

    def writing(what: str, first: int, count: int) -> dict[int, list[int]]:
        folder = tmp_path / "disk"
        environment = os.environ | {"LD_PRELOAD": str(library), "UNDER": str(folder)}
        words = ["-m", "tests.support.faulty_writers", what, str(folder), str(first), str(count)]
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        found = {seed: tmp_path / "told-disk" / str(seed) for seed in range(first, first + count)}
        return {seed: [int(line) for line in path.read_text().split()] for seed, path in found.items()}

    return writing


@pytest.mark.parametrize("seeds", SEEDS)
def test_the_exchange_loses_nothing_that_it_acknowledged(
    run: Callable[..., dict[int, list[int]]], tmp_path: Path, seeds: tuple[int, int]
) -> None:
    """And what it holds is what was put."""
    told = run("store", *seeds)
    for seed, acknowledged in told.items():
        store = Store(tmp_path / "disk" / str(seed), Limits())
        found = {one.number: one.body for one in store.contents().entries}
        assert (store.damage, store.num_unreadable) == ("", 0), seed
        assert set(acknowledged) <= found.keys(), seed
        assert all(body == encode(record(number)) for number, body in found.items()), seed
        store.close()
    assert any(len(acknowledged) < 60 for acknowledged in told.values())
    assert sum(map(len, told.values())) > 100


@pytest.mark.parametrize("seeds", SEEDS)
def test_what_has_the_name_of_a_checkpoint_is_one(
    run: Callable[..., dict[int, list[int]]], tmp_path: Path, seeds: tuple[int, int]
) -> None:
    """The newest that was said to be saved is there, and all that are there are sound."""
    told = run("checkpoints", *seeds)
    for seed, saved in told.items():
        store = CheckpointStore(tmp_path / "disk" / str(seed), "a")
        steps = store.steps()
        assert [store.problem(step) for step in steps] == [None] * len(steps), seed
        assert saved[-1:] == [step for step in steps if step in saved][-1:], seed
        for step in steps:
            checkpoint = store.open(step)
            assert checkpoint.state == {"step": step}
            for n in range(3):
                assert torch.equal(checkpoint.read(f"w{n}"), torch.full((64, 300), float(step + n))), (seed, step)
    assert any(len(saved) < 8 for saved in told.values())
    assert sum(map(len, told.values())) > 50
