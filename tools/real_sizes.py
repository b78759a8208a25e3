#!/usr/bin/env python3
"""A whole run of two policies of released shapes on a CPU, for those who plan one: check, train, export, resume.

    .venv/bin/python tools/real_sizes.py [--folder FOLDER] [--busy N] [--make-only]

qwen    the shape of Qwen2.5-0.5B and its vocabulary (494 M parameters), adapters, bfloat16
smol    the shape of SmolLM2-135M with Mistral's vocabulary (182 M parameters), all weights, float32

Weights are random, with logits as wide as those of trained models; tokenizers are the real ones. The folders look like
those of a hub: sharded safetensors in bfloat16, a chat template, several EOS ids, a head that is the embedding.
`--busy` runs so many processes beside the run that do nothing but compute. The run is `configs/real_sizes.toml`.

Prints the peak memory of every process, over the run and its resume, beside the plan of `mrl check`; the last line is
JSON; exit code 1 when a step of the way failed, or a process took over 15 % more than planned, or less than two thirds
of the plan. Takes 14 minutes on 2 cores, 17 GiB of memory, 8 GB of disk.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

sys.path.insert(0, str(Path(__file__).parent))
import real_vocabularies
from check_memory_plan import predicted, run_and_watch

from mrl.config.load import load_config
from mrl.metrics.jsonl import each_metrics
from mrl.parent_death import command

CONFIG = Path(__file__).parents[1] / "configs" / "real_sizes.toml"
STEPS, RESUMED_STEPS = 3, 4
RUN_BOUND_S = 3600.0
"""Seconds after which a run counts as hanging: a slow one takes a quarter of that."""
LOGIT_STD = 2.5
END_LOGIT_STD = 7.5
"""Standard deviation of the logits of tokens that end an answer, which random weights would hardly ever sample."""
MOST_NEEDED = 1.15
"""Largest measured memory, as a multiple of the planned one."""
MOST_PLANNED = 1.5
"""Largest planned memory, as a multiple of the measured one: a plan may set aside that much in vain."""
SHARD = "300MB"

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INSTRUCT = (
    "<s>{% for message in messages %}{% if message['role'] == 'user' %}[INST]{{ message['content'] }}[/INST]"
    "{% else %}{{ message['content'] }}</s>{% endif %}{% endfor %}"
)
QWEN = Qwen2Config(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=32768,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    tie_word_embeddings=True,
)
SMOL = LlamaConfig(
    vocab_size=131072,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    tie_word_embeddings=True,
)
MODELS: dict[str, tuple[PreTrainedConfig, str, str, list[str]]] = {
    "qwen": (QWEN, "qwen", CHATML, ["<|im_end|>", "<|endoftext|>"]),
    "smol": (SMOL, "tekken", INSTRUCT, ["</s>", "<unk>"]),
}
"""Policy -> shape, vocabulary, chat template, tokens that end an answer."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="folder where models and run are left; by default they are removed")
    parser.add_argument("--busy", type=int, default=0, help="processes beside the run that only compute")
    parser.add_argument("--make-only", action="store_true", help="make the model folders and end")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        words = overrides(folder)
        if arguments.make_only:
            return 0
        with busy(arguments.busy):
            rows = go_through(folder, words)
    print("| process or step | `mrl check` | measured | unit |\n|---|--:|--:|---|")
    for row in rows:
        print(f"| {row['name']} | {row.get('predicted_mib', 0):.0f} | {row['value']:.0f} | {row['unit']} |")
    print(json.dumps({"bench": "real_sizes", "rows": rows}))
    return 0 if all(row["ok"] for row in rows) else 1


def overrides(folder: Path) -> list[str]:
    """Return words of a command line that put models and run below `folder`; make models that are missing."""
    words = ["--run.folder", str(folder / "runs")]
    for name in MODELS:
        words += [f"--policies.{name}.model", str(make_model(name, folder / "models"))]
    return words


def make_model(name: str, root: Path, device: str = "cpu") -> Path:
    """Make the Hugging Face folder `root/name` unless it exists; its weights are drawn on a device."""
    folder = root / name
    if folder.exists():
        return folder
    config, vocabulary, template, ends = MODELS[name]
    making = root / f".{name}"
    source = real_vocabularies.make_folder(vocabulary, root / "vocabularies")
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    width = math.sqrt(config.hidden_size) * config.initializer_range
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    with torch.no_grad():
        model.model.norm.weight.fill_(LOGIT_STD / width)
        model.get_input_embeddings().weight[[ids[end] for end in ends]] *= END_LOGIT_STD / LOGIT_STD
    model.save_pretrained(making, max_shard_size=SHARD)
    (making / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ends[0], "chat_template": template}
    (making / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    (making / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[end] for end in ends]}))
    making.rename(folder)
    return folder


def go_through(folder: Path, words: list[str]) -> list[dict[str, Any]]:
    """Go through the run; return a row per process, measured against its plan, and one per step of the way."""
    print(mrl("check", str(CONFIG), *words), flush=True)
    told = predicted(load_config(CONFIG, words))
    started_s = time.monotonic()
    measured = watch(folder / "train.log", "train", str(CONFIG), "--clean", *words, "--run.steps", str(STEPS))
    rows = [_row("train", time.monotonic() - started_s, "s", ok=True)]
    run = folder / "runs" / load_config(CONFIG, words).run.name
    rows += [_row(f"evaluations of {name}", found, "", ok=found >= 2) for name, found in evaluations(run).items()]
    for name in MODELS:
        target = folder / f"exported-{name}"
        shutil.rmtree(target, ignore_errors=True)  # an earlier call may have left one
        exported = Path(mrl("export", str(run), "--policy", name, "--to", str(target)).strip())
        rows.append(_row(f"export of {name}", loads(exported), "parameters", ok=True))
    again = watch(folder / "resume.log", "train", str(CONFIG), "--resume", *words, "--run.steps", str(RESUMED_STEPS))
    rows += [_memory_row(name, told[name][0], max(measured[name], again[name])) for name in told]
    steps = {name: last_step(run, name) for name in MODELS}
    return rows + [_row(f"resume of {name}", step, "steps", ok=step == RESUMED_STEPS) for name, step in steps.items()]


def mrl(*words: str) -> str:
    """Run a command of mrl and return its output. Raises RuntimeError when it fails."""
    done = subprocess.run([sys.executable, "-m", "mrl", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"mrl {words[0]} failed: {done.stderr}")
    return done.stdout


def watch(log: Path, *words: str) -> dict[str, float]:
    """Run a command of mrl; return process -> peak resident memory in MiB. Raises RuntimeError if it fails or hangs."""
    argv = command(os.getpid(), (sys.executable, "-m", "mrl", *words))
    measured = run_and_watch(argv, log, bound_s=RUN_BOUND_S)
    print(log.read_text(errors="replace"), flush=True)
    return measured


def evaluations(run: Path) -> dict[str, int]:
    """Return policy -> number of versions with a held-out accuracy."""
    lines = list(each_metrics(run / "metrics.jsonl"))
    steps = {(line["policy"], line["step"]) for line in lines if "eval/accuracy" in line.get("values", ())}
    return {name: sum(policy == name for policy, _ in steps) for name in MODELS}


def last_step(run: Path, policy: str) -> int:
    """Return the newest step with a checkpoint."""
    return max(int(path.name.removeprefix("step_")) for path in (run / "checkpoints" / policy).glob("step_*"))


def loads(folder: Path) -> int:
    """Load a folder by transformers; return its number of parameters."""
    return sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).parameters())


@contextmanager
def busy(how_many: int) -> Iterator[None]:
    """Run processes that only compute, until the end of the block."""
    argv = command(os.getpid(), (sys.executable, "-c", "while True: pass"))
    loops = [subprocess.Popen(argv) for _ in range(how_many)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _memory_row(name: str, predicted_mib: float, measured_mib: float) -> dict[str, Any]:
    share = measured_mib / predicted_mib
    row = _row(name, measured_mib, "MiB", ok=1 / MOST_PLANNED <= share <= MOST_NEEDED)
    required = f"{1 / MOST_PLANNED:.2f} to {MOST_NEEDED:g}"
    return row | {"against": "mrl check", "ratio": share, "required": required, "predicted_mib": predicted_mib}


def _row(name: str, value: float, unit: str, *, ok: bool) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "ok": ok}


if __name__ == "__main__":
    sys.exit(main())
