"""`mrl launch`: options that contradict each other, what a dry run prints, what goes to `sbatch`."""

import os
from datetime import date
from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.config.load import load_config
from mrl.config.run_folder import create_run_folder
from mrl.config.schema import RunConfig
from mrl.hub_names import HubName, snapshot

CONFIG = """
run = { name = "r", folder = "FOLDER", steps = 3, min_free_mib = 0 }
tasks.copy = { source = "words", dataset = "trim", operation = "trim" }
policies.a.make = { architecture = "qwen3", tokenizer = "byte_level" }
policies.b.make = { architecture = "llama", tokenizer = "metaspace" }
exchange.host = "0.0.0.0"
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A configuration of two policies; its run folder lies beside it."""
    path = tmp_path / "c.toml"
    path.write_text(CONFIG.replace("FOLDER", str(tmp_path / "runs")))
    return str(path)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--gpus", "2"], "--gpus has no effect without --slurm; cure: add --slurm"),
        (["--requeue"], "--requeue has no effect without --slurm; cure: add --slurm"),
        (["--slurm"], "--slurm requires --cpus"),
        (
            ["--slurm", "--cpus", "9", "--heterogeneous", "--separate"],
            "--heterogeneous and --separate cannot be combined",
        ),
        (["--slurm", "--cpus", "9", "--submit", "--dry-run"], "--submit and --dry-run cannot be combined"),
        (["--slurm", "--cpus", "9", "--hosts", "a,b"], "--hosts must be a number with --slurm; got 'a,b'"),
        (["--slurm", "--cpus", "9", "--hosts", "0"], "--hosts must be a number with --slurm"),
        (
            ["--slurm", "--cpus", "9", "--hosts", "2", "--exchange.host", "127.0.0.1"],
            "exchange.host: with several hosts",
        ),
        (["--hosts", "a,b"], "needed to start commands on other hosts"),
        (["--hosts", "a,a"], "--hosts: duplicate host; got 'a'"),
        (["--clean", "--resume"], "not allowed with"),
    ],
)
def test_options_that_contradict_are_one_line(
    config: str, capsys: pytest.CaptureFixture[str], words: list[str], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2; nothing is written."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["launch", config, *words]) == 2
    said = capsys.readouterr().err
    assert part in said
    assert said.count("\n") == 1
    assert os.listdir(Path(config).parent) == ["c.toml"]


def test_a_dry_run_prints_everything_and_writes_nothing(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Hosts, commands and environments; also of a run on this host."""
    assert main(["launch", config, "--dry-run", "--hosts", "x,y", "--launch.remote", '["ssh", "{host}"]']) == 0
    said = capsys.readouterr().out
    assert "host x, owns the run folder" in said
    assert "ssh y" in said
    assert "learner/b" in said[said.index("host y") :]
    assert main(["launch", config, "--dry-run"]) == 0
    assert "host here" in capsys.readouterr().out
    assert os.listdir(Path(config).parent) == ["c.toml"]


@pytest.mark.parametrize("how", [["--slurm", "--cpus", "9"], ["--dry-run"]])
def test_a_run_goes_on_by_the_commits_and_the_day_that_it_has(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: list[str]
) -> None:
    """Neither stands in the configuration, and the hub is not asked for them."""
    monkeypatch.setattr("mrl.processes.preparation.preflight.preflight", lambda *_, **__: (0, 0))
    monkeypatch.setattr("mrl.processes.preparation.hub_models.commit_of", lambda *_: pytest.fail("asks the hub"))
    template = """prompt.chat_template = "{{ strftime_now('%d %b %Y') }}"\n"""
    more = f'policies.b.{template}policies.c.model = "maker/Large-1B"\n'
    Path(config).write_text(Path(config).read_text() + more)
    begun = load_config(Path(config), [])
    model = HubName("maker/Large-1B").at("0123456789" * 4)
    at = {"model": str(snapshot(model)), "source": str(model), "model_revision": ""}
    b, c = begun.policies["b"], begun.policies["c"].model_copy(update=at)
    b = b.model_copy(update={"prompt": b.prompt.model_copy(update={"today": date(2024, 7, 26)})})
    create_run_folder(begun.model_copy(update={"policies": begun.policies | {"b": b, "c": c}}))

    assert main(["launch", config, *how, "--resume"]) == 0, capsys.readouterr().err


@pytest.mark.thorough
def test_a_dry_run_is_of_what_would_be_trained(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that were left out are fitted to this host's memory before anything is looked at."""
    checked: list[RunConfig] = []
    monkeypatch.setattr(
        "mrl.processes.preparation.preflight.preflight", lambda config, **_: checked.append(config) or (0, 0)
    )
    large = 'policies.large = { model = "not-there", source = "maker/Large-1B", rollout.max_new_tokens = 512 }\n'
    Path(config).write_text(Path(config).read_text() + large)
    for host_mib in (1_000_000, 1):
        monkeypatch.setattr("mrl.cli.launch.host_memory_bytes", lambda host_mib=host_mib: host_mib * 2**20)
        assert main(["launch", config, "--dry-run"]) == 0, capsys.readouterr().err
    assert [one.policies["large"].rollout.answers_at_once for one in checked] == [0, 8]


def test_a_job_warns_so_early_that_a_large_model_is_saved_before_its_limit(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """60 s, the 5 s of small ones, and 10 s for each GB of the weights, which are not there yet."""
    large = 'policies.large = { model = "not-there", source = "maker/Large-8B" }\n'
    Path(config).write_text(large + Path(config).read_text())
    assert main(["launch", config, "--slurm", "--cpus", "9", "--minutes", "90"]) == 0
    assert "#SBATCH --signal=B:USR1@225\n" in capsys.readouterr().out


def test_scripts_go_to_sbatch_and_later_jobs_start_after_the_first(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it refuses is told in one line."""
    programs = tmp_path / "bin"
    programs.mkdir()
    sbatch = programs / "sbatch"
    sbatch.write_text(f'#!/bin/bash\necho "$@" >>{tmp_path}/asked; cat >>{tmp_path}/scripts; echo "41;cluster"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    words = ["launch", config, "--slurm", "--cpus", "9", "--separate", "--submit"]
    assert main(words) == 0
    assert (tmp_path / "asked").read_text().splitlines() == ["--parsable", "--parsable --dependency=after:41"]
    assert (tmp_path / "scripts").read_text().count("#!/bin/bash") == 2
    assert "submitted b as job 41" in capsys.readouterr().out
    sbatch.write_text("#!/bin/bash\ncat >/dev/null; echo 'invalid partition' >&2; exit 1\n")
    assert main(words) == 2
    assert "sbatch rejected the job of run; got 'invalid partition'" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(words) == 2
    assert "`sbatch` is not installed on this host" in capsys.readouterr().err
