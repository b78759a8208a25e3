"""Held-out answers of a run: found by `mrl samples --held-out`, those of episodes as conversations, here and there."""

from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.metrics.evaluation_results import emit_evaluation
from mrl.metrics.jsonl import SampleWriter
from mrl.metrics.telemetry import Telemetry
from mrl.python_api import open as open_run
from mrl.records.episodes import EpisodeSegment, Message
from mrl.records.evaluation_messages import EvaluatedAnswer, EvaluationResult, TaskAccuracy
from mrl.records.readable_turns import readable_turns
from mrl.records.telemetry_messages import SampleRecord
from mrl.records.version import Version
from mrl.report.page import write_report
from tests.report.conftest import TASKS, write_synthetic_run

SEGMENTS = [
    EpisodeSegment(num_tokens=9, is_sampled=True, messages=(Message("assistant", "is it five"),)),
    EpisodeSegment(num_tokens=4, is_sampled=False, messages=(Message("user", "higher"),)),
    EpisodeSegment(num_tokens=7, is_sampled=True, messages=(Message("assistant", "then it is seven"),)),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two evaluations of qwen, each with an episode and a plain answer."""
    folder = write_synthetic_run(tmp_path / "run", steps=4)
    writer = SampleWriter(folder / "rollouts")

    def sink(told: object) -> None:
        if isinstance(told, SampleRecord):
            writer.write(told)

    for step in (0, 4):
        episode = EvaluatedAnswer(
            task=TASKS[0], prompt="higher_lower seed 3", completion="assistant: is it five", reward=1.0,
            opening="<|im_start|>user\nGuess<|im_end|>", turns=readable_turns(SEGMENTS, 1000),
        )  # fmt: skip
        plain = EvaluatedAnswer(task=TASKS[1], prompt="2 + 3 = ?", completion=f"six at {step}", reward=0.0)
        version = Version(0, step)
        result = EvaluationResult(
            policy="qwen", version=version, step=step, accuracy=0.5,
            per_task={task: TaskAccuracy(accuracy=0.5, prompts=1) for task in TASKS[:2]}, answers=[episode, plain],
            oldest=version, newest=version, own_token_share=1.0, missing=0, seconds=1.0,
        )  # fmt: skip
        emit_evaluation(result, folder / "evaluation", Telemetry("learner/qwen", "qwen", sink))
    return folder


def shown(capsys, *words: object) -> str:
    assert main(["samples", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_the_newest_evaluation_comes_first_and_episodes_are_conversations(run, capsys):
    """Stars mark what was sampled, and nothing of it was trained on."""
    lines = shown(capsys, run, "--held-out").splitlines()
    assert lines[:8] == [
        f"qwen step 4 · held out · {TASKS[0]} · reward 1.0",
        "  prompt    higher_lower seed 3",
        "  opening   <|im_start|>user",
        "            Guess<|im_end|>",
        "* assistant is it five",
        "  user      higher",
        "* assistant then it is seven",
        "  * sampled, held out: not trained on",
    ]
    heads = [line for line in lines if line.startswith("qwen")]
    assert [head.partition(" ·")[0] for head in heads] == ["qwen step 4"] * 2 + ["qwen step 0"] * 2


def test_they_are_chosen_as_others_are(run, capsys):
    """By policy, step, task, outcome and words; from Python too."""
    assert "six at 0" in shown(capsys, run, "--held-out", "--step", 0, "--failed", "--policy", "qwen")
    assert shown(capsys, run, "--held-out", "--find", "six at 7") == "no matching answers\n"
    found = list(open_run(run).samples("qwen", task=TASKS[1], held_out=True))
    assert [row["completion"] for row in found] == ["six at 4", "six at 0"]


def test_pages_show_the_same_conversations(run, tmp_path, capsys):
    """That of answers, and the report, which reads the results of evaluations."""
    shown(capsys, run, "--held-out", "--page", tmp_path / "answers.html")
    for page in (tmp_path / "answers.html", write_report(run)):
        text = page.read_text()
        assert "sampled, 9 tokens, held out: not trained on" in text
        assert "given, 4 tokens, not trained on" in text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--step", "3"], "no answers of this step were kept; got 3; wanted one of 2 steps from 0 to 4, nearest: 0, 4"),
        (["--policy", "llama"], "the run has kept no held-out answers; cure: wait for the first evaluation"),
        (["--policy", "qwne"], "did you mean --policy qwen?"),
        (["--rescued"], "answers to held-out prompts are never trained on; got '--held-out and --rescued'"),
    ],
)
def test_a_mistake_is_one_line(run, capsys, words, line):
    """With what there is."""
    assert main(["samples", str(run), "--held-out", *words]) == 2
    assert line in capsys.readouterr().err
