"""Answers of a run, found and shown on a terminal and on a page."""

import base64
import hashlib
import re
from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.metrics.rollout_files import Rollout, RolloutFiles
from mrl.report.samples.sample_page import SCRIPT
from tests.report.conftest import TASKS, write_synthetic_run

PAGE = Path(__file__).parents[3] / "docs/samples.md"


def rollout(policy: str, step: int, completion: str, **values: object) -> Rollout:
    known = {
        "policy": policy, "step": step, "kind": "rollout", "task": TASKS[0], "prompt_id": "p", "prompt": "2 + 3 = ?",
        "completion": completion, "reward": 1.0, "source": policy, "finish_reason": "stop", "tokens": 3,
    }  # fmt: skip
    return Rollout(**known | values)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two policies, three steps of each."""
    folder = write_synthetic_run(tmp_path / "run", steps=4)
    for policy, peer in (("qwen", "llama"), ("llama", "qwen")):
        files = RolloutFiles(folder / "rollouts", policy, 10**6)
        for step in (1, 2, 4):
            rows = [
                rollout(policy, step, f"five of {policy} at {step}"),
                rollout(policy, step, "<b>four</b>", reward=0.0, task=TASKS[1], rewards={"form": 0.5}),
                rollout(
                    policy, step, "\x1b[2Jgone\r\nnext", reward=0.25, failure="raised: KeyError", finish_reason="length"
                ),
            ]
            rescue = {"kind": "rescue", "source": peer, "tokens": None, "finish_reason": ""}
            files.write(step, [*rows, rollout(policy, step, "the peer's five", **rescue)])
    return folder


def shown(capsys, *words: object) -> str:
    assert main(["samples", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_the_newest_step_comes_first(run, capsys):
    """Without a choice: answers of all policies, and how to see more."""
    text = shown(capsys, run)

    heads = re.findall(r"^(\w+) step (\d)", text, re.MULTILINE)
    assert heads == [("llama", "4")] * 4 + [("qwen", "4")] * 4 + [("llama", "2")] * 2
    assert text.splitlines()[0] == f"llama step 4 · {TASKS[0]} · reward 1.0 · 3 tokens, stop"
    assert text.splitlines()[1:4] == ["  prompt  2 + 3 = ?", "  answer  five of llama at 4", ""]
    assert text.splitlines()[-1] == "showing the first 10 answers; --limit N shows more"


def test_failures_and_rescues_are_found(run, capsys):
    """A failure is an own answer below the success reward; a rescue names its writer."""
    failed = shown(capsys, run, "--failed", "--policy", "qwen", "--limit", 100)
    assert re.findall(r"^qwen step \d · (\w+) · reward (\S+)", failed, re.MULTILINE) == [
        (TASKS[1], "0.0"), (TASKS[0], "0.25")
    ] * 3  # fmt: skip
    assert "form 0.5" in failed
    assert "no verdict: raised: KeyError" in failed

    rescued = shown(capsys, run, "--rescued", "--step", 2)
    assert re.findall(r"^(.*) ·", rescued, re.MULTILINE) == [
        f"llama step 2 · rescued by qwen · {TASKS[0]}", f"qwen step 2 · rescued by llama · {TASKS[0]}"
    ]  # fmt: skip


def test_words_and_tasks_are_found(run, capsys):
    """In any case, in prompt or answer."""
    assert len(re.findall("^qwen", shown(capsys, run, "--find", "OF QWEN"), re.MULTILINE)) == 3
    assert "<b>four</b>" not in shown(capsys, run, "--task", TASKS[0], "--limit", 99)
    assert shown(capsys, run, "--find", "nowhere") == "no matching answers\n"


def test_what_a_policy_wrote_does_nothing_to_the_terminal(run, capsys):
    """Control characters are shown as escapes; ends of lines stay, under the answer's margin."""
    text = shown(capsys, run, "--find", "gone", "--limit", 1)

    assert "\x1b" not in text
    assert "\r" not in text
    assert "  answer  \\x1b[2Jgone\\r\n          next\n" in text


def test_the_page_holds_every_answer_and_runs_one_script_alone(run, tmp_path, capsys):
    """Markup of an answer is text; the policy admits the script by its hash."""
    assert shown(capsys, run, "--page", tmp_path / "answers.html").strip() == str(tmp_path / "answers.html")
    page = (tmp_path / "answers.html").read_text()

    assert page.count("<article") == 24
    assert page.count('data-kind="rescue"') == page.count('data-kind="success"') == 6
    assert "&lt;b&gt;four&lt;/b&gt;" in page
    assert "<b>four" not in page
    [script] = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert script == SCRIPT
    assert f"script-src &#x27;sha256-{digest}&#x27;" in page


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--policy", "qwne"], "got 'qwne'; wanted one of qwen, llama; cure: did you mean --policy qwen?"),
        (["--task", "sums"], f"no task of this name; got 'sums'; wanted one of {', '.join(TASKS)}"),
        (["--step", "3"], "no answers of this step were kept; got 3; wanted one of 3 steps from 1 to 4, nearest: 1, 2"),
        (["--limit", "0"], "invalid number of answers; got 0; wanted at least 1"),
        (["--page", "none/there.html"], "no such folder; got 'none'"),
        (["--page", "."], "a folder stands where the page would be; got '.'"),
        (["--failed", "--rescued"], "not allowed with argument"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(run, capsys, words, line):
    """With the cure where there is one."""
    assert main(["samples", str(run), *words]) == 2
    assert line in capsys.readouterr().err


def test_the_example_of_the_page_reads_the_files(run, monkeypatch):
    """As it stands in docs/samples.md, with this run's name and step."""
    [code] = re.findall("```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(run.parent)
    found: dict[str, list[str]] = {}
    exec(code.replace("runs/NAME", run.name).replace("step_7", "step_4"), found)

    assert found["wrong"] == ["<b>four</b>", "\x1b[2Jgone\r\nnext"]


def test_the_page_names_every_column():
    """And no other."""
    table = PAGE.read_text().partition("| column | meaning |")[2].partition("\n\n")[0]
    named = [
        name
        for line in table.splitlines()
        for name in re.findall(r"`(\w+)`", line.split("|")[1] if "|" in line else "")
    ]
    assert sorted(named) == sorted(Rollout.__struct_fields__)


def test_a_run_without_answers_says_why(tmp_path, capsys):
    """One that kept none, or has none yet."""
    run = write_synthetic_run(tmp_path / "run", steps=2)
    assert main(["samples", str(run)]) == 2
    assert "the run has kept no answers; cure: wait for the first learner step" in capsys.readouterr().err
