"""The pods of launchers/kubernetes.yaml call mrl as it wants to be called."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from mrl.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pod() -> dict:
    """The container of the job."""
    documents = list(yaml.safe_load_all((ROOT / "launchers" / "kubernetes.yaml").read_text()))
    assert [one["kind"] for one in documents] == ["Service", "PersistentVolumeClaim", "Job"]
    spec = documents[2]["spec"]
    assert documents[0]["metadata"]["name"] == spec["template"]["spec"]["subdomain"]
    (container,) = spec["template"]["spec"]["containers"]
    return container | {"completions": spec["completions"]}


@pytest.fixture
def words_of(pod, tmp_path):
    """What the pod of an index calls `mrl` with, by its own script; /runs is a folder here."""
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin" / "mrl"
    stand_in.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    runs = tmp_path / "runs"

    def words(index: int) -> list[str]:
        *shell, script = pod["command"]
        given = {one["name"]: one["value"] for one in pod["env"]}
        variables = given | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": str(index)}
        script = script.replace("/runs", str(runs))
        done = subprocess.run([*shell, script], env=variables, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    return words


def test_the_first_pod_launches_a_run_that_can_be_planned(words_of, pod, capsys, monkeypatch) -> None:
    """On as many hosts as there are pods."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = words_of(0)

    assert words[0] == "launch"
    assert main([*words, "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert all(f"mrl-{index}" in planned for index in range(pod["completions"]))


def test_a_first_pod_that_is_started_again_resumes(words_of, tmp_path) -> None:
    """Where its run folder is there."""
    assert "--resume" not in words_of(0)

    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "config.json").touch()

    assert "--resume" in words_of(0)


def test_the_other_pods_join_under_a_name_that_the_first_one_knows(words_of, pod, tmp_path) -> None:
    """Each under its own."""
    (hosts,) = [words_of(0)[place + 1] for place, word in enumerate(words_of(0)) if word == "--hosts"]
    known = [host.partition("=")[0] for host in hosts.split(",")]

    assert len(known) == pod["completions"]
    for index in range(1, pod["completions"]):
        command, run, *options = words_of(index)
        assert command in COMMANDS
        assert run == str(tmp_path / "runs" / "quickstart")
        assert options[:2] == ["--host", known[index]]
