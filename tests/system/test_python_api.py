"""A program that trains, reads what the run left, and changes its mind."""

import json
import re
from pathlib import Path

import psutil
import pytest

import mrl

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]
PAGE, NOTEBOOK = ROOT / "docs/python.md", ROOT / "examples/quickstart.ipynb"


def test_the_example_of_the_page_trains_and_reads(make_run, capsys):
    """As it stands in docs/python.md, on a smaller configuration."""
    run = make_run(steps=4)
    [code] = re.findall("```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code = code.replace('"quickstart"', repr(str(run.config))).replace(', "run.name": "from-python"', "")
    found: dict[str, object] = {}
    exec(code.replace('"run.steps": 20', '"run.steps": 3'), found)

    steps = re.findall(r"^(qwen|llama) (\d) [\d.]+$", capsys.readouterr().out, re.MULTILINE)
    assert sorted(steps) == [(policy, str(step)) for policy in ("llama", "qwen") for step in (1, 2, 3)]
    assert len([row for row in found["run"].metrics("qwen") if "loss/total" in row]) == 3
    assert found["wrong"]
    assert (found["folder"] / "config.json").is_file()


def test_the_notebook_runs_from_top_to_bottom(make_run, monkeypatch, capsys):
    """Cell by cell, on a smaller configuration, with the variable that a kernel of Jupyter sets: lines are lines.

    Behind a rescue stand answers of the policy itself, none of which was right.
    """
    run = make_run(steps=4)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    code = code.replace('"quickstart"', repr(str(run.config))).replace('"run.name": "notebook", ', "")
    assert '"run.steps": 20, "evaluation.every": 10' in code
    found: dict[str, object] = {}
    exec(code.replace('"run.steps": 20, "evaluation.every": 10', '"run.steps": 3, "sharing.regime": "sgt"'), found)

    assert (run.folder / "qwen-trained" / "config.json").is_file()
    shown = capsys.readouterr().out
    assert "qwen step 3/3" in shown
    assert "\x1b" not in shown
    assert found.get("rescue", {}).get("completion") not in found.get("own", [])
    assert found["left"].get_legend_handles_labels()[1] == ["qwen", "llama"]


def test_an_exception_ends_the_run_first(make_run):
    """As a program's own stop condition does; no process of the run is left."""
    run = make_run(steps=100_000)
    before = {*psutil.Process().children(recursive=True)}  # other tests of this process leave it a fork server

    class Enough(Exception):
        pass

    def stop(step):
        raise Enough

    with pytest.raises(Enough):
        mrl.train(mrl.load(run.config), on_step=stop, on_line=lambda line: None)

    assert {*psutil.Process().children(recursive=True)} <= before
    assert mrl.open(run.folder).metrics(), "the first step of one of them"
