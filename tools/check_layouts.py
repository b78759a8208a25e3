"""Check of the learner, for those who change it: every layout of ranks, shards and packing trains equal parameters.

Every layout starts from the same random weights and takes the same five steps over the same rows, on gloo ranks of this
machine (or, with --device cuda, on NCCL ranks, one GPU each). The difference is the largest over all tensors of
max|a - b| / max|b|, where b is trained by one rank that holds everything; norms of gradients count as tensors too.
Every layout runs twice; "again" says whether both runs gave the same bits. Of "A, then B", A trains the first three
steps and saves, and B goes on from the checkpoint: where B is A, "again" compares with an unbroken A. Layouts in
bfloat16, or with moments or parameters in it, are shown, and are held to agreement between ranks and to equal bits
alone; compiled layouts to 5e-5.

    .venv/bin/python tools/check_layouts.py [--ranks N] [--hosts N [--only-spread]] [--family F] [--steps N]
                                            [--device cpu|cuda]

Prints a table; the last line is JSON; exit code 1 when a float32 layout differs by more than that, or bits differ.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from network_namespaces import Namespaces, enter, namespaces
from torch import Tensor

from mrl.alignment.next_units import NextUnits
from mrl.config.policy_tables import LearnerTable, MakeTable
from mrl.learner.ranks.rank_place import LEARNER_HOSTS, LEARNER_PLACE
from mrl.learner.ranks.rendezvous import RendezvousPoint
from mrl.learner.ranks.world import World, join_world
from mrl.learner.step_order import StepOrder
from mrl.learner.trainer import Trainer
from mrl.models.architectures import ARCHITECTURES, EXPERTS, EXPERTS_PER_TOKEN, init_model
from mrl.models.parameters import whole_weights
from mrl.objectives.specs import Clipped, Correction, Distilled, Imitation
from mrl.sharing.regime import Component, TrainingExample
from mrl.transport.endpoints import ADDRESS, HOST
from mrl.weights.canary import canary_sequences, make_canary
from mrl.weights.checkpoint_saver import Saver
from mrl.weights.checkpoint_store import CheckpointStore
from mrl.weights.training_state import restore_training, training_tensors

BOUND, COMPILED_BOUND = 1e-5, 5e-5
"""Largest difference of layouts in float32."""
LAYERS, VOCAB = 3, 61
"""Layers and tokens of the model. The vocabulary is odd, so that shards are of different lengths."""
TIMEOUT_S, LOST_S = 120.0, 30.0
HANDED_OVER = 3
"""Number of steps before a checkpoint from which another layout goes on."""
HEAVY = ["mrl.learner.trainer", "mrl.models.architectures"]
"""Modules that ranks need and import slowly: imported once, before ranks are forked."""
COMPONENTS = (
    Component("own", Distilled(Clipped(correction=Correction())), 1.0, "rows", "own"),
    Component("rescue", Imitation(), 0.3, "rows", "peer"),
)


@dataclass(frozen=True)
class Layout:
    """Number of ranks that train, and keys of their learner's table beside the defaults."""

    ranks: int
    keys: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Ranks and keys on one line."""
        return f"{self.ranks} ranks, " + (", ".join(f"{key} {value}" for key, value in self.keys.items()) or "defaults")

    @property
    def bound(self) -> float:
        """Largest difference of its parameters from those of the first layout."""
        if "bfloat16" in (self.table.precision, self.table.optimizer_dtype, self.table.parameter_dtype):
            return float("inf")
        return COMPILED_BOUND if self.table.compile else BOUND

    @property
    def table(self) -> LearnerTable:
        """Learner table, with two minibatches a step, so that a later update is held to the start of its step too.

        Where gradients are all but zero, Adam makes steps of the size `lr` out of rounding alone, so the effect of
        another order of sums grows with `lr`.
        """
        table = {"lr": 1e-4, "microbatch_tokens": 96, "minibatches": 2, "processes": self.ranks}
        return LearnerTable.model_validate(table | self.keys)


def layouts(max_ranks: int) -> list[Layout]:
    """Return all layouts that are compared; the first is the reference of the others."""
    packings: list[dict[str, Any]] = [{}, {"microbatch_tokens": 32}, {"microbatch_tokens": 4096}]
    shard, bf16, lean = {"sharding": "shard"}, {"precision": "bfloat16"}, {"parameter_dtype": "bfloat16"}
    context = {"context_parallel": 2}
    compiled, host, small = {"compile": True}, {"optimizer_memory": "host"}, {"optimizer_dtype": "bfloat16"}
    found = [Layout(1, packing) for packing in packings] + [Layout(1, shard), Layout(1, compiled), Layout(1, bf16)]
    offload = {"activation_checkpointing": True, "activation_offload": True}
    found += [Layout(1, host), Layout(1, small), Layout(1, small | host), Layout(1, offload)]
    found += [Layout(1, lean), Layout(1, lean | shard), Layout(1, lean | bf16)]
    if max_ranks >= 2:
        found += [Layout(2, way | packing) for way in ({}, shard) for packing in packings]
        found += [Layout(2, shard | compiled), Layout(2, shard | compiled | {"activation_checkpointing": True})]
        found += [Layout(2, shard | {"activation_checkpointing": True}), Layout(2, shard | bf16), Layout(2, bf16)]
        found += [Layout(2, host), Layout(2, shard | host), Layout(2, small), Layout(2, shard | small)]
        found += [Layout(2, shard | offload), *(Layout(2, context | packing) for packing in packings)]
        found += [Layout(2, context | shard | {"activation_checkpointing": True}), Layout(2, context | shard | bf16)]
        found += [Layout(2, lean), Layout(2, lean | shard), Layout(2, lean | small | host | bf16 | shard)]
    if max_ranks >= 4:
        found += [Layout(4), Layout(4, shard), Layout(4, shard | {"shard_size": 2})]
        found += [Layout(4, context), Layout(4, context | shard), Layout(4, {"context_parallel": 4})]
    return found


def spread(max_ranks: int, hosts: int) -> list[Layout]:
    """Return layouts over so many hosts: flat, shards within hosts and replicas across, and shards across."""
    if hosts < 2 or max_ranks < hosts:
        return []
    shard, over = {"sharding": "shard"}, {"hosts": hosts}
    ranks = max_ranks // hosts * hosts
    ways: list[dict[str, Any]] = [{}, shard, shard | {"microbatch_tokens": 48}, shard | {"shard_size": ranks}]
    return [Layout(ranks, over | way) for way in ways]


def handovers(max_ranks: int) -> list[tuple[Layout, Layout]]:
    """Return pairs of layouts: one trains the first steps, the other goes on from its checkpoint."""
    alone, pair = Layout(1), Layout(2, {"sharding": "shard"})
    found = [(alone, alone), (alone, Layout(1, {"optimizer_memory": "host"}))]
    if max_ranks >= 2:
        host = Layout(2, {"sharding": "shard", "optimizer_memory": "host"})
        small = Layout(2, {"sharding": "shard", "optimizer_dtype": "bfloat16"})
        found += [(pair, pair), (pair, alone), (alone, pair), (pair, host), (host, pair)]
        found += [(small, small), (small, pair), (pair, small), (Layout(1, {"optimizer_dtype": "bfloat16"}), small)]
        lean = Layout(2, {"sharding": "shard", "parameter_dtype": "bfloat16"})
        found += [(lean, lean), (lean, pair), (pair, lean), (Layout(1, {"parameter_dtype": "bfloat16"}), lean)]
    if max_ranks >= 4:
        four = Layout(4, {"sharding": "shard", "shard_size": 2})
        found += [(four, pair), (pair, four), (Layout(4, {"sharding": "shard"}), alone)]
    return found


def rows(step: int, count: int = 21) -> list[TrainingExample]:
    """Make random rows of a step, three to a prompt: three of four "own", one of these with units, else a "rescue"."""
    rng = np.random.default_rng([7, step])
    made: list[TrainingExample] = []
    for index in range(count):
        prompt, answer = rng.integers(1, 16, size=2)
        prompt_ids = made[-1].prompt_token_ids if index % 3 else rng.integers(0, VOCAB, prompt).astype(np.int32)
        is_rescue = index % 4 == 3
        told = np.log(rng.dirichlet(np.ones(4), answer)[:, :3]).astype(np.float32)
        made.append(
            TrainingExample(
                prompt_token_ids=prompt_ids,
                answer_token_ids=rng.integers(0, VOCAB, answer).astype(np.int32),
                component="rescue" if is_rescue else "own",
                advantages=np.full(answer, 0.0 if is_rescue else rng.normal(), np.float32),
                weights=np.full(answer, 1.0 / answer, np.float32),
                behaviour_logprobs=None if is_rescue else -rng.exponential(3.0, answer).astype(np.float32),
                prompt_id=f"{step}.{index}",
                source="peer" if is_rescue else "me",
                teacher_units=None if index % 4 != 1 else NextUnits(rng.integers(0, VOCAB, told.shape, np.int32), told),
            )
        )
    return made


def with_experts(rows: Sequence[TrainingExample], step: int) -> list[TrainingExample]:
    """Give own rows random experts, as no router chose; rows of a prompt agree on those of its last place."""
    rng, found, first = np.random.default_rng([11, step]), [], dict[bytes, Any]()
    for row in rows:
        drawn = rng.random((row.answer_token_ids.size, LAYERS, EXPERTS)).argsort(-1)[:, :, :EXPERTS_PER_TOKEN]
        experts = drawn.reshape(row.answer_token_ids.size, -1).astype(np.uint8)
        experts[0] = first.setdefault(row.prompt_token_ids.tobytes(), experts[0].copy())
        found.append(replace(row, experts=experts) if row.component == "own" else row)
    return found


def make_trainer(layout: Layout, family: str, world: World, total_steps: int) -> Trainer:
    """Make the trainer of one rank, from the same weights in every layout."""
    recipe = MakeTable(architecture=family, tokenizer="byte_level", hidden_size=64, num_layers=LAYERS, num_heads=4)
    model = init_model(recipe, vocab_size=VOCAB, eos_id=0, pad_id=0)
    with torch.no_grad():  # as initialised, all tokens are about equally likely, which hides mistakes
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
            if layout.table.num_shards > 1 and not world.is_first:
                parameter.fill_(torch.nan)  # the trainer has to take the first rank's values
    return Trainer(model, layout.table, COMPONENTS, temperature=0.8, seed=0, total_steps=total_steps, world=world)


@dataclass(frozen=True)
class Job:
    """Some steps in one layout, from the beginning or from a checkpoint."""

    layout: Layout
    steps: range
    result: str
    saved_to: str = ""
    resumed_from: str = ""


def do(job: Job, family: str, total_steps: int, world: World) -> None:
    """Do one rank's part of a job: train, save a checkpoint if one is wanted, write the weights and norms."""
    trainer = make_trainer(job.layout, family, world, total_steps)
    if job.resumed_from:
        found = CheckpointStore(Path(job.resumed_from), "policy").open(job.steps.start)
        restore_training(trainer.model, trainer.optimizer, found)
    trained = {}
    for step in job.steps:
        replays = job.layout.table.router_replay
        order = StepOrder(with_experts(rows(step), step) if replays else rows(step), {"own": 16.0, "rescue": 5.0})
        values = trainer.train(order, step)
        if replays:
            trained[f"routed otherwise in step {step}"] = torch.tensor(values["routing/otherwise_share"])
        # Adam's steps do not show the scale of a gradient, so the norm is compared too.
        trained[f"gradient norm of step {step}"] = torch.tensor(values["optim/grad_norm"])
    num_savers = job.layout.table.num_shards
    if job.saved_to and world.rank < num_savers:
        store = CheckpointStore(Path(job.saved_to), "policy")
        saver = Saver(store, rank=world.rank, num_ranks=num_savers, life=0)
        saver.save(job.steps.stop, training_tensors(trainer.model, trainer.optimizer), {})
        saver.wait()
    make_canary(trainer.model, canary_sequences(VOCAB))  # as a learner does before it publishes
    trained |= {name: tensor.cpu() for name, tensor in whole_weights(trainer.model)}
    safetensors.torch.save_file(trained, f"{job.result}.{world.rank}")


@dataclass(frozen=True)
class Group:
    """Ranks that do some jobs together."""

    ranks: int
    store: str
    """File in which ranks of one host meet, or, for several hosts, the name by which they meet."""
    device: str
    hosts: Namespaces | None = None
    """Network namespaces in which the ranks live, if not on this host."""


def work(rank: int, group: Group, family: str, total_steps: int, jobs: Sequence[Job]) -> None:
    """Run one rank of jobs that share a number of ranks."""
    torch.set_num_threads(1)
    with join_spread(rank, group, group.hosts) if group.hosts else join_here(rank, group) as world:
        for job in jobs:
            do(job, family, total_steps, world)
        world.close()
        world.part(lambda: False)


def join_here(rank: int, group: Group) -> World:
    """Join the ranks of this host, which meet in a file."""
    at = torch.device(group.device, rank) if group.device == "cuda" else torch.device(group.device)
    if at.type == "cuda":
        torch.cuda.set_device(at)
    if group.ranks > 1:
        backend = "nccl" if at.type == "cuda" else "gloo"
        patience, method = timedelta(seconds=TIMEOUT_S), f"file://{group.store}"
        dist.init_process_group(backend, init_method=method, rank=rank, world_size=group.ranks, timeout=patience)
    return World(rank, group.ranks, at)


def join_spread(rank: int, group: Group, hosts: Namespaces) -> World:
    """Join ranks of several hosts as those of a learner, each told its place as its supervisor would tell it."""
    local = group.ranks // len(hosts.hosts)
    place, number = divmod(rank, local)
    enter(hosts.hosts[place])
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(local)}
    os.environ |= {LEARNER_HOSTS: ",".join(hosts.hosts), LEARNER_PLACE: str(place)}
    os.environ |= {HOST: hosts.hosts[place], ADDRESS: hosts.addresses[place]}
    point = RendezvousPoint(Path(group.store).parent / "endpoints", Path(group.store).name, TIMEOUT_S, lost_s=LOST_S)
    return join_world(group.device, timeout_s=TIMEOUT_S, point=point)


Trained = list[dict[str, Tensor]]
"""For each rank, the weights that a layout trained and the norms of its gradients."""


def run_all(
    jobs: Sequence[Job], folder: Path, device: str, family: str, total_steps: int, *, hosts: Namespaces | None = None
) -> list[Trained]:
    """Run all jobs; those of equal numbers of ranks and of hosts share their processes."""
    multiprocessing.set_forkserver_preload(HEAVY)
    for ranks, num_hosts in sorted({(job.layout.ranks, job.layout.table.hosts) for job in jobs}):
        together = [job for job in jobs if (job.layout.ranks, job.layout.table.hosts) == (ranks, num_hosts)]
        store = str(folder / f"ranks-{len(list(folder.iterdir()))}")
        group = Group(ranks, store, device, hosts if num_hosts > 1 else None)
        mp.start_processes(work, (group, family, total_steps, together), nprocs=ranks, start_method="forkserver")
    return [[safetensors.torch.load_file(f"{job.result}.{rank}") for rank in range(job.layout.ranks)] for job in jobs]


def train_all(
    wanted: Sequence[Layout],
    handed: Sequence[tuple[Layout, Layout]],
    folder: Path,
    *,
    device: str = "cpu",
    family: str = "qwen3",
    steps: int = 5,
    hosts: Namespaces | None = None,
) -> tuple[list[Trained], list[Trained]]:
    """Train all layouts, and those that go on from the checkpoints of others; return the results of both.

    Layouts over several hosts run on `hosts`.
    """
    whole = [Job(layout, range(steps), str(folder / f"whole-{index}")) for index, layout in enumerate(wanted)]
    begun, resumed = [], []
    for index, (first, second) in enumerate(handed):
        saved, of_job = (
            str(folder / f"saved-{index}"),
            [str(folder / f"{name}-{index}") for name in ("begun", "resumed")],
        )
        begun.append(Job(first, range(HANDED_OVER), of_job[0], saved_to=saved))
        resumed.append(Job(second, range(HANDED_OVER, steps), of_job[1], resumed_from=saved))
    done = run_all([*whole, *begun], folder, device, family, steps, hosts=hosts)
    later = run_all(resumed, folder, device, family, steps, hosts=hosts)
    joined = [[before[0] | after for after in ranks] for before, ranks in zip(done[len(whole) :], later, strict=True)]
    return done[: len(whole)], joined


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return max|a - b| / max|b|, the largest over all tensors; infinite where names differ."""
    if found.keys() != expected.keys():
        return float("inf")
    return max(float((found[name] - b).abs().max() / b.abs().max()) for name, b in expected.items())


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether two sets of weights are equal."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@dataclass(frozen=True)
class Line:
    """Figures of one line of the table."""

    name: str
    bound: float
    ranks: Trained
    again: Trained | None

    def show(self, expected: dict[str, Tensor]) -> dict[str, Any]:
        """Print the line; return its numbers."""
        apart = difference(self.ranks[0], expected)
        agree = all(same_bits(one, other) for one, other in itertools.pairwise(self.ranks))
        again = None if self.again is None else same_bits(self.ranks[0], self.again[0])
        said = {None: "", True: "same bits", False: "DIFFERS"}[again]
        print(f"{self.name:<84} {apart:>10.1e}  {'yes' if agree else 'NO':<11}  {said}")
        sound = agree and again is not False and apart <= self.bound
        return {"layout": self.name, "difference": apart, "ranks_agree": agree, "same_bits": again, "sound": sound}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="layouts of up to so many ranks")
    parser.add_argument("--hosts", type=int, default=1, help="some of them over so many network namespaces")
    parser.add_argument("--only-spread", action="store_true", help="nothing else but what those are compared with")
    parser.add_argument("--family", default="qwen3", choices=list(ARCHITECTURES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    across = spread(options.ranks, options.hosts)
    handed = [pair for one in across[1:2] for pair in ((one, Layout(1)), (Layout(1), one))]
    wanted = [*(layouts(1)[:1] if options.only_spread else layouts(options.ranks)), *across]
    handed += [] if options.only_spread else handovers(options.ranks)
    among: AbstractContextManager[Namespaces | None] = namespaces(options.hosts) if options.hosts > 1 else nullcontext()
    with tempfile.TemporaryDirectory() as folder, among as hosts:
        how = {"device": options.device, "family": options.family, "steps": options.steps, "hosts": hosts}
        twice, joined = train_all([*wanted, *wanted], handed, Path(folder), **how)
    unbroken = {layout.name: ranks for layout, ranks in zip(wanted, twice, strict=False)}
    lines = [
        Line(layout.name, layout.bound, ranks, twice[len(wanted) + index])
        for index, (layout, ranks) in enumerate(zip(wanted, twice, strict=False))
    ] + [
        Line(
            f"{one.name}, then {other.name}",
            max(one.bound, other.bound),
            ranks,
            unbroken.get(one.name * (one == other)),
        )
        for (one, other), ranks in zip(handed, joined, strict=True)
    ]
    print(f"{'layout':<84} {'difference':>10}  {'ranks agree':<11}  again")
    results = [line.show(twice[0][0]) for line in lines]
    sound = all(result["sound"] for result in results)
    print(json.dumps({"sound": sound, "layouts": results}))
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
