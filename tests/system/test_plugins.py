"""The example package of plug-ins, really installed: checked and trained with; and the same as modules of one's own."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.metrics.jsonl import each_metrics

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "plugins"
PIP = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target")


def call(folder: Path, *words: str, site: Path | None = None) -> str:
    """What a command prints; it succeeds."""
    path = os.pathsep.join(str(one) for one in (site, ROOT) if one)
    argv, environment = [sys.executable, *words], os.environ | {"PYTHONPATH": path}
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def holds(folder: Path) -> None:
    """Every plug-in did its part in every process of the run."""
    records = [one for one in each_metrics(folder / "metrics.jsonl") if "loss/total" in one.get("values", {})]
    assert {one["policy"] for one in records} == {"qwen", "llama"}
    assert all("loss/imitated" in one["values"] for one in records)
    (table,) = folder.glob("trackers/*/*.csv")
    with table.open() as lines:
        tracked = list(csv.DictReader(lines))
    assert {"qwen/loss/total", "llama/loss/total"} <= {one["series"] for one in tracked}


def test_the_example_is_installed_checked_and_trained_with(tmp_path):
    """By pip, as anybody would; learner, worker, verifier and tracker find the same objects by entry points."""
    site, work = tmp_path / "site", tmp_path / "work"
    shutil.copytree(EXAMPLE, work)
    call(tmp_path, *PIP, str(site), str(work))
    shutil.rmtree(work / "mrl_example")
    told = call(work, "-m", "mrl", "check", "shout.toml", site=site)
    assert told.count("mrl-example 0.1") == 4
    call(work, "-m", "mrl", "train", "shout.toml", site=site)
    holds(work / "runs" / "shout")


def test_a_module_beside_the_configuration_is_found_by_every_process(tmp_path):
    """The run is started from another folder; nothing is on the path."""
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(EXAMPLE, work)
    text = (work / "shout.toml").read_text()
    for old, new in (
        ('regime = "concise"', 'regime = "mrl_example.regime:concise"'),
        ('source = "shout"', 'source = "mrl_example.source:Shout"'),
        ('verifier = "letters_right"', 'verifier = "mrl_example.verifier:letters_right"'),
        ('kind = "csv"', 'kind = "mrl_example.tracker:CsvTracker"'),
    ):
        assert old in text
        text = text.replace(old, new)
    (work / "shout.toml").write_text(text)
    call(elsewhere, "-m", "mrl", "train", str(work / "shout.toml"))
    holds(elsewhere / "runs" / "shout")
