"""Prints the tables of docs/learner.md that say what fits where, from the memory plan alone.

`long` is one rank's part of an 8B model with an episode of 131,072 tokens; `sizes` are models of three sizes on so many
GPUs. No weights are read and nothing is trained: shapes are those of released models, passes are traced without data.

    .venv/bin/python tools/memory_tables.py [long|sizes]

Cells are GiB on each GPU, and behind a plus what lies in locked main memory in its stead. What is more than a GPU of
80 GB has is in brackets.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

from gpu_hour.shapes import config_of
from transformers import LlamaConfig, PreTrainedConfig

from mrl.config.defaults import by_device
from mrl.config.policy_tables import LearnerTable
from mrl.config.schema import RunConfig
from mrl.memory_plan.needs import on_gpu_with
from mrl.memory_plan.policy_memory import PolicyMemory

GIB = 1024**3
LEAN = {"sharding": "shard", "precision": "bfloat16", "activation_checkpointing": True}
SMALL, OFFLOAD, HOST = {"optimizer_dtype": "bfloat16"}, {"activation_offload": True}, {"optimizer_memory": "host"}
OPTIONS: dict[str, dict[str, Any]] = {
    "no other option": {},
    "`optimizer_dtype`": SMALL,
    "`optimizer_dtype`, `activation_offload`": SMALL | OFFLOAD,
    '`optimizer_memory = "host"`, `activation_offload`': HOST | OFFLOAD,
    "`optimizer_dtype`, both on the host": SMALL | OFFLOAD | HOST,
}
"""In the tables' words."""
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
}
"""Of Qwen3 8B and 32B, and of Llama 3 70B."""
GPUS, GPUS_PER_HOST = (8, 16, 32, 64), 8
LONG_TOKENS, TOKENS = 131072, 16384


@dataclass(frozen=True)
class Cell:
    """What a rank that reads no model needs."""

    device_gib: float
    activations_gib: float
    locked_gib: float

    def __str__(self) -> str:
        told = f"{self.device_gib:.1f}" + (f" + {self.locked_gib:.1f}" if self.locked_gib else "")
        return told if self.device_gib < 80e9 / GIB else f"({told})"


def long_table() -> list[list[str]]:
    """Rows with what the first one says of columns."""
    sharing = (1, 2, 4, 8)
    table = [["8 GPUs in shards, `context_parallel`", *map(str, sharing)]]
    for name, keys in (("", {}), (" with `activation_offload`", OFFLOAD)):
        long = LEAN | keys | {"processes": 8, "microbatch_tokens": LONG_TOKENS + 1}
        cells = [cell("8B", long | {"context_parallel": number}, LONG_TOKENS) for number in sharing]
        table.append([f"peak of a rank{name}", *map(str, cells)])
        table.append(["of it activations", *(f"{one.activations_gib:.1f}" for one in cells)])
    return table


def sizes_table(shapes: Sequence[str] = tuple(SHAPES)) -> list[list[str]]:
    """Rows with what the first one says of columns."""
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
    """One rank of a learner with such a table on GPUs, as `mrl check` plans it, whose rows are of full length."""
    memory = policy_memory(shape, answer_tokens)
    table = LearnerTable.model_validate(memory.table.learner.model_dump(exclude_unset=True) | keys)
    host, tensors = memory.ranks(table)[1]
    device = on_gpu_with(tensors)
    locked = host.parts.get("optimizer", 0.0) + host.parts.get("offloaded inputs", 0.0)
    return Cell(device.mib / 1024, device.parts.get("activations", 0.0) / GIB, locked / GIB)


@cache
def policy_memory(shape: str, answer_tokens: int) -> PolicyMemory:
    """What the plan knows of a policy with such a model, of which config.json alone is there."""
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


TABLES = {"long": long_table, "sizes": sizes_table}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=list(TABLES), help="both by default")
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
