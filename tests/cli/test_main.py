"""The command line as a person meets it: one line for a mistake, exit code 2, nothing heavy imported in vain."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.cli.main import COMMANDS, MEANT, main, split_overrides
from mrl.process_start import COMPILED
from mrl.transport.server import check_address
from tests.support.model_folders import unlist_end, write_model

CONFIG = """
[run]
name = "small"
steps = 4
[tasks.backward]
source = "words"
dataset = "{dataset}"
operation = "reverse"
[policies.qwen]
model = "{model}"
[policies.llama]
make = {{architecture = "llama", tokenizer = "metaspace"}}
"""

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What passes for a Hugging Face folder at a glance."""
    return write_model(tmp_path / "model")


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG.format(dataset="spell_backward", model=model).replace('"words"', '"reasoning_gym"'))
    return path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a refused command leaves on stderr."""
    assert main(list(words)) == 2
    line = capsys.readouterr().err
    assert line.startswith("mrl: error: ")
    assert line.count("\n") == 1
    return line


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["trian"], "did you mean `mrl train`?"),
        (["evaluate"], "did you mean `mrl eval`?"),
        (["workr"], "see `mrl --help`"),
        (["frobnicate"], "see `mrl --help`"),
        (["train"], "required: CONFIG"),
        (["train", "/nowhere/x.toml"], "/nowhere/x.toml: no such file"),
        (["train", "/nowhere/x.toml", "--clean", "--resume"], "not allowed with argument"),
        (["worker", "--run-folder", "/nowhere"], "--policy"),
        (["exchange", "--run-folder", "/nowhere"], "/nowhere: not a run folder"),
        (["report", "/nowhere"], "/nowhere: not a run folder"),
        (["policies", "break", "x.toml"], "invalid choice"),
        (["schema", "-o", "/nowhere/x.json"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], part: str) -> None:
    """Wrong commands and arguments say what was wanted."""
    assert part in told(capsys, *words)


def test_options_that_are_no_flags_of_the_command_are_overrides() -> None:
    """Wherever they stand, and with their values."""
    words = ["--run.steps", "10", "c.toml", "--clean", "--policies.a.frozen=true", "--x", "[1]"]
    own, overrides = split_overrides(words, {"--clean", "--hosts"})
    assert own == ["c.toml", "--clean"]
    assert overrides == ["--run.steps", "10", "--policies.a.frozen=true", "--x", "[1]"]
    assert split_overrides(["--hosts=a,b", "c.toml"], {"--hosts"})[0] == ["--hosts=a,b", "c.toml"]


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """--help works for all of them and names overrides where there are any."""
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert all(name in overview for name in COMMANDS)
    for name, command in COMMANDS.items():
        with pytest.raises(SystemExit) as left:
            main([name, "--help"])
        assert left.value.code == 0
        assert ("--key.path" in capsys.readouterr().out) == command.takes_overrides


def test_what_people_try_leads_to_commands_for_people() -> None:
    """Every guess names one, and none a process of a run."""
    for word, meant in MEANT.items():
        name = next((one for one in (meant, meant.partition(" ")[0]) if one in COMMANDS), meant)
        assert word not in COMMANDS
        assert meant == "--help" or not COMMANDS[name].is_role


def test_check_prints_the_plan_and_writes_nothing(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Processes, threads, memory, and which policies are still to be made."""
    before = sorted(tmp_path.rglob("*"))
    folder = ("--run.folder", str(tmp_path / "runs"))
    assert (
        main(["check", str(config), "--run.steps", "7", "--pool.train_prompts=8", "--pool.held_out_prompts=8", *folder])
        == 0
    )
    out = capsys.readouterr().out
    for part in ("is valid", "7 per policy", "learner/qwen", "worker/llama/0", "6 processes", "to be made", "MiB"):
        assert part in out
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--sharing.regime=sgtt"], "did you mean sgt?"),
        (["--sharing.regime=sgt", "--sharing.lamda=0.3"], "sharing.lamda"),
        (["--policies.qwen.model=/dev/null"], "policies.qwen.model = '/dev/null': not a folder"),
        (["--tasks.backward.dataset=spel_backward"], "spel_backward"),
        (["--run.stpes=3"], "did you mean run.steps?"),
        (["--exchange.host=192.0.2.1"], "[exchange] 192.0.2.1:0: cannot listen: Cannot assign requested address"),
        (
            ["--exchange.port=9000"],
            "exchange.port: a port without exchange.host; got 9000; cure: set --exchange.host 127.0.0.1",
        ),
        (["--exchange.host=a..b"], "[exchange] a..b:0: cannot listen: "),
        (["--exchange.host=no.such.host.invalid"], "[exchange] no.such.host.invalid:0: cannot listen: "),
    ],
)
@pytest.mark.parametrize("command", ["check", "train"])
def test_a_run_that_cannot_be_is_refused_before_anything_is_written(
    command: str,
    words: list[str],
    part: str,
    config: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regimes, model folders, tasks, devices and keys are checked by `check` and by `train`."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("MRL_CACHE", str(tmp_path / "cache"))
    # Whoever imports torch first in this process has it make this folder, empty.
    monkeypatch.setenv(COMPILED, str(tmp_path_factory.getbasetemp() / "compiled"))
    assert part in told(capsys, command, str(config), "--run.folder", str(tmp_path / "runs"), *words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "small.toml"]


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_tokenizer_whose_ids_the_library_changes_is_refused(
    command: str, config: Path, model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In one line: the file, the token, both ids, and what to do."""
    unlist_end(model)
    line = told(capsys, command, str(config), "--run.folder", str(tmp_path / "runs"))
    assert f"{model}/tokenizer.json: " in line
    assert "the added token '<|endoftext|>' an id that differs from its file; got 'id 0 in the file, id " in line
    assert "; cure: put the token into model.vocab under its id" in line


def test_a_busy_port_is_refused_before_anything_is_written(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The exchange would fail only after policies are made and processes started; a free port passes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        folder = str(tmp_path / "runs")
        words = ["--exchange.host=127.0.0.1", f"--exchange.port={port}"]
        line = told(capsys, "train", str(config), "--run.folder", folder, *words)
    assert f"[exchange] 127.0.0.1:{port}: cannot listen: the port is already in use" in line
    assert "port = 0 for a free one" in line
    assert not (tmp_path / "runs").exists()
    check_address("127.0.0.1", port)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_half_a_model_folder_is_refused(
    missing: str, config: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Configuration, tokenizer and weights have to be there."""
    (model / missing).unlink()
    assert "policies.qwen.model" in told(capsys, "check", str(config))


def test_an_existing_run_is_refused_before_policies_are_made(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The minutes of making are not spent on a run that cannot start."""
    monkeypatch.setenv("MRL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "runs" / "small").mkdir(parents=True)
    (tmp_path / "runs" / "small" / "notes").touch()
    assert "not a run of mrl" in told(capsys, "train", str(config), "--run.folder", str(tmp_path / "runs"), "--clean")
    assert not (tmp_path / "cache").exists()


def test_the_schema_knows_the_regimes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every reference in it can be followed, and [sharing] has a table per regime; the shipped file is the newest."""
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"regime", "independent", "sgt"} <= set(schema["properties"]["sharing"]["properties"])
    assert schema == json.loads((ROOT / "configs" / "mrl.schema.json").read_text()), "run: mrl schema -o configs/..."
    for reference in references(schema):
        assert reference.removeprefix("#/$defs/") in schema["$defs"], reference
    assert main(["schema", "-o", str(tmp_path / "s.json")]) == 0
    assert json.loads((tmp_path / "s.json").read_text()) == schema


def references(node: object) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for value in node.values() for found in references(value)]
    return [found for value in node for found in references(value)] if isinstance(node, list) else []


@pytest.mark.parametrize(
    "words", [["version"], ["schema"], ["train", "/nowhere.toml"], ["exchange", "--run-folder", "/nowhere"]]
)
def test_light_commands_import_no_heavy_library(words: list[str]) -> None:
    """Neither torch nor transformers is loaded to print a version or refuse a mistake."""
    code = (
        "import sys; from mrl.cli.main import main; main(sys.argv[1:]);"
        "sys.exit(' '.join({'torch', 'transformers', 'reasoning_gym'} & set(sys.modules)) or 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_reader_of_stdout_may_leave() -> None:
    """`mrl schema | head` ends without a traceback."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as nobody:
        command = [sys.executable, "-m", "mrl", "schema"]
        done = subprocess.run(command, env=environment, stdout=nobody, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
