"""Ranks that share a model out: what they have to agree about before the first one gives the others their shards."""

import time
from datetime import timedelta
from pathlib import Path

import check_layouts
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

from mrl.config.policy_tables import LearnerTable, MakeTable
from mrl.errors import ModelFolderError
from mrl.learner import sharding, step
from mrl.learner.ranks.world import World
from mrl.learner.sharding import place
from mrl.learner.step_order import StepOrder
from mrl.models.architectures import init_model
from mrl.models.parameters import named_weights, released, weight_sources
from mrl.models.tensor_file import read_folder
from mrl.records.version import Version
from mrl.weights.canary import canary_sequences, make_canary
from mrl.weights.manifest import read_manifest
from mrl.weights.publish import Publisher


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
        until_s = time.monotonic() + 60
        while not Path(f"{out}.{1 - rank}").exists() and time.monotonic() < until_s:  # it may still read from this rank
            time.sleep(0.01)
    world.close()


@pytest.mark.thorough
def test_ranks_with_other_parameters_end_with_one_line(tmp_path: Path, monkeypatch) -> None:
    """Every rank, instead of shards of one tensor in the place of another's, or of waiting for what never comes."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))  # the ranks import this very module

    mp.spawn(_rank, args=(str(tmp_path / "store"), str(tmp_path / "told")), nprocs=2)

    for rank in (0, 1):
        assert "the names and shapes of config.json" in (tmp_path / f"told.{rank}").read_text()


def _patience(rank: int, store: str, out: str) -> None:
    """How long the groups of replicas x shards wait, beside that of all ranks."""
    world_patience = timedelta(seconds=1234)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=world_patience)
    mesh = sharding._mesh(1, World(rank, 2, torch.device("cpu"), patience=world_patience))
    groups = [dist.group.WORLD, *mesh.get_all_groups()]
    waits = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    Path(f"{out}.{rank}").write_text(" ".join(map(str, waits)))
    dist.destroy_process_group()


@pytest.mark.thorough
def test_all_groups_of_a_learner_wait_alike(tmp_path: Path, monkeypatch) -> None:
    """Those of replicas and of shards too, which torch makes with a bound of its own."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))  # the ranks import this very module

    mp.spawn(_patience, args=(str(tmp_path / "store"), str(tmp_path / "told")), nprocs=2)

    for rank in (0, 1):
        assert (tmp_path / f"told.{rank}").read_text() == "1234.0 1234.0 1234.0"


def _count(rank: int, store: str, out: str) -> None:
    """How often two replicas sum something between them in an update of one pass, and in one of many.

    With how many passes these have, and how many parameters had a gradient before the last of them.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    world = World(rank, 2, torch.device("cpu"))
    sums, told = [], dist.all_reduce
    dist.all_reduce = lambda *arguments, **keys: (sums.append(1), told(*arguments, **keys))[1]
    found, with_gradient, tell = [], [], step.sum_over_replicas

    def look(model: torch.nn.Module, *, is_due: bool) -> None:
        with_gradient.append(sum(parameter.grad is not None for parameter in model.parameters()))
        tell(model, is_due=is_due)

    step.sum_over_replicas = look
    for tokens in (4096, 32):
        keys = {"hosts": 2, "sharding": "shard", "minibatches": 1, "microbatch_tokens": tokens}
        trainer = check_layouts.make_trainer(check_layouts.Layout(2, keys), "qwen3", world, 1)
        sums.clear()
        order = StepOrder(check_layouts.rows(0), {"own": 16.0, "rescue": 5.0})
        trainer.train(order, 0)
        found.append(f"{len(sums)} {len(trainer._pack(order))} {sum(with_gradient)}")
    Path(f"{out}.{rank}").write_text("\n".join(found))
    world.close()


@pytest.mark.thorough
def test_replicas_sum_gradients_once_for_each_update(tmp_path: Path, monkeypatch) -> None:
    """However many passes it has; a rank of each host holds a replica of its own. Sums wait in the place of gradients,
    of which none is there before."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))  # the ranks import this very module
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))

    mp.spawn(_count, args=(str(tmp_path / "store"), str(tmp_path / "told")), nprocs=2)

    for rank in (0, 1):
        one, many = (line.split() for line in (tmp_path / f"told.{rank}").read_text().splitlines())
        assert (one[1], int(many[1]) > 3) == ("1", True), "passes"
        assert int(many[0]) == int(one[0]) > 0
        assert (one[2], many[2]) == ("0", "0"), "gradients beside the sums that wait"


def _publish(rank: int, store: str, out: str) -> None:
    """Two ranks with shards of a mixture publish what they began with."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    world = World(rank, 2, torch.device("cpu"))
    layouts = [check_layouts.Layout(2, {"sharding": "shard"}), check_layouts.Layout(1)]
    model, whole = (check_layouts.make_trainer(layout, "qwen3_moe", world, 1).model for layout in layouts)
    publisher = Publisher(Path(out), "a", rank=rank, num_ranks=2)
    canary = make_canary(model, canary_sequences(check_layouts.VOCAB))
    publisher.begin(weight_sources(model), Version(0, 1), canary if rank == 0 else None)
    publisher.finish()
    if rank == 0:
        wanted = released(whole, named_weights(whole).items())
        save_file({name: tensor.clone() for name, tensor in wanted}, f"{out}.wanted")
    publisher.close()
    world.close()


@pytest.mark.thorough
def test_ranks_with_shards_publish_an_expert_per_tensor(tmp_path: Path, monkeypatch) -> None:
    """Each in one file of one rank, with the bytes and the digest that the whole model has of it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))  # the ranks import this very module
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))

    mp.spawn(_publish, args=(str(tmp_path / "store"), str(tmp_path / "weights")), nprocs=2)

    folder, wanted = tmp_path / "weights" / "0.1", load_file(tmp_path / "weights.wanted")
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    assert [any(".experts.7." in name for name in file) for file in files] == [True, True]
    assert sum(map(len, files)) == len(wanted)
    assert all(torch.equal(tensor, wanted[name]) for file in files for name, tensor in file.items())
    assert read_folder(folder) == read_manifest(folder / "manifest.json").tensors
