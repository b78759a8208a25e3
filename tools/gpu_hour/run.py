"""A whole run of two policies in the shapes of released models, as `mrl train` makes it: check, steps, resume, export.

Random weights and the real vocabularies of two families: the shape of Qwen3-1.7B with adapters beside all weights of
the shape of SmolLM2-360M, with the number formats and kernels that the device gets by default. Random weights know
nothing; so a verifier that calls an answer right by its letters alone gives both right and wrong answers to share.
"""

import importlib.util
import json
import lzma
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from threading import Event, Thread
from typing import Any

import tomli_w
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from gpu_hour.bench import Bench, SkippedError
from gpu_hour.carry import FOLDER, PACKED, VOCABULARIES
from gpu_hour.shapes import COMMON, RELEASED
from mrl import parent_death
from mrl.config.load import load_config
from mrl.memory_plan.needs import MIB
from mrl.memory_plan.run_memory import memory_plan
from mrl.metrics.jsonl import each_metrics
from mrl.processes.planning.plan import planned

SHAPES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen": (Qwen3Config, COMMON | RELEASED["1.7B"] | {"tie_word_embeddings": True}),
    "smol": (
        LlamaConfig,
        {
            "vocab_size": 131072,
            "hidden_size": 960,
            "intermediate_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 15,
            "num_key_value_heads": 5,
            "head_dim": 64,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""Sizes on a CPU, in place of the shapes' own."""
SOURCES = ("dashscope", "mistral_common")
"""Packages with the vocabularies of both policies."""
STEPS, RESUMED_STEPS = 4, 5
POLL_S = 0.2
ROLLOUT = {"group_size": 8, "max_new_tokens": 256, "answers_at_once": 64}
VERIFIER = '''"""Right by its letters alone, for one answer in four."""

import zlib


def judge(reference: str, answer: str) -> float:
    """1.0 or 0.0, the same for the same answer."""
    return float(zlib.crc32(answer.encode()) % 4 == 0)
'''
LEARNER = {
    "time/step_s": ("a step", "s"),
    "time/wait_for_groups_s": ("waiting for groups", "s"),
    "time/train_s": ("training", "s"),
    "time/publish_s": ("publishing", "s"),
    "rate/trained_tokens_s": ("trained tokens", "tokens/s"),
    "memory/learner_peak_mib": ("peak memory", "MiB"),
    "mismatch/k3_nats": ("learner against engine", "nats"),
    "reward/mean": ("reward", "reward"),
}
WORKER = {
    "rate/rollout_tokens_s": ("sampled tokens", "tokens/s"),
    "weights/update_s": ("taking new weights", "s"),
    "weights/canary_mean_abs_nats": ("canary", "nats"),
    "weights/canary_noise_nats": ("rounding alone", "nats"),
    "weights/compared_share": ("bytes compared", "share"),
    "weights/refused": ("updates refused", "updates"),
}


def run_parts() -> dict[str, Callable[[Bench], None]]:
    """The stage's only part: each of its steps needs the one before."""
    return {"two policies": measure_run}


def measure_run(bench: Bench) -> None:
    """Run `mrl check`, `train`, `train --resume` and `export` on two policies, and write their figures.

    Raises SkippedError without the vocabularies, RuntimeError for a command that fails.
    """
    vocabularies(bench.scratch / "models" / "vocabularies")
    import real_sizes  # needs packages that make vocabularies

    began_s = time.monotonic()
    for name, (family, shape) in SHAPES.items():
        real_sizes.MODELS[name] = (family(**shape | bench.of({}, SMALL)), *real_sizes.MODELS[name][1:])
        real_sizes.make_model(name, bench.scratch / "models", bench.device)
    bench.tell("making the models", time.monotonic() - began_s, "s")
    config = write_config(bench, tomllib.loads(real_sizes.CONFIG.read_text()))
    _mrl(bench, "check", str(config))
    loaded = load_config(config, [])
    run = bench.scratch / "run"
    with DevicePeak(bench) as peak:
        began_s = time.monotonic()
        _mrl(bench, "train", str(config), f"--run.steps={STEPS}")
        bench.tell("mrl train", time.monotonic() - began_s, "s", steps=STEPS)
    planned_mib = {need.spec.name: need.device.mib for need in memory_plan(loaded, planned(loaded)) if need.device}
    if planned_mib:
        bench.tell(
            "peak of the device", peak.mib, "MiB", planned_mib=sum(planned_mib.values()), planned_parts_mib=planned_mib
        )
    records = list(each_metrics(run / "metrics.jsonl"))
    for name in SHAPES:
        _tell(bench, name, [one["values"] for one in records if _is_of(one, f"learner/{name}")], LEARNER)
        _tell(bench, name, [one["values"] for one in records if _is_of(one, f"worker/{name}/0")], WORKER)
    began_s = time.monotonic()
    _mrl(bench, "train", str(config), "--resume", f"--run.steps={RESUMED_STEPS}")
    bench.tell("mrl train --resume", time.monotonic() - began_s, "s", steps=RESUMED_STEPS - STEPS)
    for name in SHAPES:
        target = bench.scratch / f"exported-{name}"
        _mrl(bench, "export", str(run), "--policy", name, "--to", str(target))
        bench.tell(f"{name}: exported and loaded", real_sizes.loads(target), "parameters")


def write_config(bench: Bench, tables: dict[str, Any]) -> Path:
    """Write the configuration of `real_sizes` with the tasks, models and sizes of this stage in place of its own."""
    (bench.scratch / "letters.py").write_text(VERIFIER)
    data = bench.scratch / "numbers.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Write about {n}.", "reference": ""}) + "\n" for n in range(160)))
    tables["run"] |= {"name": "run", "folder": str(bench.scratch)}
    tables["tasks"] = {"letters": {"source": "jsonl", "dataset": str(data), "verifier": "letters:judge"}}
    tables["allocation"] = {"slots": bench.of(128, 32), "floor_slots": bench.of(64, 16)}
    for name, policy in tables["policies"].items():
        del policy["source"]
        policy |= {"model": str(bench.scratch / "models" / name), "device": bench.device}
        policy["rollout"] |= bench.of(ROLLOUT, {"max_new_tokens": 8})
        policy["learner"] |= {"prompts_per_step": bench.of(8, 2)}
        for key in bench.of(("microbatch_tokens", "precision"), ()):
            policy["learner"].pop(key, None)  # the device's defaults take their place
    path = bench.scratch / "run.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


def vocabularies(root: Path) -> None:
    """Unpack carried vocabularies to the folder of which models are made. Raises SkippedError where none can be had."""
    for packed in sorted((FOLDER / VOCABULARIES).glob(f"*{PACKED}")):
        target = root / packed.name.removesuffix(PACKED)
        target.mkdir(parents=True)
        (target / "tokenizer.json").write_bytes(lzma.decompress(packed.read_bytes()))
    missing = [name for name in SOURCES if importlib.util.find_spec(name) is None]
    if missing and not root.exists():
        raise SkippedError(f"no vocabularies were carried, and {missing[0]}, which has one, is not there")


class DevicePeak:
    """Highest memory of the GPU in use at once while this is open, beyond that in use before, in MiB; 0 on a CPU."""

    def __init__(self, bench: Bench) -> None:
        self.mib = 0.0
        self._ends = Event()
        self._thread = Thread(target=self._watch, daemon=True) if bench.device == "cuda" else None

    def __enter__(self) -> "DevicePeak":
        if self._thread:
            self._free_before = torch.cuda.mem_get_info()[0]
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        if self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while not self._ends.wait(POLL_S):
            self.mib = max(self.mib, (self._free_before - torch.cuda.mem_get_info()[0]) / MIB)


def _is_of(record: dict[str, Any], role: str) -> bool:
    return record["role"] == role and "values" in record


def _tell(bench: Bench, policy: str, values: list[dict[str, float]], names: dict[str, tuple[str, str]]) -> None:
    """Write each metric's mean, with its smallest and largest. Raises RuntimeError where one was never reported."""
    for metric, (name, unit) in names.items():
        found = [one[metric] for one in values if metric in one]
        if not found:
            raise RuntimeError(f"{policy} reported no {metric}")
        bench.tell(f"{policy}: {name}", fmean(found), unit, least=min(found), most=max(found), reports=len(found))


def _mrl(bench: Bench, *words: str) -> None:
    """Run a command of mrl, which ends with the stage's time, and log its output. Raises RuntimeError if it fails."""
    argv = parent_death.command(os.getpid(), (sys.executable, "-m", "mrl", *words))
    done = subprocess.run(argv, timeout=max(1.0, bench.left_s - 10.0), check=False, cwd=bench.scratch)
    if done.returncode:
        raise RuntimeError(f"mrl {words[0]} ended with {done.returncode}; see {bench.stage}.log")
