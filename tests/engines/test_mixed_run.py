"""One run in which three policies roll out on three engines, the real servers, by the command that a person types."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mrl.metrics.jsonl import each_metrics

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
STEPS = 2
POLICIES = ("qwen", "llama", "gemma")
FILES, BROADCAST = ["--policies.{}.rollout.weights", "files"], ["--policies.{}.rollout.weights", "broadcast"]
ADAPTERS = ["--policies.{}.rollout.weights", "adapters"]
LORA = ["--policies.{}.learner.lora.rank", "4"]
RUNS = {
    "broadcast": dict.fromkeys(POLICIES, BROADCAST),
    "adapters": {"qwen": ADAPTERS + LORA, "llama": FILES + LORA, "gemma": ADAPTERS + LORA},
}
"""How new weights come to each policy's engine; in the second run all learn adapters, which SGLang gets merged."""
COUNTED_AS = {"broadcast": "weights/by_broadcast", "adapters": "weights/by_adapters", "files": "weights/by_files"}


def small(folder: Path) -> list[str]:
    """What makes the run short: policies that have learnt next to nothing, few held-out prompts."""
    words = ["--run.folder", str(folder), "--run.name", "mixed", "--run.steps", str(STEPS)]
    words += ["--pool.train_prompts", "64", "--pool.held_out_prompts", "8"]
    for policy in POLICIES:
        words += [f"--policies.{policy}.make.warm_start_steps", "4"]
        words += [f"--policies.{policy}.rollout.max_new_tokens", "12"]
        words += [f"--policies.{policy}.learner.prompts_per_step", "2"]
    return words


@pytest.mark.parametrize("weights", ["broadcast", pytest.param("adapters", marks=pytest.mark.slow)])
def test_three_policies_learn_from_rollouts_of_three_engines(tmp_path, weights):
    """Every version was proved by its engine's canary; tokens are those of the learner; no process is left."""
    command = [sys.executable, "-m", "mrl", "train", "configs/mixed_engines.toml", *small(tmp_path)]
    command += [word.format(policy) for policy in POLICIES for word in RUNS[weights][policy]]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "mixed"
    records = list(each_metrics(run / "metrics.jsonl"))
    for policy in POLICIES:
        mine = [record for record in records if record.get("values") and record["policy"] == policy]
        of_learner = [record for record in mine if record["role"] == f"learner/{policy}"]
        steps = [record for record in of_learner if "loss/total" in record["values"]]
        sampled = [record["values"] for record in mine if record["role"] == f"worker/{policy}/0"]
        assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
        assert max(record["values"]["mismatch/k3_nats"] for record in steps) < 1e-6
        assert max(values["weights/canary_max_abs_nats"] for values in sampled) < 1e-4
        assert sampled[-1]["rollout/engine_restarts"] == 0
        routes = {name: sampled[-1][counted] for name, counted in COUNTED_AS.items()}
        way = RUNS[weights][policy][1]
        assert routes[way] >= 1
        if way == "broadcast":  # the last version lies on the disk as well, for whoever comes to it late
            assert routes.pop("files") <= 1
        assert [name for name, updates in routes.items() if updates] == [way]
    engines = {json.loads((run / "config.json").read_text())["policies"][one]["rollout"]["engine"] for one in POLICIES}
    assert engines == {"embedded", "vllm", "sglang"}
    left = [
        one.info["cmdline"] for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(one.info["cmdline"])
    ]
    assert left == []
