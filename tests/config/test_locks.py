"""A file system without locks, by a library that stands before the kernel's call for files below one folder."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.config.load import validate
from mrl.config.run_folder import create_run_folder

WITHOUT_LOCKS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int flock(int file, int operation)
{
    char name[64], path[4096] = "";
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    if (readlink(name, path, sizeof path - 1) > 0 && !strncmp(path, getenv("UNDER"), strlen(getenv("UNDER")))) {
        errno = atoi(getenv("REFUSED_AS"));
        return -1;
    }
    return ((int (*)(int, int))dlsym(RTLD_NEXT, "flock"))(file, operation);
}
"""
TABLES = {
    "run": {"name": "r", "steps": 1},
    "tasks": {"copy": {"source": "words", "dataset": "copy"}},
    "policies": {"a": {"model": "m"}},
}
CREATE = """
from mrl.config.load import validate
from mrl.config.run_folder import create_run_folder
create_run_folder(validate({tables!r}, where="test"))
"""
HOLD = "from pathlib import Path; from mrl.weights.read_lock import read_lock; read_lock(Path({folder!r})).__enter__()"


def tables_in(folder: Path) -> dict[str, Any]:
    return TABLES | {"run": {**TABLES["run"], "folder": str(folder)}}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled here."""
    compiler = shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no gcc")
    source = tmp_path_factory.mktemp("flock") / "flock.c"
    source.write_text(WITHOUT_LOCKS)
    made = source.with_suffix(".so")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True)
    return made


@pytest.fixture
def refused(library: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs Python where nothing in this test's folder can be locked; the last line that it complains with."""

    def run(*words: str, refused_as: int = 37) -> str:  # ENOLCK
        environment = os.environ | {"LD_PRELOAD": str(library), "UNDER": str(tmp_path), "REFUSED_AS": str(refused_as)}
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode in (1, 2), done.stderr
        return done.stderr.splitlines()[-1]

    return run


@pytest.mark.parametrize(
    ("refused_as", "said"), [(37, "No locks available"), (95, "Operation not supported"), (38, "not implemented")]
)
def test_a_run_is_not_begun_where_nothing_can_be_locked(
    refused: Callable[..., str], tmp_path: Path, refused_as: int, said: str
) -> None:
    """What is wrong is the file system, not another run; nothing is left behind."""
    folder = tmp_path / "runs"
    line = refused("-c", CREATE.format(tables=tables_in(folder)), refused_as=refused_as)
    assert "the file system does not support file locks" in line
    assert said in line
    assert "still running" not in line.replace("whether a run is still running", "")
    assert "Lustre" in line
    assert not folder.exists()


def test_nobody_takes_it_for_a_run_that_goes_on(refused: Callable[..., str], tmp_path: Path) -> None:
    """`mrl stop` would wait for a supervisor that there may not be."""
    folder = create_run_folder(validate(tables_in(tmp_path), where="test")).path
    line = refused("-m", "mrl", "stop", str(folder))
    assert line.startswith(f"mrl: error: {folder}: the file system does not support file locks (No locks available)")


def test_weights_cannot_be_held_there(refused: Callable[..., str], tmp_path: Path) -> None:
    """Nor are they taken for pruned ones."""
    (tmp_path / "model.safetensors").touch()
    line = refused("-c", HOLD.format(folder=str(tmp_path)))
    assert "model.safetensors: the file system does not support file locks" in line
