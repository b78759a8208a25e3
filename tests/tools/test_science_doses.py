"""The table and the picture of doses, from results of two made-up doses."""

import json

import pytest
import science_doses

from mrl.config.load import validate
from mrl.config.run_folder import create_run_folder

ROW = {"average": {"start": {"mean": 0.3}, "end": {"mean": 0.5}}}


@pytest.fixture
def folder(tmp_path):
    """One dose in which each policy can what the other cannot, and one in which both can the same."""
    for share, chances in (("0.01", {"qwen": (0.5, 0.0), "llama": (0.0, 1.0)}), ("0.125", {"qwen": (0.5, 0.5)})):
        for seed in (1, 2):
            tables = {
                "run": {"name": f"independent-{seed}", "steps": 2, "folder": str(tmp_path / f"dose-{share}")},
                "tasks": {"reverse": {"source": "words", "dataset": "reverse"}},
                "policies": {
                    name: {"model": str(tmp_path), "rollout": {"group_size": size}}
                    for name, size in (("qwen", 2), ("llama", 4))
                },
            }
            run = create_run_folder(validate(tables, where="test"))
            for policy in ("qwen", "llama"):
                tasks = zip(("a", "b"), chances.get(policy, (0.5, 0.5)), strict=True)
                told = {"per_task": {task: {"accuracy": chance} for task, chance in tasks}}
                (run.evaluation / f"{policy}-0.json").write_text(json.dumps(told))
        gain = {"end_against_baseline": {"mean": 0.2, "half": 0.05}}
        alone = {"end_against_baseline": {"mean": 0.1, "half": None}}  # as of one seed
        rows = {"independent": ROW, "sgt": ROW | gain, "science_controls:OWN_SUCCESSES": ROW | alone}
        if share == "0.01":  # with a regime that the other dose lacks
            rows["sgt-reported"] = ROW | gain
        (tmp_path / f"dose-{share}" / "comparison.json").write_text(json.dumps(rows))
    return tmp_path


def test_gains_stand_beside_the_chance_of_a_rescue(folder, capsys):
    """That of arXiv 2605.07244, by hand: on task a llama has qwen's help, on b qwen has llama's."""
    assert science_doses.main([str(folder)]) == 0
    head, _, rare, alike = capsys.readouterr().out.splitlines()
    assert head.endswith("| baseline's end | sgt | OWN_SUCCESSES |")
    assert rare.count("|") == alike.count("|") == head.count("|")
    helped_llama, helped_qwen = 1.0 * (1 - 0.5**2), 1.0
    alpha = (helped_llama + helped_qwen) / 4
    assert rare.startswith(f"| 0.01 | {alpha:.2f} | 0.300 | 0.500 | +0.200 [+0.150, +0.250] |")
    assert rare.endswith("| +0.100 |")
    assert alike.startswith(f"| 0.125 | {(2 * 0.5**4 * 0.75 + 2 * 0.5**2 * (1 - 0.5**4)) / 4:.2f} |")
    assert (folder / "doses.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "doses.md").read_text().count("\n") == 4


def test_without_doses_the_command_that_makes_one_is_told(tmp_path, capsys):
    """In one line."""
    assert science_doses.main([str(tmp_path)]) == 2
    assert "tools/science.sh dose-0.01 makes one" in capsys.readouterr().err
