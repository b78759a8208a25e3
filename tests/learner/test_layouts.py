"""However ranks, shards, packing and microbatches are laid out, training gives the same parameters."""

import importlib
import itertools
import sys
from pathlib import Path

import pytest
import torch

from mrl.learner.world import World

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check_layouts():
    """The tool that trains layouts; spawned ranks import it by name."""
    sys.path.append(str(ROOT / "tools"))
    yield importlib.import_module("check_layouts")
    sys.path.remove(str(ROOT / "tools"))


def shards(ranks: int, **keys: object):
    return ranks, {"sharding": "shard", **keys}


WANTED = [
    (1, {}),
    (1, {"pack_tokens": 32, "microbatch_tokens": 32}),
    shards(1),
    shards(2),
    shards(2, pack_tokens=32, microbatch_tokens=32),
    shards(2, activation_checkpointing=True, microbatch_tokens=4096),
    (2, {}),
    (4, {}),
    shards(4),
    shards(4, shard_size=2, microbatch_tokens=48),
    shards(2),
]
"""The last one again: the same bits."""


@pytest.mark.system
@pytest.mark.timeout(240)  # seven new interpreters import torch and transformers, on a machine that may be busy
def test_every_layout_trains_the_same_parameters(check_layouts, tmp_path):
    """1, 2 and 4 ranks, whole or in shards, in any packing: to 1e-5, exactly between ranks, and bit for bit again."""
    wanted = [check_layouts.Layout(ranks, keys) for ranks, keys in WANTED]

    trained = check_layouts.train_all(wanted, tmp_path)

    alone = trained[0][0]
    untrained = dict(
        check_layouts.whole_weights(
            check_layouts.make_trainer(wanted[0], "qwen3", World(0, 1, torch.device("cpu")), 5).model
        )
    )
    assert check_layouts.difference({**untrained, "gradient norms": alone["gradient norms"]}, alone) > 1e-3
    for layout, of_ranks in zip(wanted, trained, strict=True):
        assert check_layouts.difference(of_ranks[0], alone) <= 1e-5, layout.name
        assert all(check_layouts.same_bits(one, other) for one, other in itertools.pairwise(of_ranks)), layout.name
    assert check_layouts.same_bits(trained[2][0], alone), "one shard is the whole"
    assert check_layouts.same_bits(trained[-1][0], trained[3][0])
