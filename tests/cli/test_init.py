"""`mrl init`: what it writes is a configuration that runs, and says why its values are what they are."""

import json
from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.config.load import load_config, resolve
from mrl.processes.preparation.completion import complete
from mrl.processes.preparation.starting_config import policy_names, starting_tables
from tests.support.model_folders import write_model, write_weights


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two models and some problems."""
    monkeypatch.chdir(tmp_path)
    for name in ("qwen", "llama"):
        write_model(tmp_path / "models" / name)
    problems = ({"prompt": f"{n} + 1 = ?", "reference": str(n + 1)} for n in range(80))
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    return tmp_path


@pytest.mark.thorough
def test_what_is_written_is_checked_and_means_what_follows_anyway(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every value stands there as it would be chosen if its key were left out."""
    assert main(["init", "models/qwen", "models/llama", "--data", "problems.jsonl", "--steps", "7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == ("mine.toml", "next: mrl check mine.toml")

    tables = starting_tables(
        "mine", ["models/qwen", "models/llama"], "problems.jsonl", verifier="", steps=7, device="cpu"
    )
    config = complete(load_config(Path("mine.toml"))).config
    assert config == complete(resolve(tables, [], where="said").config).config
    assert (config.run.name, config.run.steps, config.sharing["regime"]) == ("mine", 7, "sgt")
    assert main(["check", "mine.toml"]) == 0
    out = capsys.readouterr().out
    assert "prompts     " in out
    assert "still needed" not in out


@pytest.mark.thorough
def test_every_key_has_its_comment_and_chosen_values_their_reason(place: Path) -> None:
    """In words of the reference; what the machine decides says so."""
    write_weights(place / "models/qwen/model.safetensors", num_elements=200_000_000)
    assert main(["init", "models/qwen", "--data", "problems.jsonl", "--verifier", "json:loads", "--to", "a.toml"]) == 0

    lines = (place / "a.toml").read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if " = " in line and not line.startswith("#")]
    assert len(keys) > 12
    assert [lines[number] for number in keys if not lines[number - 1].startswith("#")] == []
    reason = next(lines[number - 1] for number in keys if lines[number].startswith("lr = "))
    assert reason.endswith("Chosen: for all weights of a model of 0.2B parameters.")
    assert 'regime = "independent"' in lines
    assert 'verifier = "json:loads"' in lines
    assert any(line.startswith("#   learner/qwen") and line.endswith(" MiB") for line in lines)
    assert load_config(place / "a.toml").policies["qwen"].learner.lr == 1e-6


def test_policies_are_called_by_their_family() -> None:
    """No two alike, whatever the model's name."""
    models = ["Qwen/Qwen3-0.6B", "models/Llama-3.2-1B", "org/qwen2.5-7b@v1", "/a/0123", "google/gemma-3-1b-it"]
    assert policy_names(models) == ["qwen", "llama", "qwen-2", "policy", "gemma"]
    assert policy_names(["small-llama", "small-qwen3", "small"]) == ["llama", "qwen", "small"]
    assert policy_names(["Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"]) == ["qwen", "qwen-2"]


@pytest.mark.thorough
def test_columns_of_other_names_are_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without them the line says how; with them the file has them, and the check reads the data."""
    rows = ({"question": f"{n} + 1 = ?", "sum": str(n + 1)} for n in range(80))
    (place / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["init", "models/qwen", "models/llama", "--data", "sums.jsonl"]
    assert main(words) == 2
    assert "or use --prompt-key of `mrl init`" in capsys.readouterr().err
    assert main([*words, "--prompt-key", "question"]) == 2
    assert "or use --reference-key of `mrl init`" in capsys.readouterr().err
    assert main([*words, "--prompt-key", "question", "--reference-key", "sum"]) == 0
    assert 'options = { prompt_key = "question", reference_key = "sum" }\n' in (place / "mine.toml").read_text()
    assert main(["check", "mine.toml"]) == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--data", "none.jsonl"], "mrl init --data: no such file; got 'none.jsonl'; wanted a file of JSON lines"),
        (["--data", "problems.jsonl", "--to", "problems.jsonl"], "problems.jsonl: the file already exists; cure: "),
        (["--data", "problems.jsonl", "--to", "no/mine.toml"], "mrl init --to: no such folder; got 'no'"),
        (["--data", "problems.jsonl", "--verifier", "no function"], "mrl init: tasks.problems.verifier"),
        ([], "the following arguments are required: --data"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_writes_nothing(
    place: Path, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what was wanted."""
    before = sorted(place.iterdir())
    assert main(["init", "models/qwen", *words]) == 2
    assert line in capsys.readouterr().err
    assert sorted(place.iterdir()) == before
