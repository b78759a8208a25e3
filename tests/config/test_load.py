"""A wrong configuration gives one line that names the file, the key, what was found and what was wanted."""

import json
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.errors import ConfigError

GOOD = """
[run]
name = "small"
steps = 4
[tasks.copy]
source = "words"
dataset = "copy"
[sharing]
regime = "independent"
[policies.qwen]
model = "models/qwen"
[policies.llama]
model = "models/llama"
learner = {lr = 1e-4}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(GOOD)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_values_defaults_and_overrides_become_one_config(file: Path) -> None:
    """Overrides win over the file, the file over the defaults."""
    config = load_config(file, ["--policies.llama.learner.lr", "2e-4", "--run.steps=7"])
    assert (config.run.steps, config.policies["llama"].learner.lr) == (7, 2e-4)
    assert (config.run.seed, config.policies["qwen"].learner.lr) == (1, 3e-4)


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["--policies.qwen.frozen=False"], "policies.qwen.frozen", False),
        (["--policies.qwen.learner.betas", "[0.8, 0.95]"], "policies.qwen.learner.betas", (0.8, 0.95)),
        (["--policies.qwen.learner.lr", ".5"], "policies.qwen.learner.lr", 0.5),
        (["--run.name", "5"], "run.name", "5"),
        (["--run.folder=/a=b"], "run.folder", "/a=b"),
        (["--sharing.lambda", "0.3"], "sharing.lambda", 0.3),
        (["--sharing.regime", "sgt"], "sharing.regime", "sgt"),
        (["--sharing.mode", "sgt"], "sharing.mode", "sgt"),
        (["--tasks.copy.options.deep.n", "-3"], "tasks.copy.options.deep.n", -3),
        (["--tasks.copy.tags", '["a", "b"]'], "tasks.copy.tags", ["a", "b"]),
    ],
)
def test_override_values_are_read_as_toml_of_the_keys_type(
    file: Path, words: list[str], path: str, value: object
) -> None:
    """Booleans, numbers, lists and bare text arrive as the type that the schema gives to the key."""
    found: object = load_config(file, words)
    for key in path.split("."):
        found = found[key] if isinstance(found, dict) else getattr(found, key)
    assert found == value


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--policies.qwen.lerner.lr", "1"], ["did you mean policies.qwen.learner.lr?"]),
        (["--tasks.zzz.tags", "[]"], ["tasks has no 'zzz'", "add [tasks.zzz]"]),
        (["--lr", "1"], ["unknown key", "policies.<name>.learner.lr"]),
        (["--run.steps", "1.5"], ["run.steps", "got 1.5", "a whole number"]),
        (["--run.max_minutes", "inf"], ["run.max_minutes", "a finite number"]),
        (["--run.steps"], ["without a value", "--run.steps VALUE"]),
        (["--run.steps", "--run.seed", "1"], ["without a value", "--run.steps"]),
        (["--run.steps.x", "1"], ["run.steps is a value, and has no keys", "got 'run.steps.x'"]),
        (
            ["--trackers.0.kind", "wandb"],
            ["trackers is a value, and has no keys", "cure: set it as a whole: --trackers VALUE", "[{key = 1}]"],
        ),
        (["--run", "1"], ["one value, not a table", "name"]),
        (["--policies", "1"], ["one value, not a table"]),
        (["--run..steps", "1"], ["unknown key"]),
        (["steps=3"], ["not a valid override", "--key.path VALUE"]),
        (
            ["--tasks.copy.source", "wrds"],
            ["words, math, jsonl, environment, agent, benchmark, ", "did you mean words?"],
        ),
    ],
)
def test_a_wrong_override_is_one_clear_line(file: Path, words: list[str], parts: list[str]) -> None:
    """Unknown keys name the nearest valid one, values say what was wanted."""
    line = refusal(file, *words)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("steps = 4", 'steps = "4"', ["run.steps", "got '4'", "a whole number"]),
        ("steps = 4", "", ["run.steps: missing", "a whole number", "[run]"]),
        (
            "steps = 4",
            'steps = "4"',
            ["run.steps: invalid value; got '4'; wanted a whole number; cure: remove the quotes"],
        ),
        ("steps = 4", 'steps = "four"', ["run.steps: invalid value; got 'four'; wanted a whole number"]),
        ("steps = 4", "steps = four", ["not valid TOML: Invalid value; cure: write texts in quotes"]),
        ("steps = 4", "steps = 4\nsteps = 5", ["a key is set twice", ":5"]),
        ("[policies.llama]", '[policies."Big Llama"]', ["not a valid name", "Big Llama"]),
        ("lr = 1e-4", "learning_rate = 1e-4", ["policies.llama.learner.learning_rate", "unknown key"]),
        ('name = "small"', "name = true", ["run.name", "a text in quotes"]),
        ("[policies.qwen]", "[other.qwen]", ["other: unknown key"]),
        (GOOD[GOOD.index("[policies") :], "", ["policies: missing; cure: add a table [policies.NAME]"]),
        ('source = "words"', "", ["tasks.copy.source: missing", "or a plug-in; cure: add `source = ...` below [tasks"]),
        ('[run]\nname = "small"\nsteps = 4', "", ["run: missing; wanted a table; cure: add a table [run]"]),
    ],
)
def test_a_wrong_file_is_one_line_with_file_and_key(file: Path, old: str, new: str, parts: list[str]) -> None:
    """Syntax errors carry the line, wrong values the dotted key."""
    file.write_text(GOOD.replace(old, new, 1))
    line = refusal(file)
    assert str(file) in line
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--policies.qwen.model", ""], "no model and no recipe"),
        (
            ["--policies.qwen.make.architecture=llama", "--policies.qwen.make.tokenizer=metaspace"],
            "both a model and a recipe",
        ),
        (["--policies.llama.frozen=true", "--policies.qwen.frozen=true"], "policies: all policies are frozen"),
        (
            ["--run.sync=true", "--policies.llama.learner.checkpoint_every=7"],
            "policies.llama.learner.checkpoint_every: policies of a synchronous run must save the same steps; got 7",
        ),
        (["--policies.llama.rollout.group_size=65"], "got 64; wanted >= 65 = group_size * workers of policies.llama"),
        (["--policies.qwen.rollout.workers=9"], "got 64; wanted >= 72 = group_size * workers of policies.qwen"),
        (["--supervision.stop_s=3601"], "supervision.stop_s: invalid value; got 3601; wanted <= 3600"),
        (["--exchange.budget_mib=1"], "exchange.budget_mib: invalid value; got 1; wanted >= 2"),
        (["--allocation.floor_slots=400"], "floor_slots <= 256 or slots >= 800"),
        (["--policies.qwen.rollout.workers=0"], "needs at least one worker"),
        (["--policies.qwen.learner.minibatches=64"], "more minibatches than prompts"),
        (["--policies.qwen.learner.betas=[0.9, 1.0]"], "betas"),
        (["--policies.qwen.device=gpu"], "'cpu' or 'cuda'"),
        (["--allocation.ttl_s=1.0"], "expire"),
        (["--sharing.regime=3"], "sharing.regime: invalid value; got 3"),
        (
            ["--sharing.regime=dapo"],
            "sharing.regime: an objective is not a sharing regime; got 'dapo'; wanted independent to train without",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(file: Path, words: list[str], part: str) -> None:
    """Rules over several keys are checked after the single keys."""
    assert part in refusal(file, *words)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["hidden_size=72", "num_heads=5"], "num_heads: does not divide hidden_size; got 5; wanted a divisor of 72"),
        (["hidden_size=72", "num_heads=8"], "num_heads: the width of a head is odd; got '72 / 8 = 9'; wanted an even"),
        (["hidden_size=80", "num_heads=5"], "num_heads: not a multiple of its 2 key-value heads; got 5"),
        (["hidden_size=96", "num_heads=3"], ""),
        (["hidden_size=72", "num_heads=1"], ""),
    ],
)
def test_a_recipe_that_no_architecture_can_build_is_refused(file: Path, words: list[str], part: str) -> None:
    """Heads divide the width evenly, into an even width each (rotary embeddings rotate pairs)."""
    recipe = ["architecture=llama", "tokenizer=metaspace", *words]
    overrides = ["--policies.qwen.model", "", *(f"--policies.qwen.make.{word}" for word in recipe)]
    if part:
        assert f"policies.qwen.make.{part}" in refusal(file, *overrides)
    else:
        assert load_config(file, overrides).policies["qwen"].make is not None


def test_two_policies_may_share_one_model_folder(file: Path) -> None:
    """The same model folder may stand in two policies."""
    assert load_config(file, ["--policies.qwen.model", "models/llama"]).policies["qwen"].model == "models/llama"


def test_a_frozen_policy_takes_no_slots(file: Path) -> None:
    """Its worker holds no lease, so neither its floor nor its groups count."""
    words = ["--policies.llama.frozen=true", "--allocation.floor_slots=400", "--policies.llama.rollout.group_size=500"]
    assert load_config(file, words).learning == ("qwen",)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """What begins as UTF-16 does."""
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refusal(tmp_path / "bytes.toml")


def test_the_file_is_not_changed_by_overrides_of_a_shared_table(file: Path) -> None:
    """Two loads of one file do not see each other's overrides."""
    load_config(file, ["--policies.llama.learner.lr=0.5"])
    assert load_config(file).policies["llama"].learner.lr == 1e-4
    assert json.loads(load_config(file).model_dump_json())["run"]["steps"] == 4
