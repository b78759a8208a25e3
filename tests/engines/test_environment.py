"""Where an engine's environment lies, as the worker and `mrl engine-env` say."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.engines.environment import RECIPES, engine_python, environment_folder
from mrl.errors import EngineError


@pytest.fixture
def recipes(tmp_path) -> Path:
    """Constraints and a recipe of one engine."""
    folder = tmp_path / "recipes"
    (folder / "vllm_cpu").mkdir(parents=True)
    for name in ("vllm-cpu.txt", "vllm.sh", "vllm_cpu/stand_in.py"):
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty folder of environments."""
    monkeypatch.setenv("MRL_ENGINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("changed", ["vllm-cpu.txt", "vllm.sh", "vllm_cpu/stand_in.py"])
def test_whatever_an_environment_is_made_from_decides_its_place(recipes, home, changed):
    """Another constraint, recipe or stand-in has another folder; the same ones have the same."""
    before = environment_folder("vllm", "cpu", recipes=recipes)
    assert before == environment_folder("vllm", "cpu", recipes=recipes)
    assert before.parent == home
    assert before.name.startswith("vllm-cpu-")

    (recipes / changed).write_text("something else")

    assert environment_folder("vllm", "cpu", recipes=recipes) != before


def test_a_comment_in_a_list_makes_no_other_environment(recipes, home):
    """It would be made anew, of the same packages."""
    before = environment_folder("vllm", "cpu", recipes=recipes)
    list_of_packages = recipes / "vllm-cpu.txt"
    list_of_packages.write_text(f"# a word about it\n{list_of_packages.read_text()}")

    assert environment_folder("vllm", "cpu", recipes=recipes) == before


def test_an_engine_without_a_recipe_is_named(recipes):
    """With those that have one."""
    with pytest.raises(EngineError, match=r"no installation recipe.*'sglang-gpu'.*wanted vllm-cpu"):
        environment_folder("sglang", "gpu", recipes=recipes)


@pytest.mark.parametrize(("device", "cure"), [("cpu", "mrl engine-env vllm --cpu"), ("cuda", "mrl engine-env vllm")])
def test_a_missing_environment_is_cured_by_the_command_that_makes_it(home, device, cure):
    """The message ends with it."""
    with pytest.raises(EngineError, match=r"the environment of vllm is missing") as caught:
        engine_python("vllm", device=device)

    assert str(caught.value).endswith(cure)


def test_a_configured_interpreter_is_taken_or_named(home, tmp_path):
    """Somebody's own environment needs no place in the cache."""
    python = tmp_path / "python"
    with pytest.raises(EngineError, match=str(python)):
        engine_python("vllm", device="cpu", configured=str(python))

    python.touch(mode=0o755)

    assert engine_python("vllm", device="cpu", configured=str(python)) == python


def test_an_environment_in_place_of_its_interpreter_is_named(tmp_path):
    """A folder may be entered, which looks to the kernel like a file that may be run."""
    with pytest.raises(EngineError, match=r"server.python of vllm is a folder.*cure: set .* = .*/bin/python"):
        engine_python("vllm", device="cpu", configured=str(tmp_path))


@pytest.mark.parametrize("words", [["vllm", "--cpu"], ["vllm"]])
def test_the_command_looks_where_the_worker_looks(home, words, capsys):
    """`--path` makes nothing."""
    assert main(["engine-env", *words, "--path"]) == 0

    kind = "cpu" if "--cpu" in words else "gpu"
    assert capsys.readouterr().out.strip() == str(environment_folder("vllm", kind) / "bin" / "python")
    assert not home.exists()


def test_an_environment_that_is_there_is_not_made_again(home, capsys):
    """Its interpreter is printed at once."""
    python = environment_folder("vllm", "cpu") / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch(mode=0o755)

    assert main(["engine-env", "vllm", "--cpu"]) == 0

    assert capsys.readouterr().out.strip() == str(python)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["tgi"], "invalid choice: 'tgi' (choose from 'vllm', 'sglang')"),
        (["vllm", "--cpu", "--check"], "--check cannot be combined with --cpu; wanted the packages for GPUs"),
    ],
)
def test_the_command_refuses_what_it_does_not_know(home, words, told, capsys):
    """In one line, with what it knows."""
    assert main(["engine-env", *words]) == 2

    line = capsys.readouterr().err
    assert told in line
    assert line.count("\n") == 1


@pytest.mark.system
def test_a_failed_recipe_leaves_its_output_and_nothing_else(recipes, home):
    """The script that makes environments, given a recipe that fails at once."""
    (recipes / "vllm.sh").write_text("echo no such wheel >&2; exit 1")
    script = Path(shutil.copy(RECIPES / "engine_env.sh", recipes))
    folder = home / "vllm-cpu-0"

    words = ["bash", str(script), "make", "vllm", "cpu", str(folder), sys.executable]
    said = subprocess.run(words, capture_output=True, text=True)

    assert said.returncode == 2
    assert "no such wheel" in said.stderr
    assert sorted(path.name for path in home.iterdir()) == ["vllm-cpu-0.failed.log", "vllm-cpu-0.lock"]


@pytest.mark.system
def test_a_made_environment_is_whole(recipes, home):
    """A recipe that ends well: the interpreter is the last line, and runs."""
    (recipes / "vllm.sh").write_text('"$1" -c "print(1)"')
    script = Path(shutil.copy(RECIPES / "engine_env.sh", recipes))

    words = ["bash", str(script), "make", "vllm", "cpu", str(home / "vllm-cpu-0"), sys.executable]
    said = subprocess.run(words, capture_output=True, text=True, check=True)

    python = said.stdout.splitlines()[-1]
    assert python == str(home / "vllm-cpu-0" / "bin" / "python")
    assert subprocess.run([python, "-c", "print(2)"], capture_output=True, text=True, check=True).stdout == "2\n"


@pytest.mark.system
def test_cudas_compiler_finds_its_libraries_in_the_environment_of_sglang(tmp_path):
    """By the names that it links with: wheels have others."""
    libraries = tmp_path / "nvidia" / "cu13" / "lib"
    libraries.mkdir(parents=True)
    (libraries / "libcudart.so.13").touch()
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {tmp_path}\n")
    python.chmod(0o755)

    subprocess.run(["bash", RECIPES / "sglang.sh", python, "gpu", RECIPES / "sglang-gpu.txt"], check=True)

    assert (tmp_path / "nvidia" / "cu13" / "lib64" / "libcudart.so").samefile(libraries / "libcudart.so.13")


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_index_has_all_of_the_lists_for_gpus_and_they_fit_together(engine):
    """By metadata alone. Where no index answers the test is left out, but not in CI."""
    words = [sys.executable, "-m", "mrl", "engine-env", engine, "--check"]
    said = subprocess.run(words, capture_output=True, text=True)

    if re.search(r"install uv|[Ff]ailed to fetch|error sending request", said.stderr) and not os.environ.get("CI"):
        pytest.skip(f"no index: {said.stderr[-300:]}")
    assert said.returncode == 0, said.stderr
    assert re.search(r"\d+ packages resolve\n$", said.stderr)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_list_for_gpus_names_one_version_of_each_package(engine):
    """As its recipe resolves nothing."""
    lines = [one for one in (RECIPES / f"{engine}-gpu.txt").read_text().splitlines() if not one.startswith("#")]

    assert [one for one in lines if not re.fullmatch(r"[\w.-]+==[\w.+-]+", one)] == []
