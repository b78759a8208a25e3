"""What `mrl doctor` looks at, and how it tells what is wrong."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mrl.cli import doctor as doctor_module
from mrl.cli.doctor import add_arguments, gpu_metrics, machine, not_here, run, subjects_of, unfit
from mrl.config.load import load_config
from mrl.engines.server_timeouts import ServerTimeouts
from mrl.engines.wheel_limits import Machine
from mrl.errors import ConfigError
from mrl.gateway.agent_network import described_network
from mrl.processes.preparation.engine_examination import Finding, Subject, examine

TABLES = """
[run]
name = "r"
steps = 1
[sharing]
regime = "independent"
[tasks.trim]
source = "words"
dataset = "trim"
[policies.a]
model = "m"
[policies.b]
model = "m"
[policies.b.rollout]
engine = "vllm"
server = { python = "/env/bin/python", dtype = "bfloat16", options = ["--seed", "1"] }
[policies.c]
model = "m"
[policies.c.rollout]
engine = "sglang"
server = { url = "http://h:1" }
[policies.d]
model = "m"
device = "cuda"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Four policies with four kinds of engines."""
    (tmp_path / "run.toml").write_text(TABLES)
    return tmp_path / "run.toml"


@pytest.fixture
def doctor() -> Callable[..., int]:
    """The command, given its words."""

    def command(*words: str) -> int:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        return run(parser.parse_args(words))

    return command


def test_the_engines_of_a_configuration_are_looked_at_as_it_has_them(config: Path) -> None:
    """Each with its device, interpreter, number format, options or URL."""
    assert subjects_of(load_config(config, [])) == {
        "embedded of a": Subject("embedded", "cpu"),
        "vllm of b": Subject("vllm", "cpu", "/env/bin/python", "", "bfloat16", ("--seed", "1")),
        "sglang of c": Subject("sglang", "cpu", url="http://h:1"),
        "embedded of d": Subject("embedded", "cuda"),
    }


def test_wheels_that_this_machine_cannot_run_are_told_of_the_engines_that_it_would_start(monkeypatch) -> None:
    """Not of one on a CPU, one that is somebody else's, or one from an environment of the user's own."""
    monkeypatch.setattr(doctor_module, "this_machine", lambda: Machine(570, (2, 36), True, True))
    elsewhere = [Subject("vllm", "cpu"), Subject("vllm", "cuda", "/env/bin/python"), Subject("embedded", "cuda")]

    assert unfit([*elsewhere, Subject("sglang", "cuda", url="http://h:1")]) == []
    (line,) = unfit([*elsewhere, Subject("vllm", "cuda")])
    assert line.startswith("vllm on GPUs: driver 570; wanted >= 580")


def test_an_engine_that_is_not_installed_and_not_asked_for_is_no_fault(doctor, tmp_path, monkeypatch, capsys) -> None:
    """It is told with the command that makes it; the exit code is that of what is installed."""
    monkeypatch.setenv("MRL_ENGINE_HOME", str(tmp_path))
    examined = []
    monkeypatch.setattr(doctor_module, "examine", lambda subject: examined.append(subject) or Finding(subject.engine))

    assert doctor("--device", "cpu") == 0

    assert examined == [Subject("embedded", "cpu")]
    out = capsys.readouterr().out
    assert "mrl engine-env vllm --cpu" in out
    assert "mrl engine-env sglang --cpu" in out


def test_an_engine_that_is_asked_for_has_to_be_there(doctor, tmp_path, monkeypatch, capsys) -> None:
    """By name, that it is missing is for the person to cure."""
    monkeypatch.setenv("MRL_ENGINE_HOME", str(tmp_path))

    assert doctor("vllm", "--device", "cpu") == 2
    assert "the environment of vllm is missing" in capsys.readouterr().out


def test_an_installed_engine_that_does_not_work_is_a_fault(doctor, tmp_path, monkeypatch) -> None:
    """Also when no engine was named."""
    monkeypatch.setenv("MRL_ENGINE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor_module, "examine", lambda subject: Finding(subject.engine, problem="off"))

    assert doctor("--device", "cpu") == 1


def test_why_no_gpu_is_measured_is_told(monkeypatch) -> None:
    """Without one, without the package, and with a driver that does not answer."""
    assert gpu_metrics([]) == "none (no GPU)"
    told = {"absent": "NVML cannot be initialized: x"}
    monkeypatch.setattr(doctor_module, "GpuLoad", lambda gpus: SimpleNamespace(**told))
    assert gpu_metrics(["0"]) == "none (NVML cannot be initialized: x)"
    told = {"absent": "", "driver": lambda: "580.1", "values": lambda: [{"power_w": 9.0}, {}]}
    assert gpu_metrics(["0", "1"]) == "from driver 580.1, for 1 of 2 GPUs"
    assert any(line.startswith("metrics of GPUs: ") for line in machine())
    assert f"agents that a run starts can reach {described_network()}" in machine()


@pytest.mark.parametrize("is_set", [False, True])
def test_a_python_that_keeps_no_compiled_modules_is_told_of(monkeypatch, is_set: bool) -> None:
    """As in many container images; every start of a process takes longer."""
    monkeypatch.setattr("sys.dont_write_bytecode", is_set)
    assert any("PYTHONDONTWRITEBYTECODE" in line for line in machine()) == is_set


def test_packages_that_are_not_here_are_told_with_their_extra(monkeypatch) -> None:
    """And those that are here are not."""
    monkeypatch.setattr(doctor_module, "OPTIONAL", (("no_such_module", "lora", "x"), ("pytest", "dev", "y")))

    assert not_here([])[1:] == ["  no_such_module  x  pip install 'mrl[lora]'"]


def test_policies_with_the_same_engine_share_one_look(tmp_path: Path) -> None:
    """It is named after all of them."""
    (tmp_path / "run.toml").write_text(TABLES.replace('device = "cuda"\n', ""))
    assert list(subjects_of(load_config(tmp_path / "run.toml", []))) == ["embedded of a, d", "vllm of b", "sglang of c"]


def test_one_engine_of_a_configuration_can_be_chosen(doctor, config: Path, capsys) -> None:
    """A server that is not there is for the person to cure; the cure does not lead back to this command."""
    assert doctor("vllm", "--config", str(config)) == 2

    said = capsys.readouterr().out
    assert "vllm of b: /env/bin/python: the environment of vllm is missing" in said
    assert "mrl doctor" not in said
    assert "embedded" not in said


def test_a_gpu_that_is_not_there_is_one_line(doctor, capsys, monkeypatch) -> None:
    """And not a traceback of torch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor("embedded", "--device", "cuda") == 2
    assert "got 'cuda'; wanted a GPU; cure: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["embeded"], "no such engine; got 'embeded'; wanted embedded, vllm, sglang"),
        (["run.toml"], "cure: use `mrl doctor --config run.toml`"),
        (["--config", "CONFIG", "--device", "cpu"], "--device cannot be combined with --config"),
    ],
)
def test_words_that_do_not_fit_are_refused(doctor, config: Path, words: list[str], told: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError) as caught:
        doctor(*(str(config) if word == "CONFIG" else word for word in words))
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("python", "told"),
    [
        (sys.executable, "vllm is not installed for this Python interpreter"),
        ("FOLDER", "server.python of vllm is a folder"),
        ("FOLDER/no-program", "cannot run the engine's Python interpreter"),
    ],
)
def test_an_interpreter_that_is_none_of_the_engine_is_told_as_that(tmp_path: Path, python: str, told: str) -> None:
    """Before a server is started with it."""
    (tmp_path / "no-program").write_text("neither a program nor a script")
    (tmp_path / "no-program").chmod(0o755)

    found = examine(Subject("vllm", "cpu", python.replace("FOLDER", str(tmp_path))))

    assert told in found.problem
    assert found.is_users
    assert not found.starts


def test_a_server_that_is_not_at_its_url_is_told_with_the_url(monkeypatch) -> None:
    """Nothing is started in its place."""
    monkeypatch.setattr("mrl.processes.preparation.engine_examination.THEIRS", ServerTimeouts(start_s=0.1))

    found = examine(Subject("sglang", "cpu", url="http://127.0.0.1:1"))

    assert "no server at http://127.0.0.1:1 accepted requests within 0.1 s" in found.problem
    assert found.is_users


def test_an_engine_that_is_off_is_told_with_what_may_help(monkeypatch) -> None:
    """Here by a verdict that nothing escapes."""
    monkeypatch.setattr("mrl.processes.preparation.engine_examination.excess", lambda off_T, noise_T: "off by a lot")

    found = examine(Subject("embedded", "cpu"))

    assert "embedded: the engine's log-probabilities differ from the model's; got 'off by" in found.problem
    assert "cure: install the versions of constraints.txt" in found.problem
    assert found.is_users
