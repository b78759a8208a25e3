"""What is refused before anything is started."""

import re
import socket
import textwrap
from pathlib import Path
from typing import Any

import pytest

from mrl.config.load import validate
from mrl.config.policy_tables import ObjectiveTable, RolloutTable
from mrl.config.schema import RunConfig
from mrl.errors import AddressError, ConfigError, MissingError
from mrl.processes.preparation.preflight import (
    check_adapters,
    check_context,
    check_frozen,
    check_scorers,
    check_tasks,
    check_teacher,
    preflight,
    unasked,
    unheard,
)
from tests.support.word_runs import word_run


def config_with(sharing: dict[str, Any]) -> RunConfig:
    return word_run({"a": {}, "b": {}, "teacher": {"frozen": True}}, task="trim", sharing=sharing)


@pytest.mark.parametrize("sharing", [{"regime": "independent"}, {"regime": "rlad", "rlad": {"teacher": "b"}}])
def test_a_frozen_policy_that_nobody_asks_is_refused(sharing: dict[str, Any]) -> None:
    """It would only take memory; the line names the command that leaves it out."""
    with pytest.raises(
        ConfigError, match=r"policies\.teacher\.frozen: the sharing regime does not use this frozen policy"
    ) as caught:
        check_frozen(config_with(sharing), where="test")
    assert "`mrl compare` leaves it out" in str(caught.value)
    assert unasked(config_with(sharing), where="test") == ["teacher"]


def test_a_frozen_policy_that_scores_passes() -> None:
    """As the teacher that the regime names."""
    config = config_with({"regime": "rlad", "rlad": {"teacher": "teacher"}})
    check_frozen(config, where="test")
    check_teacher(config, where="test")
    assert unasked(config, where="test") == []


@pytest.mark.parametrize("teacher", ["teacher", "b"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_teacher_in_a_server_scores_at_temperature_one(teacher: str, engine: str) -> None:
    """Whether it learns itself or is frozen; nobody else is asked for scores."""

    def with_rollout(name: str, rollout: dict[str, Any]) -> RunConfig:
        config = config_with({"regime": "rlad", "rlad": {"teacher": teacher}})
        table = config.policies[name].model_copy(update={"rollout": RolloutTable(**rollout)})
        policies = {key: kept for key, kept in config.policies.items() if key == teacher or not kept.frozen}
        return config.model_copy(update={"policies": policies | {name: table}})

    told = rf"policies\.{teacher}\.rollout\.temperature: {engine} computes scores .* got '0\.7, and peers ask {teacher}"
    with pytest.raises(ConfigError, match=told):
        preflight(with_rollout(teacher, {"engine": engine, "temperature": 0.7}), where="test")
    check_scorers(with_rollout(teacher, {"engine": engine}), where="test")
    check_scorers(with_rollout(teacher, {"temperature": 0.7}), where="test")
    check_scorers(with_rollout("a", {"engine": engine, "temperature": 0.7}), where="test")


def test_a_teacher_that_is_no_policy_is_refused() -> None:
    """Unsaid, the run would be plain GRPO; other regimes do not read the name."""
    with pytest.raises(ConfigError) as caught:
        check_teacher(config_with({"regime": "rlad", "rlad": {"teacher": "teachr"}}), where="test")
    assert str(caught.value) == (
        "test: sharing.rlad.teacher: no such policy; got 'teachr'; wanted one of a, b, teacher; "
        "cure: did you mean 'teacher'?"
    )
    check_teacher(config_with({"regime": "sgt", "rlad": {"teacher": "teachr"}}), where="test")


@pytest.mark.parametrize(
    ("teaches", "message"),
    [
        ({"b": ["trim"], "bb": ["trim"]}, "test: sharing.copd.teaches: no such policy; got 'bb'; wanted one of a, b,"),
        (
            {"b": ["trim", "trin"]},
            "test: sharing.copd.teaches.b: no such task; got 'trin'; wanted one of trim; .*'trim'",
        ),
    ],
)
def test_who_teaches_what_is_of_the_run(teaches: dict[str, list[str]], message: str) -> None:
    """Else the peers would be asked nothing, unsaid."""
    with pytest.raises(ConfigError, match=message) as caught:
        check_teacher(config_with({"regime": "copd", "copd": {"teaches": teaches}}), where="test")
    assert "\n" not in str(caught.value)
    check_teacher(config_with({"regime": "copd", "copd": {"teaches": {"b": ["trim"]}}}), where="test")
    check_teacher(config_with({"regime": "sgt", "copd": {"teaches": teaches}}), where="test")


@pytest.mark.parametrize(
    "copd",
    [{}, {"top_units": 0}, {"distil_steps": 0}, {"teaches": {"a": ["trim"]}}],
    ids=["units", "none", "rl", "teacher"],
)
def test_a_kernel_that_knows_no_units_is_refused_where_a_teacher_tells_some(copd: dict[str, Any]) -> None:
    """Policy `a` has a teacher and would be told units; without either, its kernel is its own matter."""
    config = config_with({"regime": "copd", "copd": copd})
    learner = config.policies["a"].learner.model_copy(update={"logprob_kernel": "liger"})
    fused = config.policies["a"].model_copy(update={"learner": learner})
    config = config.model_copy(update={"policies": {**config.policies, "a": fused}})
    if copd:
        check_teacher(config, where="test")
        return
    with pytest.raises(
        ConfigError, match=r"policies\.a\.learner\.logprob_kernel: .*top_units = 8.*or sharing\.copd\.top_units = 0"
    ):
        check_teacher(config, where="test")


@pytest.mark.parametrize("is_made", [True, False])
def test_ranks_that_cannot_share_out_the_heads_are_refused(tmp_path: Path, is_made: bool) -> None:
    """Eight heads, four of keys and values, whether the policy is made here or read."""
    (tmp_path / "config.json").write_text('{"text_config": {"num_attention_heads": 8, "num_key_value_heads": 4}}')
    made = {"architecture": "qwen3", "tokenizer": "byte_level", "num_heads": 8}

    def shared_by(ranks: int) -> RunConfig:
        learner = {"processes": ranks, "context_parallel": ranks}
        policy = {"learner": learner} | ({"make": made} if is_made else {"model": str(tmp_path)})
        tasks = {"trim": {"source": "words", "dataset": "trim"}}
        return validate({"run": {"name": "r", "steps": 3}, "tasks": tasks, "policies": {"a": policy}}, where="test")

    with pytest.raises(ConfigError) as caught:
        check_context(shared_by(3), "a", where="test")
    assert str(caught.value) == (
        "test: policies.a.learner.context_parallel: the attention heads cannot be divided between so many ranks; "
        "got '3 ranks for 8 attention heads and 4 key-value heads'; wanted one of 1, 2, 4, 8"
    )
    for ranks in (1, 2, 4, 8):
        check_context(shared_by(ranks), "a", where="test")


def test_an_objective_that_the_regime_breaks_is_refused() -> None:
    """Before anything is started."""
    config = config_with({"regime": "rlad", "rlad": {"teacher": "teacher"}})
    broken = config.policies["a"].model_copy(update={"objective": ObjectiveTable(method="gspo")})
    config = config.model_copy(update={"policies": config.policies | {"a": broken}})
    with pytest.raises(ConfigError, match=r"test: policies\.a\.objective\.method: .* wanted grpo, dr_grpo or dapo"):
        preflight(config, where="test")


def test_a_busy_port_of_the_exchange_s_pages_is_refused_unless_they_are_off() -> None:
    """Before anything is started; free ports are always there."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = config_with({"regime": "rlad", "rlad": {"teacher": "teacher"}})

        def changed(**exchange: object) -> RunConfig:
            return config.model_copy(update={"exchange": config.exchange.model_copy(update=exchange)})

        with pytest.raises(
            AddressError, match=rf"test: \[exchange\] 127.0.0.1:{port}: cannot listen: the port is already in use"
        ):
            preflight(changed(metrics_port=port, metrics_host="127.0.0.1"), where="test")
        for fine in (changed(metrics_port=port, metrics_host=""), changed()):
            with pytest.raises(MissingError):  # what comes next: the policies' folders are not there
                preflight(fine, where="test")


def test_adapters_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before anything is started, with the command that gets it; who trains whole weights does not need it."""
    policies = {"a": {"model": "m", "learner": {"lora": {"rank": 2}}}, "b": {"model": "m"}}
    tasks = {"trim": {"source": "words", "dataset": "trim"}}
    config = validate({"run": {"name": "r", "steps": 3}, "tasks": tasks, "policies": policies}, where="test")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    missing: list[MissingError] = []
    check_adapters(config, missing.append)
    (told,) = missing
    assert str(told) == "policies.a.learner.lora: the package peft is not installed; cure: pip install 'mrl[lora]'"
    monkeypatch.undo()
    check_adapters(config, missing.append)
    assert missing == [told]


def test_the_first_host_looks_at_the_cores_of_its_own_units() -> None:
    """By name and without; what other hosts have is not known here. Told before any model is looked for."""
    plain = config_with({"regime": "prp"})

    def refusal(*units: str) -> str:
        table = plain.allocation.model_copy(update={"units": list(units), "floor_units": 0})
        without_teacher = {name: plain.policies[name] for name in "ab"}
        config = plain.model_copy(update={"allocation": table, "policies": without_teacher})
        with pytest.raises((ConfigError, MissingError)) as caught:
            preflight(config, where="test", first_host="n1")
        return str(caught.value)

    assert "this host has no core 4000; got 'cpu:4000'" in refusal("cpu:4000")
    assert "this host has no core 4001; got 'n1/cpu:4001'" in refusal("n2/cpu:4000", "n1/cpu:4001")
    assert "core" not in refusal("n2/cpu:4000")


def test_a_trial_that_takes_long_says_what_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A verifier, whose calls may take minutes, and an environment; a line each time that it took so long again."""
    code = """
        import time
        def score(reference, answer):
            time.sleep(0.3)
            return float(answer == reference)
        class Game:
            def reset(self): return "Guess"
            def step(self, text): time.sleep(0.3); return "higher", 0.0, False
    """
    (tmp_path / "slow_trials.py").write_text(textwrap.dedent(code))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[3]}")
    monkeypatch.setattr("mrl.processes.preparation.wait_notice.TELL_EVERY_S", 0.1)
    judged = {"source": "words", "dataset": "trim", "verifier": "slow_trials:score", "verifier_timeout_s": 20.0}
    tasks = {"judged": judged, "played": {"source": "environment", "dataset": "slow_trials:Game"}}
    tables = {"run": {"name": "r", "steps": 1}, "tasks": tasks, "policies": {"a": {"model": "m"}}}

    check_tasks(validate(tables, where="test"), unheard)

    told = capfd.readouterr().err
    each = "on a few answers, up to 120 s each"
    assert re.search(
        rf"^waiting for the trial of tasks.judged: slow_trials:score {each} \(\d+ s so far\)$", told, re.MULTILINE
    )
    assert "the trial of tasks.played: slow_trials:Game for one turn, up to 300 s (" in told
