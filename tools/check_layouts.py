"""Trains one small policy in every layout of ranks, shards, packing and microbatches, and compares the parameters.

Every layout starts from the same random weights and takes the same five steps over the same rows, on gloo ranks of this
machine (or, with --device cuda, on NCCL ranks, one GPU each). The difference is the largest over all tensors of
max|a - b| / max|b|, b being what one rank trains that holds everything; the norms of the gradients count as one tensor
more. Every layout runs twice; "again" says whether both runs gave the same bits. Layouts in bfloat16 are shown, and are
held to agreement between ranks and to equal bits alone.

    .venv/bin/python tools/check_layouts.py [--ranks N] [--family F] [--steps N] [--device cpu|cuda]

Prints a table; the last line is JSON; exit code 1 when a float32 layout differs by more than 1e-5, or bits differ.
"""

import argparse
import itertools
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from mrl.config.schema import LearnerTable, MakeTable
from mrl.learner.order import StepOrder
from mrl.learner.trainer import Trainer
from mrl.learner.world import World
from mrl.models.architectures import init_model
from mrl.models.parameters import whole_weights
from mrl.objectives.specs import Clipped, Correction, Imitation
from mrl.sharing.regime import Component, TrainingExample

BOUND = 1e-5
VOCAB = 64
TIMEOUT_S = 120.0
HEAVY = ["mrl.learner.trainer", "mrl.models.architectures"]
"""What ranks need and import slowly: done once, before they are forked."""
COMPONENTS = (
    Component("own", Clipped(0.2, 0.2, correction=Correction("token", "truncate", 0.0, 5.0)), 1.0, "rows", "own"),
    Component("rescue", Imitation(), 0.3, "rows", "peer"),
)


@dataclass(frozen=True)
class Layout:
    """How many ranks train, and what their learner's table says beside the defaults."""

    ranks: int
    keys: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Ranks and keys on one line."""
        return f"{self.ranks} ranks, " + (", ".join(f"{key} {value}" for key, value in self.keys.items()) or "defaults")

    @property
    def table(self) -> LearnerTable:
        """Two minibatches a step, so that a later update is held to the start of its step too."""
        table = {"lr": 1e-3, "pack_tokens": 48, "microbatch_tokens": 96, "minibatches": 2, "processes": self.ranks}
        return LearnerTable.model_validate(table | self.keys)


def layouts(max_ranks: int) -> list[Layout]:
    """All that are compared; the first is what the others are compared with."""
    packings = ({}, {"pack_tokens": 32, "microbatch_tokens": 32}, {"pack_tokens": 64, "microbatch_tokens": 4096})
    shard, bf16 = {"sharding": "shard"}, {"precision": "bfloat16"}
    found = [Layout(1, packing) for packing in packings] + [Layout(1, shard), Layout(1, bf16)]
    if max_ranks >= 2:
        found += [Layout(2, way | packing) for way in ({}, shard) for packing in packings]
        found += [Layout(2, shard | {"activation_checkpointing": True}), Layout(2, shard | bf16), Layout(2, bf16)]
    if max_ranks >= 4:
        found += [Layout(4), Layout(4, shard), Layout(4, shard | {"shard_size": 2})]
    return found


def rows(step: int, count: int = 21) -> list[TrainingExample]:
    """Random rows of a step: three of four "own", the fourth a "rescue"."""
    rng = np.random.default_rng([7, step])
    made = []
    for index in range(count):
        prompt, answer = rng.integers(1, 16, size=2)
        is_rescue = index % 4 == 3
        made.append(
            TrainingExample(
                prompt_token_ids=rng.integers(0, VOCAB, prompt).astype(np.int32),
                answer_token_ids=rng.integers(0, VOCAB, answer).astype(np.int32),
                component="rescue" if is_rescue else "own",
                advantages=np.full(answer, 0.0 if is_rescue else rng.normal(), np.float32),
                weights=np.full(answer, 1.0 / answer, np.float32),
                behaviour_logprobs=None if is_rescue else -rng.exponential(3.0, answer).astype(np.float32),
                prompt_id=f"{step}.{index}",
                source="peer" if is_rescue else "me",
            )
        )
    return made


def make_trainer(layout: Layout, family: str, world: World, total_steps: int) -> Trainer:
    """The trainer of one rank, from the same weights in every layout."""
    recipe = MakeTable(architecture=family, tokenizer="byte_level", hidden_size=64, num_layers=3, num_heads=4)
    model = init_model(recipe, vocab_size=VOCAB, eos_id=0, pad_id=0)
    with torch.no_grad():  # as initialised, all tokens are about equally likely, and much looks right that is not
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return Trainer(model, layout.table, COMPONENTS, temperature=0.8, seed=0, total_steps=total_steps, world=world)


def train_rank(
    rank: int, ranks: int, store: str, device: str, family: str, steps: int, of_rank: Sequence[tuple[str, Layout]]
) -> None:
    """One rank of all layouts that have so many ranks; the first one saves what each trained under its path."""
    torch.set_num_threads(1)
    at = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if at.type == "cuda":
        torch.cuda.set_device(at)
    if ranks > 1:
        patience = timedelta(seconds=TIMEOUT_S)
        backend = "nccl" if at.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=patience)
    world = World(rank, ranks, at)
    for path, layout in of_rank:
        trainer = make_trainer(layout, family, world, steps)
        order = [StepOrder(rows(step), {"own": 16.0, "rescue": 5.0}) for step in range(steps)]
        norms = [trainer.train(of_step, step)["optim/grad_norm"] for step, of_step in enumerate(order)]
        trained = {name: tensor.cpu() for name, tensor in whole_weights(trainer.model)}
        trained["gradient norms"] = torch.tensor(
            norms
        )  # the scale of a gradient does not show in what Adam makes of it
        safetensors.torch.save_file(trained, f"{path}.{rank}")
    world.close()


def train_all(
    wanted: Sequence[Layout], folder: Path, *, device: str = "cpu", family: str = "qwen3", steps: int = 5
) -> list[list[dict[str, Tensor]]]:
    """Per layout and rank, the weights that came of it and the norms of its gradients.

    Layouts of one number of ranks share their processes.
    """
    multiprocessing.set_forkserver_preload(HEAVY)
    paths = [str(folder / f"layout-{index}") for index in range(len(wanted))]
    for ranks in sorted({layout.ranks for layout in wanted}):
        of_rank = [(path, layout) for path, layout in zip(paths, wanted, strict=True) if layout.ranks == ranks]
        store = str(folder / f"store-{ranks}")
        mp.start_processes(
            train_rank, (ranks, store, device, family, steps, of_rank), nprocs=ranks, start_method="forkserver"
        )
    return [
        [safetensors.torch.load_file(f"{path}.{rank}") for rank in range(layout.ranks)]
        for path, layout in zip(paths, wanted, strict=True)
    ]


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest over all tensors of max|a - b| / max|b|; infinite where names differ."""
    if found.keys() != expected.keys():
        return float("inf")
    return max(float((found[name] - b).abs().max() / b.abs().max()) for name, b in expected.items())


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether two sets of weights are equal."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="layouts of up to so many ranks")
    parser.add_argument("--family", default="qwen3", choices=["qwen3", "llama", "gemma3"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    wanted = layouts(options.ranks)
    with tempfile.TemporaryDirectory() as folder:
        twice = train_all(
            [*wanted, *wanted], Path(folder), device=options.device, family=options.family, steps=options.steps
        )
    results, sound = [], True
    print(f"{'layout':<72} {'difference':>10}  {'ranks agree':<11}  again")
    for layout, first, second in zip(wanted, twice, twice[len(wanted) :], strict=False):
        apart = difference(first[0], twice[0][0])
        agree = all(same_bits(one, other) for one, other in itertools.pairwise(first))
        again = same_bits(first[0], second[0])
        sound &= agree and again and (apart <= BOUND or layout.table.precision != "float32")
        print(
            f"{layout.name:<72} {apart:>10.1e}  {'yes' if agree else 'NO':<11}  {'same bits' if again else 'DIFFERS'}"
        )
        results.append({"layout": layout.name, "difference": apart, "ranks_agree": agree, "same_bits": again})
    print(json.dumps({"sound": sound, "layouts": results}))
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
