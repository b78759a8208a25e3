"""mrl from Python, without whole runs; those are in tests/system."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import mrl
from mrl.config.load import load_config
from mrl.errors import ConfigError, RunFolderError, UserError
from mrl.metrics.rollout_files import Rollout, RolloutFiles
from mrl.python_api import _NewSteps
from tests.report.conftest import write_synthetic_run

ROOT = Path(__file__).parents[1]
ONE = {
    "run": {"name": "small", "steps": 4},
    "tasks": {"copy": {"source": "words", "dataset": "trim"}},
    "policies": {"a": {"model": "models/a", "learner": {"minibatches": 4}}},
}
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.toml"))


def test_the_library_costs_nothing_until_it_is_used() -> None:
    """Small programs import mrl; all of its names are there all the same."""
    code = "import mrl, sys; assert 'mrl.python_api' not in sys.modules; print(*dir(mrl)); mrl.load"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert set(mrl.__all__) <= set(done.stdout.split())
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        mrl.lode  # noqa: B018


def test_overrides_lie_over_a_file_or_tables(tmp_path: Path) -> None:
    """A shipped configuration by its name, a file by its path, tables as a file has them."""
    assert mrl.load("quickstart", {"run.steps": 20}).run.steps == 20
    tables = {
        "run": {"name": "small", "steps": 4},
        "tasks": {"copy": {"source": "words", "dataset": "trim"}},
        "policies": {"a": {"model": "models/a"}},
    }
    assert mrl.load(tables, {"policies.a.learner.lr": 1e-3}).policies["a"].learner.lr == 1e-3
    assert "learner" not in tables["policies"]["a"], "the tables of the caller stay"


@pytest.mark.parametrize(
    ("source", "overrides", "line"),
    [
        ("quickstart", {"run.stepps": 20}, "run.stepps"),
        ("quickstart", {"run.steps": "twenty"}, "twenty"),
        ("nowhere.toml", {}, "no such file"),
        ({"run": {"name": "x"}}, {}, "configuration: "),
        (ONE, {"run.steps": "x"}, r"^overrides: run\.steps: invalid value"),
        (ONE, {"policies.b.device": "cpu"}, "^overrides: policies has no 'b'"),
        (ONE, {"policies.a.learner.minibatches": 100}, r"^overrides: policies\.a\.learner\.minibatches: more"),
        (
            ONE,
            {"policies.a.learner.prompts_per_step": 1},
            r"^configuration with --\S+=1: .*minibatches: more",
        ),
        (
            ONE,
            {"run.seed": 3, "policies.a.make.num_heads": 7},
            "^configuration with --run.seed=3 .*: miss",
        ),
        ({**ONE, "run": {"name": "x"}}, {"policies.a.device": "cpu"}, r"^configuration: run\.steps: missing"),
        ({**ONE, "run": {"name": "x"}}, {"run.seed": 3}, r"^configuration: run\.steps: missing"),
        ({**ONE, "run": {}}, {"run.seed": 3}, r"^configuration with --run.seed=3: run\.name: missing"),
        ({"run": ONE["run"]}, {"run.seed": 3}, r"^configuration: tasks: missing"),
        (ONE, {"policies.a.make": {"num_heads": 7}}, r"^overrides: policies\.a\.make\.architecture: missing"),
    ],
)
def test_a_mistake_is_what_the_command_line_says(source: object, overrides: dict[str, object], line: str) -> None:
    """With the key that is wrong."""
    with pytest.raises(ConfigError, match=line):
        mrl.load(source, overrides)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_reaches_the_run_as_it_is(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one that is shipped, with the keys that were left out still left out."""
    config, sent = mrl.load(path), tmp_path / "sent.toml"
    monkeypatch.setattr("mrl.python_api._Child", _sending_to(sent))
    with pytest.raises(KeyboardInterrupt):
        mrl.train(config)

    again = load_config(sent)
    assert again == config
    assert again.model_dump(exclude_unset=True) == config.model_dump(exclude_unset=True)


def _sending_to(sent: Path) -> object:
    def child(argv: list[str], config: str, bound_s: float) -> object:
        sent.write_text(Path(argv[argv.index("train") + 1]).read_text())
        raise KeyboardInterrupt

    return child


@pytest.mark.thorough
def test_a_run_that_cannot_begin_raises_what_the_command_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real `mrl train`, which ends with exit code 2; its lines were told before."""
    monkeypatch.chdir(tmp_path)
    tables = {
        "run": {"name": "small", "steps": 4},
        "tasks": {"copy": {"source": "words", "dataset": "trim"}},
        "policies": {"a": {"model": "./nowhere"}},
    }
    lines: list[str] = []
    with pytest.raises(UserError, match=r"^policies\.a\.model = './nowhere': no such folder"):
        mrl.train(mrl.load(tables), on_line=lines.append)
    assert lines[0] == "checking configuration"
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_left_is_read(tmp_path: Path) -> None:
    """Flat rows of one policy and role, and answers as `mrl samples` finds them."""
    folder = write_synthetic_run(tmp_path / "run", steps=40)
    row = Rollout(
        policy="qwen", step=2, kind="rollout", task="t", prompt_id="p", prompt="?", completion="no", reward=0.0,
        source="qwen",
    )  # fmt: skip
    RolloutFiles(folder / "rollouts", "qwen", 10**6).write(2, [row])

    run = mrl.open(folder)
    rows = run.metrics("qwen")
    assert [row["step"] for row in rows if "loss/total" in row] == list(range(1, 41))
    assert {row["role"] for row in rows} == {"learner/qwen"}
    assert {row["role"] for row in run.metrics(role="exchange")} == {"exchange"}
    assert {"allocator", "learner/llama"} <= {row["role"] for row in run.metrics(role="")}
    with pytest.raises(RunFolderError, match=r"no policy of this name; got 'qwn'; wanted .*; cure: did you mean qwen"):
        run.metrics("qwn")
    assert [row["completion"] for row in run.samples("qwen", failed=True)] == ["no"]
    assert run.report().is_file()
    assert run.policies["qwen"].steps == []
    assert repr(run) == f"mrl.open({str(folder)!r})"
    with pytest.raises(UserError):  # neither model nor checkpoint is there
        run.policies["qwen"].export()
    with pytest.raises(RunFolderError):
        mrl.open(tmp_path)


def test_steps_are_told_once_and_only_of_this_run(tmp_path: Path) -> None:
    """Half a line waits for its end; what an earlier run left, which is to be cleared, is none of them."""
    path = tmp_path / "metrics.jsonl"

    def line(step: int, role: str = "learner/qwen", name: str = "loss/total") -> str:
        row = {"time_unix_s": 1.0, "role": role, "policy": "qwen", "step": step, "values": {name: 0.5}}
        return json.dumps(row) + "\n"

    steps = _NewSteps(path, from_end=False)
    assert steps.read() == []
    path.write_text(line(1) + line(1, "worker/qwen/0") + line(1, name="eval/accuracy") + line(2)[:20])
    assert [step.step for step in steps.read()] == [1]
    path.write_text(line(1) + line(1, "worker/qwen/0") + line(1, name="eval/accuracy") + line(2))
    assert [(step.policy, step.step, step.values) for step in steps.read()] == [("qwen", 2, {"loss/total": 0.5})]
    assert steps.read() == []

    resumed = _NewSteps(path, from_end=True)
    with path.open("a") as file:
        file.write(line(3))
    assert [step.step for step in resumed.read()] == [3]
    cleared = _NewSteps(path, from_end=False)
    assert cleared.read() == []
    path.write_text(line(1))  # in place: a file that is made anew may get the inode of the one that was removed
    assert [step.step for step in cleared.read()] == [1]

    shortened = _NewSteps(path, from_end=True)
    path.write_text("")
    assert shortened.read() == []
    path.write_text(line(2))
    assert [step.step for step in shortened.read()] == [2]


@pytest.mark.parametrize("config", ["quickstart", {"run": {}}, None])
def test_what_is_no_configuration_is_not_trained(config: object) -> None:
    """A name or a table has to be loaded first."""
    with pytest.raises(UserError, match=r"^mrl\.train: not a configuration; got .*; wanted what mrl\.load returns"):
        mrl.train(config)  # type: ignore[arg-type]
