"""The verifier of docs/tasks-and-rewards.md, taken out of the page, judges; the page tells of every kind of failure."""

import json
import re
import tomllib
from pathlib import Path

from mrl.config.task_tables import PoolTable, TaskTable
from mrl.tasks.pool import build_pool
from mrl.tasks.rewards import FAILURES

PAGE = (Path(__file__).parents[2] / "docs" / "tasks-and-rewards.md").read_text(encoding="utf-8")


def test_the_page_s_verifier_does_what_the_page_says(tmp_path, monkeypatch):
    """Right and brief, right and long, wrong."""
    [module] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    [toml] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_verifiers.py").write_text(module, encoding="utf-8")
    rows = [{"prompt": f"p{number}", "reference": "word", "most_letters": 6} for number in range(40)]
    (tmp_path / "words.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    monkeypatch.chdir(tmp_path)
    pool = build_pool(
        {name: TaskTable(**table) for name, table in tomllib.loads(toml)["tasks"].items()},
        PoolTable(train_prompts=4, held_out_prompts=2),
    )
    try:
        prompt_id = pool.prompt_at(0).prompt_id
        answers = ["word", " word    <answer>word         .</answer>", "<answer> word   </answer>"]
        verdicts = pool.submit([(prompt_id, answer) for answer in answers]).result()
    finally:
        pool.close()

    assert [one.failure for one in verdicts] == [""] * 3
    assert [one.reward for one in verdicts] == [1.1, -0.1, 1.1]
    assert verdicts[1].rewards == {"right": 0.0, "brief": -1.0}


def test_every_kind_of_failure_stands_on_the_page():
    """And no other."""
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == list(FAILURES)
