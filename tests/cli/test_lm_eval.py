"""lm-eval, the real package, finds the same answers right in an exported folder as `mrl eval` does, greedily.

It has many dependencies of its own, and so an environment of its own: `MRL_LM_EVAL_PYTHON` names its interpreter, in
which `pip install "lm-eval[hf]"` was done.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrl.cli.main import main
from mrl.config.load import validate
from mrl.config.run_folder import create_run_folder
from mrl.models.probe import save_probe
from mrl.tasks.pool import prompt_id_of
from tests.support.evaluated_run import checkpoint

PYTHON = os.environ.get("MRL_LM_EVAL_PYTHON", "")
NUM_PROMPTS, MAX_NEW_TOKENS = 24, 8
TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}\\n"
doc_to_target: "{{{{reference}}}}"
generation_kwargs: {{until: [], do_sample: false, max_gen_toks: {tokens}}}
process_results: !function {folder}/judging.right
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
JUDGING = 'def right(doc, results):\n    return {"acc": float(results[0].strip() == doc["reference"])}\n'


def greedy(folder: Path, prompt: str) -> str:
    """What transformers itself says."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    ids = tokenizer(prompt + "\n", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        answer = model.generate(ids, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(answer, skip_special_tokens=True).strip()


@pytest.fixture
def exported(tmp_path, monkeypatch, capsys) -> Path:
    """A folder that `mrl export` wrote, beside the prompts: every other reference is what that policy says."""
    monkeypatch.chdir(tmp_path)
    save_probe(tmp_path / "qwen", seed=5)
    data = {"source": "jsonl", "dataset": "train.jsonl", "options": {"held_out": "held_out.jsonl"}}
    tables = {
        "run": {"name": "r", "steps": 9, "folder": "runs"},
        "tasks": {"sums": data},
        "pool": {"train_prompts": 1, "held_out_prompts": 0},
        "policies": {"qwen": {"model": str(tmp_path / "qwen"), "rollout": {"max_new_tokens": MAX_NEW_TOKENS}}},
    }
    run = create_run_folder(validate(tables, where="test"))
    checkpoint(run, "qwen", tmp_path / "qwen", 8)
    assert main(["export", "runs/r", "--policy", "qwen"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    prompts = [f"{number} fox and {number * 7 % 10}" for number in range(NUM_PROMPTS)]
    rows = [
        {"prompt": prompt, "reference": greedy(folder, prompt) if place % 2 else "the lazy dog"}
        for place, prompt in enumerate(prompts)
    ]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "another", "reference": "1"}) + "\n")
    return folder


def by_lm_eval(exported: Path, place: Path) -> dict[str, bool]:
    """Prompt -> whether its answer is right, as the package logs it."""
    (place / "judging.py").write_text(JUDGING)
    text = TASK.format(data=place / "held_out.jsonl", tokens=MAX_NEW_TOKENS, folder=place)
    (place / "sums.yaml").write_text(text)
    words = ["-m", "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={exported},dtype=float32"]
    words += [
        "--device",
        "cpu",
        "--tasks",
        str(place / "sums.yaml"),
        "--log_samples",
        "--output_path",
        str(place / "out"),
    ]
    done = subprocess.run(
        [PYTHON, *words], cwd=place, capture_output=True, text=True, timeout=500, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(place / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (logged,) = (place / "out").rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in logged.read_text().splitlines()]
    return {sample["doc"]["prompt"]: bool(sample["acc"]) for sample in samples}


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="MRL_LM_EVAL_PYTHON names no environment with lm-eval")
def test_lm_eval_finds_the_same_answers_right(exported, tmp_path, capsys):
    """Prompt by prompt, and so the accuracy."""
    words = ["--config", "runs/r", "--temperature", "0", "--out", "result.json"]
    assert main(["eval", str(exported), *words]) == 0
    ((_, policy),) = json.loads(Path("result.json").read_text())["policies"].items()
    own = {one["prompt_id"]: bool(one["right"]) for one in policy["result"]["prompts"]}

    theirs = {prompt_id_of("sums", prompt): right for prompt, right in by_lm_eval(exported, tmp_path).items()}

    assert len(own) == NUM_PROMPTS
    assert own == theirs
    assert policy["result"]["accuracy"] == sum(theirs.values()) / NUM_PROMPTS >= 0.5
