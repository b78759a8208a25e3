"""Packages of others against runs that train: lm-eval and inspect-ai evaluate a policy, verifiers trains one."""

import gzip
import json
import os
import subprocess
from pathlib import Path

import pytest

from mrl.parent_death import command
from tests.support.pages import ROOT, blocks
from tests.system.test_direct_requests import SERVING

pytestmark = pytest.mark.system
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mrl"
LETTERS = """
[sharing]
regime = "xgrpo"
[tasks.letters]
source = "agent"
dataset = "outside"
options = { size = 400 }
max_turns = 3
"""


def environment_of(name):
    """Folder of an environment that `tools/harness_env.sh` has made; else the test is skipped."""
    if not (CACHE / name / "made").exists():
        pytest.skip(f"no environment {name}: bash tools/harness_env.sh {name}")
    return CACHE / name


def test_harnesses_evaluate_a_policy_that_trains(make_run, tmp_path):
    """lm-eval generates and scores, inspect-ai generates, by the commands of the page; none of them knows of mrl."""
    home = environment_of("harnesses")
    run = make_run(steps=5000, more=SERVING, name="serving")
    run.start()
    run.until(lambda: min(run.step("qwen"), run.step("llama")) >= 1, "both train")
    letters, choices = blocks(PAGE, "yaml")
    (tmp_path / "letters.yaml").write_text(letters)
    (tmp_path / "choices.yaml").write_text(choices)
    (tmp_path / "letters.jsonl").write_text(blocks(PAGE, "json")[0])
    (tmp_path / "letters.py").write_text(blocks(PAGE, "python")[1])
    model = json.loads((run.folder / "config.json").read_text())["policies"]["qwen"]["model"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "NO_COLOR": "1"}
    environment = os.environ | offline | {"MODEL": model, "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    before = run.step("qwen")

    script = "set -euo pipefail\n" + "\n".join(blocks(PAGE, "bash"))
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    asked, _ = json.JSONDecoder().raw_decode(done.stdout)
    assert asked["choices"][0]["message"]["role"] == "assistant"
    said, scored = (results(tmp_path / name) for name in ("said", "scored"))
    assert 0 <= said["letters"]["exact_match,none"] <= 1
    assert 0 <= scored["choices"]["acc,none"] <= 1
    assert list((tmp_path / "inspected").glob("*.eval"))
    assert "accuracy" in done.stdout
    run.until(lambda: run.step("qwen") > before, "it trains on")
    counted = run.metrics("gateway")[-1]["values"]
    assert counted["gateway/plain/answers"] >= 1 + 2 + 6 + 2
    assert counted["gateway/plain/scored_tokens"] > 0


def results(folder):
    """Of the one evaluation by lm-eval there."""
    (file,) = folder.rglob("results_*.json")
    return json.loads(file.read_text())["results"]


def test_a_task_of_verifiers_trains_both_policies(make_run):
    """The example's task of two turns, with verifiers' own rewards, over sessions that it asks for."""
    home = environment_of("verifiers")
    run = make_run(steps=3, more=LETTERS)
    run.start(
        "--pool.held_out_prompts=2",
        "--tasks.trim.weight=0",
        "--tasks.letter_counting.weight=0",
        *(f"--policies.{name}.learner.prompts_per_step=2" for name in ("qwen", "llama")),
    )
    run.until(lambda: (run.folder / "endpoints" / "gateway.json").exists(), "the gateway listens")
    example = ROOT / "examples" / "verifiers_agent.py"
    with (run.folder / "verifiers.log").open("wb") as log:
        argv = command(os.getpid(), (str(home / "bin" / "python"), str(example), str(run.folder)))
        agent = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        assert run.finish(600) == 0, run.tail() + (run.folder / "verifiers.log").read_text()[-2000:]
    finally:
        agent.kill()
        agent.wait()

    counted = run.metrics("gateway")[-1]["values"]
    assert counted["gateway/ends/done"] > 0
    for policy in ("qwen", "llama"):
        files = sorted(run.folder.glob(f"rollouts/step_*/{policy}.jsonl.gz"))
        answers = [json.loads(line) for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]
        assert {one["task"] for one in answers} == {"letters"}
        assert {0.5, 1.0} & {one["reward"] for one in answers}
        assert any("user: Another" in one["completion"] for one in answers)
    assert not run.left_over()
