"""Keys of an objective that nobody would read are refused in one line, and only when they are set."""

from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.errors import ConfigError

CONFIG = """
[run]
name = "small"
steps = 4
[tasks.copy]
source = "words"
dataset = "copy"
[policies.qwen]
model = "models/qwen"
rollout = { group_size = 4, max_new_tokens = 32 }
"""
KEY = "policies.qwen.objective"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


def load(file: Path, words: list[str]) -> None:
    load_config(file, [f"--policies.qwen.{word}" for word in words])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["objective.method=cispo", "objective.dual_clip=3"],
            "dual_clip: the method cispo does not use this key; got 3",
        ),
        (["objective.method=dppo", "objective.dual_clip=3"], "dual_clip: the method dppo does not use this key; got 3"),
        (
            ["objective.method=dppo", "objective.clip_low=0.1"],
            "clip_low: the method dppo does not use this key; got 0.1",
        ),
        (
            ["objective.method=dppo", "objective.correction.upper=2"],
            "the method dppo needs no correction: its ratio is relative to the sampling policy; got 2.0",
        ),
        (["objective.method=dppo", "objective.correction.level=token"], "no correction: its ratio is relative to the"),
        (["objective.correction.lower=6"], "correction.lower: above correction.upper; got 6.0; wanted <= 5"),
        (
            ["objective.correction.level=off", "objective.correction.action=mask"],
            "correction.action: has no effect; got 'mask'; wanted a correction.level other than \"off\"; "
            'cure: set a correction.level other than "off", or remove this key',
        ),
        (
            ["objective.correction.level=off", "objective.correction.lower=0.5"],
            "correction.lower: has no effect; got 0.5",
        ),
        (
            ["objective.correction.level=off", "objective.correction.upper=5.0"],
            "correction.upper: has no effect; got 5.0",
        ),
        (
            ["objective.kl_estimator=k1"],
            "kl_estimator: has no effect; got 'k1'; wanted kl_coefficient > 0",
        ),
        (["objective.kl_estimator=k1", "objective.kl_coefficient=0"], "kl_estimator: has no effect"),
        (
            ["objective.overlong_penalty=0.5"],
            "overlong_penalty: has no effect; got 0.5; wanted overlong_buffer_tokens >= 1",
        ),
        (
            ["objective.method=dr_grpo", "objective.std_correction=0"],
            'std_correction: has no effect; got 0; wanted advantage = "group_std"',
        ),
        (["objective.advantage=group_mean", "objective.std_correction=1"], "std_correction: has no effect; got 1"),
        (
            ["objective.max_resampling=4"],
            "max_resampling: has no effect; got 4.0; wanted drop_uniform_groups = true",
        ),
        (
            ["objective.method=dapo", "objective.drop_uniform_groups=false", "objective.max_resampling=4"],
            "max_resampling: has no effect",
        ),
        (
            ["objective.overlong_buffer_tokens=33"],
            "overlong_buffer_tokens: longer than the longest answer; got 33; wanted <= rollout.max_new_tokens = 32",
        ),
        (
            ["objective.method=dapo", "rollout.group_size=1"],
            "drop_uniform_groups: a group of one answer is always uniform, so nothing would be trained on; "
            "got 'dapo with rollout.group_size = 1'; wanted rollout.group_size >= 2",
        ),
    ],
)
def test_a_key_that_nobody_would_read_is_refused(file: Path, words: list[str], line: str) -> None:
    """What, where, got, wanted, cure."""
    with pytest.raises(ConfigError) as caught:
        load(file, words)
    assert str(caught.value).startswith(f"{file}: {KEY}.")
    assert line in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["objective.method=dppo", "objective.clip_high=0.1", "objective.correction.level=off"],
        ["objective.method=dapo", "objective.max_resampling=4"],
        ["objective.method=dr_grpo", "objective.advantage=group_std", "objective.std_correction=0"],
        ["objective.drop_uniform_groups=true", "objective.max_resampling=4"],
        ["objective.kl_estimator=k1", "objective.kl_coefficient=0.01"],
        ["objective.overlong_penalty=0.5", "objective.overlong_buffer_tokens=32"],
        ["objective.correction.action=mask", "objective.correction.lower=0.5"],
        ["frozen=false", "rollout.group_size=1"],
    ],
)
def test_a_key_that_is_read_passes(file: Path, words: list[str]) -> None:
    """Together with what switches it on; defaults that are not in use say nothing."""
    load(file, words)
