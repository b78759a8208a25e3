"""The commands of the page on serving, by the real lm-eval and inspect-ai, against a run that trains."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.pages import ROOT, blocks
from tests.system.test_plain_requests import SERVING

pytestmark = pytest.mark.system
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mrl" / "harnesses"


@pytest.mark.skipif(not (HOME / "made").exists(), reason="no environment of harnesses: bash tools/harness_env.sh")
def test_harnesses_evaluate_a_policy_that_trains(make_run, tmp_path):
    """lm-eval generates and scores, inspect-ai generates; none of them knows of mrl."""
    run = make_run(steps=5000, more=SERVING, name="serving")
    run.start()
    run.until(lambda: min(run.step("qwen"), run.step("llama")) >= 1, "both train")
    letters, choices = blocks(PAGE, "yaml")
    (tmp_path / "letters.yaml").write_text(letters)
    (tmp_path / "choices.yaml").write_text(choices)
    (tmp_path / "letters.jsonl").write_text(blocks(PAGE, "json")[0])
    (tmp_path / "letters.py").write_text(blocks(PAGE, "python")[0])
    model = json.loads((run.folder / "config.json").read_text())["policies"]["qwen"]["model"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "NO_COLOR": "1"}
    environment = os.environ | offline | {"MODEL": model, "PATH": f"{HOME / 'bin'}:{os.environ['PATH']}"}
    before = run.step("qwen")

    script = "set -euo pipefail\n" + "\n".join(blocks(PAGE, "bash"))
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[0])["choices"][0]["message"]["role"] == "assistant"
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
