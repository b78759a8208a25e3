"""Tables of docs/learner.md of the GPU memory that learners need, for those who size a run, from the memory plan alone.

`long` is one rank's part of an 8B model with an episode of 131,072 tokens; `sizes` are models of three sizes on so many
GPUs; `turns` are two policies on one GPU, side by side and in turns (docs/turns.md). No weights are read and nothing is
trained: shapes are those of released models, passes are traced without data.

    .venv/bin/python tools/memory_tables.py [long|sizes|turns]

Cells are GiB on each GPU, and behind a plus GiB in locked main memory in their stead. Sizes above those of a GPU of
80 GB are in brackets.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpu_hour.shapes import config_of
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from mrl.config.defaults import by_device
from mrl.config.policy_tables import LearnerTable
from mrl.config.schema import RunConfig
from mrl.memory_plan.needs import on_gpu_with
from mrl.memory_plan.policy_memory import PolicyMemory
from mrl.memory_plan.run_memory import by_device as gpu_memory
from mrl.memory_plan.run_memory import memory_plan
from mrl.processes.planning.plan import build_plan

GIB = 1024**3
LEAN = {"sharding": "shard", "precision": "bfloat16", "activation_checkpointing": True}
SMALL, OFFLOAD, HOST = {"optimizer_dtype": "bfloat16"}, {"activation_offload": True}, {"optimizer_memory": "host"}
PARAMETERS = {"parameter_dtype": "bfloat16"}
OPTIONS: dict[str, dict[str, Any]] = {
    "no other option": {},
    "`optimizer_dtype`": SMALL,
    "`optimizer_dtype`, `parameter_dtype`": SMALL | PARAMETERS,
    "`optimizer_dtype`, `activation_offload`": SMALL | OFFLOAD,
    '`optimizer_memory = "host"`, `activation_offload`': HOST | OFFLOAD,
    "`optimizer_dtype`, both on the host": SMALL | OFFLOAD | HOST,
    "`optimizer_dtype`, `parameter_dtype`, both on the host": SMALL | PARAMETERS | OFFLOAD | HOST,
}
"""Options of the learner, by the words of the tables."""
SHAPES: dict[str, PreTrainedConfig] = {
    "8B": config_of("8B"),
    "32B": config_of("8B", hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64),
    "70B": LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "1.5B": Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
}
"""Shapes of Qwen3 8B and 32B, of Llama 3 70B, and of Qwen2.5 1.5B."""
SIZES = ("8B", "32B", "70B")
TURNS_ROLLOUT = {"group_size": 8, "max_new_tokens": 4096, "answers_at_once": 64}
TURNS_LEARNER = {"prompts_per_step": 64, "activation_checkpointing": True, "microbatch_tokens": 16384}
GPUS, GPUS_PER_HOST = (8, 16, 32, 64), 8
LONG_TOKENS, TOKENS = 131072, 16384


@dataclass(frozen=True)
class Cell:
    """Memory of a rank that is not the first, which alone reads the model."""

    device_gib: float
    activations_gib: float
    locked_gib: float

    def __str__(self) -> str:
        told = f"{self.device_gib:.1f}" + (f" + {self.locked_gib:.1f}" if self.locked_gib else "")
        return told if self.device_gib < 80e9 / GIB else f"({told})"


def long_table() -> list[list[str]]:
    """Rows of the table `long`, its head first."""
    sharing = (1, 2, 4, 8)
    table = [["8 GPUs in shards, `context_parallel`", *map(str, sharing)]]
    for name, keys in (("", {}), (" with `activation_offload`", OFFLOAD)):
        long = LEAN | keys | {"processes": 8, "microbatch_tokens": LONG_TOKENS + 1}
        cells = [cell("8B", long | {"context_parallel": number}, LONG_TOKENS) for number in sharing]
        table.append([f"peak of a rank{name}", *map(str, cells)])
        table.append(["of it activations", *(f"{one.activations_gib:.1f}" for one in cells)])
    return table


def sizes_table(shapes: Sequence[str] = SIZES) -> list[list[str]]:
    """Rows of the table `sizes`, its head first."""
    table = [["model", "beside that", *map(str, GPUS)]]
    for shape in shapes:
        for name, keys in OPTIONS.items():
            cells = []
            for gpus in GPUS:
                ranks = {"processes": gpus, "hosts": gpus // GPUS_PER_HOST, "shard_size": gpus}
                wanted = LEAN | keys | ranks | {"microbatch_tokens": TOKENS}
                cells.append(cell(shape, wanted, TOKENS // 2))
            table.append([shape, name, *map(str, cells)])
    return table


def cell(shape: str, keys: dict[str, Any], answer_tokens: int) -> Cell:
    """Plan one rank of a learner with these keys on GPUs, as `mrl check` does, for rows of full length."""
    memory = policy_memory(shape, answer_tokens)
    table = LearnerTable.model_validate(memory.table.learner.model_dump(exclude_unset=True) | keys)
    host, tensors = memory.ranks(table)[1]
    device = on_gpu_with(tensors)
    locked = host.parts.get("optimizer", 0.0) + host.parts.get("offloaded inputs", 0.0)
    return Cell(device.mib / 1024, device.parts.get("activations", 0.0) / GIB, locked / GIB)


@cache
def policy_memory(shape: str, answer_tokens: int) -> PolicyMemory:
    """Memory plan of a policy with a model of this shape, of which only config.json is read."""
    rollout = {"group_size": 8, "max_new_tokens": answer_tokens}
    with TemporaryDirectory() as folder:
        SHAPES[shape].save_pretrained(folder)
        policy = {"model": folder, "device": "cuda", "rollout": rollout, "learner": LEAN | {"prompts_per_step": 64}}
        tables = {
            "run": {"name": "memory", "steps": 1},
            "tasks": {"trim": {"source": "words", "dataset": "trim"}},
            "policies": {"a": policy},
        }
        memory = PolicyMemory(by_device(RunConfig.model_validate(tables)).config, "a")
        memory.ranks(memory.table.learner)  # reads the folder
    return memory


def turns_table() -> list[list[str]]:
    """Rows of the table `turns`: two policies, all weights trained, on one GPU: memory of each process, and at once."""
    names = ("a", "b")
    with TemporaryDirectory() as folder:
        SHAPES["1.5B"].save_pretrained(folder)
        own = {"model": folder, "device": "cuda", "rollout": TURNS_ROLLOUT, "learner": TURNS_LEARNER}
        found = []
        for turns in (False, True):
            tables = {
                "run": {"name": "memory", "steps": 100},
                "tasks": {"trim": {"source": "words", "dataset": "trim"}},
                "policies": {name: own | {"turns": turns} for name in names},
            }
            config = by_device(RunConfig.model_validate(tables)).config
            plan = build_plan(config, Path("runs/memory"), gpus=["0"])
            found.append(memory_plan(config, plan))
    table = [["on the GPU", "side by side", "in turns"]]
    on_gpu = [[need for need in needs if need.device] for needs in found]
    for apart, turn in zip(*on_gpu, strict=True):
        table.append([apart.spec.name, *(f"{one.device.mib / 1024:.1f}" for one in (apart, turn) if one.device)])
    at_once = [gpu_memory(needs)["0"] / 1024 for needs in found]
    table.append(["at once, of 74.5", *(f"{gib:.1f}" if gib < 80e9 / GIB else f"({gib:.1f})" for gib in at_once)])
    table.append(["main memory", *(f"{sum(need.host_mib for need in needs) / 1024:.1f}" for needs in found)])
    return table


TABLES = {"long": long_table, "sizes": sizes_table, "turns": turns_table}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=list(TABLES), help="table to make; by default both")
    chosen = parser.parse_args().table
    for name in [chosen] if chosen else list(TABLES):
        head, *rows = TABLES[name]()
        words = sum(not one.isdigit() for one in head)
        print(
            "\n".join(
                f"| {' | '.join(row)} |" for row in (head, ["---"] * words + ["--:"] * (len(head) - words), *rows)
            )
        )
        print(json.dumps({"table": name, "rows": [head, *rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
