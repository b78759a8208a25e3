"""Check of the memory plan, for those who rely on `mrl check`: predicted beside measured peak memory of real runs.

One run of `mrl train` takes a few steps with a policy per shape: whole and in float32; in shards on two ranks, held to
a reference; in bfloat16 with activation checkpointing and a large vocabulary; with moments in bfloat16; adapters alone;
a mixture of experts, whole and in shards; and one with many passes. Weights are random, so that answers go on to their
limit, as the plan assumes. Peaks are the high-water marks of resident memory that the kernel keeps of every process
(VmHWM).

    .venv/bin/python tools/check_memory_plan.py [--shapes NAME,NAME] [--folder FOLDER]
    .venv/bin/python tools/check_memory_plan.py --fake [--ranks N,N]

With `--fake` no process is started: the first of 8, 16 and 64 ranks trains models of 32B and 70B without data, in this
process (`fake_ranks`). Its memory is compared with the plan, and its traffic says which network is needed.

Prints tables; the last line is JSON; exit code 1 when a prediction is off by more than 15 %, or 10 % with `--fake`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from mrl.config.load import load_config
from mrl.config.policy_tables import MakeTable
from mrl.config.schema import RunConfig
from mrl.memory_plan.needs import MIB, Need
from mrl.memory_plan.run_memory import memory_plan
from mrl.processes.planning.plan import build_plan

BOUND = 1.15
POLL_S = 0.1
TIMEOUT_S = 1800.0
STEPS = 3
TRAINS = {"entropy_coefficient": 0.001}
"""Objective keys: random answers all fail, and rows without an advantage are trained on only for a regularizer."""


@dataclass(frozen=True)
class Shape:
    """A policy's recipe, the vocabulary of its model (its tokenizer has less), and keys of its tables."""

    recipe: dict[str, Any]
    vocab_size: int
    tables: dict[str, Any]


SHAPES = {
    "whole": Shape(
        {"architecture": "qwen3", "hidden_size": 512, "num_layers": 8, "num_heads": 8},
        8192,
        {
            "rollout": {"group_size": 4, "max_new_tokens": 48, "answers_at_once": 32},
            "learner": {"prompts_per_step": 8, "microbatch_tokens": 4096},
            "objective": TRAINS,
        },
    ),
    "shards": Shape(
        {"architecture": "llama", "hidden_size": 512, "num_layers": 10, "num_heads": 8},
        8192,
        {
            "rollout": {"group_size": 4, "max_new_tokens": 48, "answers_at_once": 32},
            "learner": {"prompts_per_step": 8, "microbatch_tokens": 1024, "processes": 2, "sharding": "shard"},
            "objective": {"kl_coefficient": 0.01},
        },
    ),
    "bf16": Shape(
        {"architecture": "gemma3", "hidden_size": 384, "num_layers": 8, "num_heads": 6},
        32768,
        {
            "rollout": {"group_size": 4, "max_new_tokens": 48, "answers_at_once": 32},
            "learner": {"prompts_per_step": 8, "precision": "bfloat16", "activation_checkpointing": True},
            "objective": TRAINS,
        },
    ),
    "moments": Shape(
        {"architecture": "llama", "hidden_size": 768, "num_layers": 10, "num_heads": 12},
        8192,
        {
            "rollout": {"group_size": 4, "max_new_tokens": 48, "answers_at_once": 32},
            "learner": {
                "prompts_per_step": 8,
                "microbatch_tokens": 512,
                "checkpoint_every": 1,
                "optimizer_dtype": "bfloat16",
            },
            "objective": TRAINS,
        },
    ),
    "lora": Shape(
        {"architecture": "qwen3", "hidden_size": 640, "num_layers": 6, "num_heads": 10},
        8192,
        {
            "rollout": {"group_size": 4, "max_new_tokens": 48, "answers_at_once": 32},
            "learner": {"prompts_per_step": 8, "microbatch_tokens": 2048, "lora": {"rank": 16}},
            "objective": {"kl_coefficient": 0.01},
        },
    ),
    "experts": Shape(
        {"architecture": "qwen3_moe", "hidden_size": 384, "num_layers": 8, "num_heads": 6},
        8192,
        {
            "rollout": {"group_size": 4, "max_new_tokens": 48, "answers_at_once": 32},
            "learner": {"prompts_per_step": 8, "microbatch_tokens": 2048},
            "objective": TRAINS,
        },
    ),
    "expert_shards": Shape(
        {"architecture": "qwen3_moe", "hidden_size": 384, "num_layers": 8, "num_heads": 6},
        8192,
        {
            "rollout": {"group_size": 4, "max_new_tokens": 48, "answers_at_once": 32},
            "learner": {"prompts_per_step": 8, "microbatch_tokens": 1024, "processes": 2, "sharding": "shard"},
            "objective": TRAINS,
        },
    ),
    "passes": Shape(
        {"architecture": "llama", "hidden_size": 768, "num_layers": 6, "num_heads": 12},
        4096,
        {
            "rollout": {"group_size": 8, "max_new_tokens": 64, "answers_at_once": 32},
            "learner": {"prompts_per_step": 4, "microbatch_tokens": 512, "minibatches": 2, "checkpoint_every": 1},
            "objective": TRAINS,
        },
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES), help="names of shapes, separated by commas")
    parser.add_argument("--folder", type=Path, help="folder where the run is left; by default it is removed")
    parser.add_argument("--fake", action="store_true", help="ranks without data, of models of 32B and 70B")
    parser.add_argument("--ranks", default="8,16,64", help="numbers of such ranks, separated by commas")
    arguments = parser.parse_args()
    if arguments.fake:
        return compare_without_data([int(ranks) for ranks in arguments.ranks.split(",")])
    with tempfile.TemporaryDirectory() as temporary:
        rows = compare(arguments.folder or Path(temporary), arguments.shapes.split(","))
    print("| process | predicted MiB | measured MiB | predicted / measured | at its peak |\n|---|--:|--:|--:|---|")
    for row in rows:
        print("| {name} | {predicted_mib:.0f} | {value:.0f} | {share:.2f} | {peak} |".format(**row))
    print(json.dumps({"bench": "memory_plan", "rows": rows}))
    return 0 if all(row["ok"] for row in rows) else 1


def compare_without_data(ranks: list[int]) -> int:
    """Compare all layouts of these numbers of ranks; return the exit code."""
    from bench_row import end
    from fake_ranks.comparison import HEADS, compare
    from fake_ranks.layouts import LAYOUTS

    compared = []
    for layout in (one for one in LAYOUTS if one.ranks in ranks):
        began_s = time.monotonic()
        compared.append(compare(layout))
        print(f"{layout.name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    for head, lines in zip(HEADS, zip(*(one.cells() for one in compared), strict=True), strict=True):
        print("\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] + ["--:"] * (len(head) - 1), *lines)))
        print()
    rows = [row for one in compared for row in one.rows()]
    return end("memory_plan_without_data", rows)


def compare(folder: Path, names: list[str]) -> list[dict[str, Any]]:
    """Run the named shapes in `folder`; return a row for each learner rank and worker."""
    path = write_run(folder, {name: SHAPES[name] for name in names})
    told = predicted(load_config(path, []))
    argv = (sys.executable, "-m", "mrl", "train", "--clean", str(path))
    measured = run_and_watch(argv, path.with_suffix(".log"), bound_s=TIMEOUT_S)
    rows = []
    for name, (predicted_mib, peak) in told.items():
        share = predicted_mib / measured[name]
        row = {
            "name": name,
            "value": measured[name],
            "unit": "MiB",
            "against": "prediction",
            "ratio": max(share, 1 / share),
        }
        rows.append(
            row
            | {
                "required": BOUND,
                "ok": max(share, 1 / share) <= BOUND,
                "predicted_mib": predicted_mib,
                "share": share,
                "peak": peak,
            }
        )
    return rows


def predicted(config: RunConfig) -> dict[str, tuple[float, str]]:
    """Return process -> planned MiB and their parts; further ranks of a learner have names of their own."""
    found: dict[str, tuple[float, str]] = {}
    for need in memory_plan(config, build_plan(config, Path("/nowhere"))):
        if need.spec.role in ("learner", "worker"):
            found[need.spec.name] = _told(need.host)
            found |= {f"{need.spec.name}/rank{rank}": _told(need.other or need.host) for rank in range(1, need.count)}
    return found


def _told(need: Need) -> tuple[float, str]:
    parts = ", ".join(f"{part} {size / MIB:.0f}" for part, size in need.parts.items())
    return need.mib, f"{need.moment}: {parts}"


def run_and_watch(argv: Sequence[str], log: Path, *, bound_s: float) -> dict[str, float]:
    """Run a command of mrl; return process -> largest resident memory in MiB. Raises RuntimeError where it fails."""
    measured: dict[str, float] = {}
    with log.open("wb") as file:
        run = subprocess.Popen(argv, stdout=file, stderr=file)
        deadline_s = time.monotonic() + bound_s
        while run.poll() is None and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            measured |= high_water_marks(run.pid)
        run.terminate()
        code = run.wait(timeout=60)
    if code:
        raise RuntimeError(f"the run failed: {log.read_text(errors='replace')[-2000:]}")
    return measured


def high_water_marks(pid: int) -> dict[str, float]:
    """Return process -> peak MiB of all roles below a process, by the names that they give themselves."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True) if psutil.pid_exists(pid) else ():
        try:
            title = process.cmdline()[0]
            status = Path(f"/proc/{process.pid}/status").read_text()
        except (psutil.Error, OSError, IndexError):
            continue
        if title.startswith("mrl::") and "VmHWM:" in status:
            found[title.removeprefix("mrl::")] = int(status.split("VmHWM:")[1].split()[0]) / 1024
    return found


def write_run(folder: Path, shapes: dict[str, Shape]) -> Path:
    """Write folders of models with random weights, and a configuration of a run with all of them; return its file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, shape in shapes.items():
        save_model(folder / name, shape)
    policies = {name: {"model": str(folder / name)} | shape.tables for name, shape in shapes.items()}
    run = {
        "run": {"name": "memory", "folder": str(folder / "runs"), "steps": STEPS},
        "pool": {"train_prompts": 64, "held_out_prompts": 8},
        "tasks": {"capital": {"source": "words", "dataset": "capital"}},
        "policies": policies,
        "evaluation": {"every": 0},
        "supervision": {"silence_s": 600.0, "start_s": 900.0},
    }
    path = folder / "memory.toml"
    path.write_text(tomli_w.dumps(run))
    return path


def save_model(folder: Path, shape: Shape) -> None:
    """Write a Hugging Face folder of a model with random weights."""
    from mrl.models.architectures import init_model
    from mrl.models.tokenizers import train_byte_level

    text = "What is one and two? <answer>three</answer> The quick brown fox jumps over the lazy dog 0123456789."
    tokenizer = train_byte_level([text] * 3, 400)
    recipe = MakeTable.model_validate({"tokenizer": "byte_level"} | shape.recipe)
    model = init_model(
        recipe, vocab_size=shape.vocab_size, eos_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
