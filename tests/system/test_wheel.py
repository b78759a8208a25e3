"""The wheel is whole: installed alone, far from the repository, it runs the quickstart and what its messages name."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
SMALL = {
    "run.steps": 2,
    "run.max_minutes": 5,
    "pool.train_prompts": 64,
    "pool.held_out_prompts": 16,
    "evaluation.every": -1,
    "policies.qwen.make.warm_start_steps": 2,
    "policies.llama.make.warm_start_steps": 2,
    "policies.qwen.learner.prompts_per_step": 4,
    "policies.llama.learner.prompts_per_step": 4,
    "allocation.slots": 32,
    "allocation.floor_slots": 8,
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing is left in the repository."""
    source = tmp_path_factory.mktemp("source")
    for name in ("mrl", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    words = ["wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", "dist", "."]
    done = subprocess.run([sys.executable, "-m", "pip", *words], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = (source / "dist").glob("mrl-*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """An environment with the wheel, and with what it depends on from this one: all but its own mrl.

    A path in a .pth file brings packages and no further .pth file, so that the mrl of this environment stays out.
    """
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    words = ["install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    subprocess.run([python, "-m", "pip", *words], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder of its own, for the environment's caches and a working folder."""
    home = tmp_path_factory.mktemp("home")
    (home / "work").mkdir()
    return home


@pytest.fixture(scope="module")
def mrl(environment, home):
    """The installed command, called from the working folder; returns stdout, and checks the exit code."""
    left = {key: text for key, text in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables = left | {
        "PATH": f"{environment / 'bin'}:{left['PATH']}",
        "MRL_ENGINE_HOME": str(home / "engines"),
        "MRL_CACHE": str(home / "cache"),
    }

    def call(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            ["mrl", *words], cwd=home / "work", env=variables, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    return call


def test_what_is_installed_is_the_wheel(environment) -> None:
    """And not the repository: else the other tests of this file say nothing."""
    code = "import mrl, importlib.metadata as m; print(mrl.__file__, m.metadata('mrl')['License-Expression'])"
    python = environment / "bin" / "python"
    done = subprocess.run([python, "-c", code], cwd="/", capture_output=True, text=True, check=True)
    file, licence = done.stdout.split()

    assert Path(file).is_relative_to(environment)
    assert licence == "Apache-2.0"
    installed = {one.relative_to(Path(file).parent).as_posix() for one in Path(file).parent.rglob("*.*")}
    here = {one.relative_to(ROOT / "mrl").as_posix() for one in (ROOT / "mrl").rglob("*.*")}
    assert {one for one in here - installed if not one.endswith(".pyc")} == set()


def test_the_quickstart_runs_anywhere(mrl, home) -> None:
    """A few steps of it, and a report; then the run can be looked at and exported by the commands that it names."""
    said = mrl("quickstart", *(f"--{key}={value}" for key, value in SMALL.items()))

    named = re.findall(r"^  mrl (\S+)", said.partition("next:")[2], re.MULTILINE)
    assert named == ["inspect", "export", "compare", "quickstart", "--help"]
    assert "trim" in (home / "work" / "runs" / "quickstart" / "report.html").read_text()
    assert "these are the contents of" in mrl("inspect")
    assert "qwen" in mrl("export", "runs/quickstart", "--policy", "qwen")


def test_the_doctor_is_content_with_what_is_installed(mrl) -> None:
    """And names what is not, by commands that are there."""
    said = mrl("doctor")

    for command in re.findall(r"mrl (engine-env \w+ --cpu)", said):
        assert mrl(*command.split(), "--path").strip().endswith("/bin/python")
    assert len(re.findall(r"mrl engine-env", said)) == 2


def test_a_missing_engine_is_cured_by_a_command_that_is_there(mrl) -> None:
    """Its recipe lies in the wheel."""
    assert "cure: mrl engine-env vllm --cpu" in mrl("doctor", "vllm", "--device", "cpu", code=2)
