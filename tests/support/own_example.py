"""The README's example of own models and prompts: its files, with small models in place of released ones."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mrl.models.tokenizers import train_byte_level
from tests.support.pages import README, blocks

SECTION = "## Your own models and prompts"


def example() -> dict[str, str]:
    """Return the example: file name -> its text; "commands" holds the calls of `mrl`."""
    text = README.read_text(encoding="utf-8").split(SECTION, 1)[1].split("\n## ", 1)[0]
    rows, commands = blocks(text, "")
    (config,), (verifier,) = blocks(text, "toml"), blocks(text, "python")
    return {"mine.toml": config, "my_verifier.py": verifier, "problems.jsonl": rows, "commands": commands}


def write_example(folder: Path, make_model: Callable[..., Any]) -> dict[str, str]:
    """Write the example into `folder`, with more prompts and with models that `make_model` makes; return it."""
    shown = example()
    row = json.loads(shown["problems.jsonl"])
    rows = [{"prompt": row["prompt"].replace("20", str(n)), "reference": str(n + 31)} for n in range(20, 100)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("mine.toml", "my_verifier.py"):
        (folder / name).write_text(shown[name])
    for seed, policy in enumerate(tomllib.loads(shown["mine.toml"])["policies"].values()):
        tokenizer = train_byte_level([row["prompt"] for row in rows], 300)
        model = make_model("llama" if seed else "qwen3", seed=seed, vocab_size=len(tokenizer))
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(folder / policy["model"])
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
        tokenizer.save_pretrained(folder / policy["model"])
    return shown
