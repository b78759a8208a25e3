"""Whole runs of two policies that play: a class of the user's with a tool, and a game of mrl's own."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.metrics.jsonl import each_metrics
from tests.support.talking_policy import talking_policy

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
ENDINGS = ("done", "cut", "max_turns", "max_tokens")
GAME = '''
import hashlib

class Coin:
    """Two turns, whatever is said in them; what was said decides, for about one in three."""

    def reset(self, seed):
        self.said = []
        return f"Say a letter: {'abcdefgh'[seed % 8]}"

    def step(self, text):
        self.said.append(text)
        return f"heard {len(text)}", len(self.said) == 2

    def get_reward(self):
        return float(hashlib.blake2b(str(self.said).encode()).digest()[0] % 3 == 0)


class Echo:
    """Whoever asks the tool and says what it was told wins; others win where their words are even in number."""

    def reset(self, seed):
        return f"Say a letter: {'abcdefgh'[seed % 8]}"

    def shout(self, key: str) -> str:
        """Says it louder."""
        return key.upper()

    def get_reward(self, answer=""):
        return float(len(answer) % 2 == 0)
'''
CONFIG = """
[run]
name = "{name}"
steps = {steps}
sync = {sync}
[sharing]
regime = "{regime}"
[pool]
train_prompts = 64
held_out_prompts = 8
[tasks.higher_lower]
source = "environment"
dataset = "higher_lower"
max_turns = 4
[tasks.echo]
source = "environment"
dataset = "my_games:{game}"
options = {{ size = 400 }}
max_turns = 3
[evaluation]
every = 0
[allocation]
slots = 64
floor_slots = 32
[policies.qwen.make]
architecture = "qwen3"
tokenizer = "byte_level"
vocab_size = 400
hidden_size = 64
num_layers = 2
warm_start_steps = 60
warm_start_batch = 32
warm_start_lr = 4e-3
[policies.qwen.rollout]
group_size = 4
max_new_tokens = 16
[policies.qwen.learner]
prompts_per_step = 8
[policies.llama.make]
architecture = "llama"
tokenizer = "metaspace"
vocab_size = 500
hidden_size = 64
num_layers = 2
warm_start_steps = 60
warm_start_batch = 32
warm_start_lr = 4e-3
[policies.llama.rollout]
group_size = 4
max_new_tokens = 16
[policies.llama.learner]
prompts_per_step = 8
"""


def mrl(folder: Path, *words: str) -> str:
    """What a command prints; it succeeds."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "mrl", *words]
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def trained(tmp_path):
    """The folder of a finished run."""
    (tmp_path / "my_games.py").write_text(GAME)

    def train(name: str, sync: str, *, steps: int = 2, regime: str = "sgt", game: str = "Echo") -> Path:
        text = CONFIG.format(name=name, sync=sync, steps=steps, regime=regime, game=game)
        (tmp_path / f"{name}.toml").write_text(text)
        mrl(tmp_path, "train", f"{name}.toml")
        return tmp_path / "runs" / name

    return train


def answers_of(folder: Path) -> list[dict]:
    """All answers that were trained on."""
    files = sorted(folder.glob("rollouts/step_*/*.jsonl.gz"))
    return [json.loads(line) for file in files for line in gzip.open(file, "rt")]


def losses_of(folder: Path) -> dict[tuple[str, int], float]:
    """Policy and step -> loss."""
    records = [one for one in each_metrics(folder / "metrics.jsonl") if "loss/total" in one.get("values", {})]
    return {(one["policy"], one["step"]): one["values"]["loss/total"] for one in records}


def test_episodes_are_played_trained_shared_and_evaluated(trained):
    """Both policies, both environments; what is kept reads as conversations."""
    folder = trained("a", "false")
    records = list(each_metrics(folder / "metrics.jsonl"))

    steps = [one["values"] for one in records if "loss/total" in one.get("values", {})]
    assert len(steps) == 4
    assert all(one["episodes/turns_mean"] >= 1 for one in steps)
    for one in steps:
        assert sum(one.get(f"episodes/ended/{end}", 0.0) for end in ENDINGS) == pytest.approx(1.0)
    workers = [one["values"] for one in records if "environment/turns" in one.get("values", {})]
    assert workers
    ends = {name.rpartition("/")[2] for one in workers for name in one if name.startswith("environment/ends/")}
    assert ends <= {*ENDINGS, "given_up"}
    answers = [one for one in answers_of(folder) if one["kind"] == "rollout"]
    assert {one["task"] for one in answers} == {"higher_lower", "echo"}
    assert all(one["completion"].startswith("assistant: ") for one in answers)
    for one in answers:
        assert one["opening"].startswith(("Guess a number", "Say a letter"))
        assert sum(turn["tokens"] for turn in one["turns"] if turn["is_sampled"]) == one["tokens"]
        assert [turn["messages"][0]["role"] == "assistant" for turn in one["turns"]] == [
            turn["is_sampled"] for turn in one["turns"]
        ]
    assert any("\nuser: higher" in one["completion"] or "\nuser: lower" in one["completion"] for one in answers)
    for policy in ("qwen", "llama"):
        for step in (0, 2):
            result = json.loads((folder / "evaluation" / f"{policy}-{step}.json").read_text())
            assert result["missing"] == 0
    told = mrl(folder.parents[1], "samples", "runs/a", "--policy", "qwen", "--step", "2")
    assert "\n* assistant " in told
    held_out = mrl(folder.parents[1], "samples", "runs/a", "--held-out")
    assert "\n* assistant " in held_out
    assert "\n  opening   Guess a number" in held_out
    assert "  * sampled, held out: not trained on" in held_out


def test_a_synchronous_run_of_episodes_equals_itself(trained):
    """Bit for bit, whatever the environments' timing: same episodes, same weights."""
    first, second = trained("b", "true"), trained("c", "true")

    def told(folder: Path) -> list[dict]:
        return sorted(answers_of(folder), key=lambda one: json.dumps(one, sort_keys=True))

    assert told(first) == told(second)
    losses = [losses_of(folder) for folder in (first, second)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_peers_episodes_are_trained_on_where_ratios_are_formed(trained):
    """Between two tokenizers, in lockstep: every start state has both groups, and aligned rows of the peer's."""
    records = list(each_metrics(trained("f", "true", regime="prp") / "metrics.jsonl"))

    steps = [(one["policy"], one["values"]) for one in records if "loss/total" in one.get("values", {})]
    assert len(steps) == 4
    for policy, values in steps:
        peer = {"qwen": "llama", "llama": "qwen"}[policy]
        assert values["sharing/hit_rate"] == 1.0
        assert 0 < values["sharing/peer_rows"] <= values[f"align/rows/{peer}"] == 8 * 4
        assert values["sharing/peer_tokens"] > values["sharing/peer_rows"]
        assert values[f"align/spans/{peer}"] > 0
        assert values[f"align/one_to_one_tokens/{peer}"] > 0


def test_a_peer_scores_own_episodes_turn_by_turn(trained):
    """Between two tokenizers, in lockstep: every group that moves is scored, but for turns that begin with no text."""
    records = list(each_metrics(trained("g", "true", regime="rlad") / "metrics.jsonl"))

    steps = [(one["policy"], one["values"]) for one in records if "loss/total" in one.get("values", {})]
    assert len(steps) == 4
    assert sum(values["sharing/scored_rows"] for _, values in steps) > 0
    for policy, values in steps:
        peer = {"qwen": "llama", "llama": "qwen"}[policy]
        assert values["sharing/absent_rows"] == 0
        assert values["sharing/scored_rows"] + values["sharing/unscored_rows"] == values["sharing/asked_rows"]
        assert values["sharing/unscored_rows"] < values["sharing/asked_rows"] / 4
        assert values.get(f"align/rows/{peer}", 0) == values["sharing/asked_rows"]
        assert values[f"align/spans/{peer}"] > values["sharing/scored_rows"]


def test_groups_go_on_from_where_a_peer_had_come_and_equal_runs_do_so_equally(trained):
    """Handed out in one step, sampled behind the peer's turns in the next; bit for bit in a synchronous run."""
    first, second = (trained(name, "true", steps=4, regime="prefix", game="Coin") for name in ("d", "e"))

    def values_of(folder: Path) -> list[dict[str, float]]:
        records = list(each_metrics(folder / "metrics.jsonl"))
        found = [one for one in records if "loss/total" in one.get("values", {})]
        found.sort(key=lambda one: (one["policy"], one["step"]))
        return [{name: value for name, value in one["values"].items() if "prefix/" in name} for one in found]

    values = values_of(first)
    assert sum(one["prefix/groups"] for one in values) > 0
    assert not any("prefix/unbegun_groups/unequal" in one for one in values), "the environment is deterministic"
    assert all(one["prefix/given_turns_mean"] >= 1 for one in values if one["prefix/groups"])
    for policy in (values[:4], values[4:]):
        handed_out = [one["prefix/continuations"] for one in policy]
        tried = [
            sum(value for name, value in one.items() if name == "prefix/groups" or "unbegun" in name) for one in policy
        ]
        assert tried[1:] == handed_out[:-1], "in the very next step"
    assert values == values_of(second)
    assert losses_of(first) == losses_of(second)
    shown = [one["completion"] for one in answers_of(first) if "(a peer's turns)" in one["completion"]]
    assert len(shown) == 4 * sum(one["prefix/groups"] for one in values), "a group has four answers"
    assert all(one.startswith("(a peer's turns)\nassistant: ") and "\n(own turns)\nassistant: " in one for one in shown)


OF_TWO_KINDS = """
[run]
name = "r"
steps = 2
sync = true
[sharing]
regime = "prp"
[pool]
train_prompts = 64
held_out_prompts = 8
{task}
max_turns = 4
[tasks.lookup]
source = "environment"
dataset = "lookup"
max_turns = 3
[evaluation]
every = 0
[policies.qwen]
model = "talking"
[policies.qwen.rollout]
group_size = 4
max_new_tokens = 32
[policies.qwen.learner]
prompts_per_step = 8
microbatch_tokens = 1024
[policies.other]
model = "talking"
[policies.other.rollout]
group_size = 4
max_new_tokens = 32
[policies.other.learner]
prompts_per_step = 8
microbatch_tokens = 1024
"""
"""Two policies of one folder, one task that is to be filled in, and an environment."""
HIGHER_LOWER = '[tasks.higher_lower]\nsource = "environment"\ndataset = "higher_lower"'


def test_a_policy_sees_its_turns_as_its_template_renders_them(tmp_path):
    """What it sampled in several rows is trained on as it was sampled there; its peer sees all, and both share."""
    talking_policy(tmp_path / "talking", steps=120, reasons=True)
    (tmp_path / "r.toml").write_text(OF_TWO_KINDS.format(task=HIGHER_LOWER))
    mrl(tmp_path, "train", "r.toml", "--policies.other.prompt.history", "sampled")
    folder = tmp_path / "runs" / "r"

    records = list(each_metrics(folder / "metrics.jsonl"))
    steps = {(one["policy"], one["step"]): one["values"] for one in records if "loss/total" in one.get("values", {})}
    assert len(steps) == 4
    for (policy, _), values in steps.items():
        assert (values["episodes/rows_mean"] > 1.2) == (policy == "qwen")
        assert values["mismatch/k3_nats"] < 1e-6
        assert values["sharing/peer_rows"] > 0
    begun = {
        (one["policy"], len(turn["messages"]), turn["messages"][0]["role"])
        for one in answers_of(folder)
        for turn in one["turns"]
        if turn.get("begins_row")
    }
    assert begun == {("qwen", 1, "user")}, "behind a tool's answer the template keeps the reasoning"
    told = mrl(tmp_path, "samples", "runs/r", "--policy", "qwen", "--limit", "50")
    assert "(a new row begins here)" in " ".join(told.split())
