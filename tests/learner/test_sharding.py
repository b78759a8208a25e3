"""Ranks that share a model out: what they have to agree about before the first one gives the others their shards."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mrl.config.policy_tables import LearnerTable, MakeTable
from mrl.errors import ModelFolderError
from mrl.learner.ranks.world import World
from mrl.learner.sharding import place
from mrl.models.architectures import init_model


def _rank(rank: int, store: str, out: str) -> None:
    """Rank 0 read a model with a head of its own, where config.json told rank 1 that it has none."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    world = World(rank, 2, torch.device("cpu"))
    recipe = MakeTable(architecture="qwen3", tokenizer="byte_level", hidden_size=16, num_layers=1, num_heads=2)
    model = init_model(recipe, vocab_size=32, eos_id=1, pad_id=0)
    if rank == 0:
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    try:
        place(model, LearnerTable(processes=2, sharding="shard"), world)
    except ModelFolderError as error:
        Path(f"{out}.{rank}").write_text(str(error))
    world.close()


@pytest.mark.thorough
def test_ranks_with_other_parameters_end_with_one_line(tmp_path: Path, monkeypatch) -> None:
    """Every rank, instead of shards of one tensor in the place of another's, or of waiting for what never comes."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))  # the ranks import this very module

    mp.spawn(_rank, args=(str(tmp_path / "store"), str(tmp_path / "told")), nprocs=2)

    for rank in (0, 1):
        assert "other names or shapes than config.json tells" in (tmp_path / f"told.{rank}").read_text()
