"""A whole run of the example in which one policy answers and the other checks: both are trained by their own turns."""

import shutil
import tomllib
from collections import defaultdict

import pytest

from mrl.metrics.jsonl import each_metrics
from tests.support.pages import ROOT, blocks
from tests.system.test_episodes import answers_of, mrl

pytestmark = pytest.mark.system
PAGE = (ROOT / "docs" / "gateway.md").read_text(encoding="utf-8")
CHECK = "Right or wrong?"
SMALL = ["--run.steps=3", "--pool.train_prompts=64", "--pool.held_out_prompts=8", "--tasks.words.options.size=200"]
SMALL += [
    f"--policies.{policy}.{key}"
    for policy in ("qwen", "llama")
    for key in ("make.warm_start_steps=120", "learner.prompts_per_step=8")
]


def said(answer, *, is_sampled):
    """What the policy said, or was told, turn by turn."""
    return [turn["messages"][0]["content"] for turn in answer["turns"] if turn["is_sampled"] == is_sampled]


def test_who_answers_and_who_checks_are_both_trained(tmp_path):
    """By the command of the page: rows of both from each start state, whose tokens are those that each has sampled."""
    (command,) = [block for block in blocks(PAGE, "bash") if "answer_and_check" in block]
    _, verb, path = command.split()
    config = tomllib.loads((ROOT / path).read_text())
    for name in ("answer_and_check.py", "answer_and_check.toml"):
        shutil.copy(ROOT / "examples" / name, tmp_path / name)
    mrl(tmp_path, verb, "answer_and_check.toml", *SMALL)
    folder = tmp_path / "runs" / config["run"]["name"]

    steps = [one for one in each_metrics(folder / "metrics.jsonl") if "loss/total" in one.get("values", {})]
    assert sorted((one["policy"], one["step"]) for one in steps) == [
        (policy, step) for policy in ("llama", "qwen") for step in (1, 2, 3)
    ]
    for one in steps:
        assert one["values"]["mismatch/k3_nats"] < 1e-6, "the learner finds its own tokens as likely as its engine did"
        assert one["values"]["episodes/turns_mean"] > 1
    # By chance all groups of one step may be answered alike, as policies come out a little different by processor.
    assert {one["policy"] for one in steps if one["values"]["optim/grad_norm"] > 0} == {"qwen", "llama"}
    roles, places = defaultdict(set), defaultdict(lambda: defaultdict(list))
    for one in answers_of(folder):
        is_check = any(words.endswith(CHECK) for words in said(one, is_sampled=False))
        roles[one["policy"]].add(is_check)
        places[one["step"], one["prompt_id"]][one["policy"]].append(one)
    assert roles == {"qwen": {True, False}, "llama": {True, False}}, "each has both roles, from different start states"
    for of_policy in places.values():
        assert {policy: len(answers) for policy, answers in of_policy.items()} == {"qwen": 4, "llama": 4}
