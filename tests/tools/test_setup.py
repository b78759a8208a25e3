"""What `tools/setup.sh` shows while it installs; the interpreter and its pip are stand-ins that wait to be let go."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
PYTHON = """#!/usr/bin/env bash
case "$1 $2" in
    "-m venv") mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; echo >"$4/bin/mrl"; chmod +x "$4/bin/mrl" ;;
    "-m pip") echo "  Downloading torch-9.9 (190 MB)"; read -r _ <"$GATE" ;;
    "-c import urllib"*) exit 1 ;;
    *) exec {python} "$@" ;;
esac
"""


def copy_of(folder: Path) -> dict[str, str]:
    """A tree with the script and what it reads; returns the environment that it is called in."""
    (folder / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "setup.sh", folder / "tools")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    python = folder / "python3"
    python.write_text(PYTHON.replace("{python}", sys.executable))
    python.chmod(0o755)
    os.mkfifo(folder / "gate")
    return {**os.environ, "PYTHON": str(python), "GATE": str(folder / "gate")}


def read_until(word: bytes, terminal: int) -> bytes:
    """What the terminal shows up to this word, or all that it shows within a bound."""
    seen, deadline_s = b"", time.monotonic() + PATIENCE_S
    while word not in seen and select.select([terminal], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
        seen += os.read(terminal, 4096)
    return seen


def test_on_a_terminal_a_line_that_changes_says_what_is_installed(tmp_path: Path) -> None:
    """While pip works; the line is wiped out in the end."""
    environment = copy_of(tmp_path)
    ours, theirs = pty.openpty()
    with subprocess.Popen(["bash", "tools/setup.sh"], cwd=tmp_path, env=environment, stdout=theirs) as process:
        os.close(theirs)
        seen = read_until(b"torch-9.9", ours)
        (tmp_path / "gate").write_text("go\n")
        seen += read_until(b"done in", ours)
    os.close(ours)
    assert process.returncode == 0
    assert re.search(rb"\r\x1b\[Ksetup: \d+ s, Downloading torch-9.9 \(190 MB\)", seen)
    assert b"\r\x1b[Ksetup: done in" in seen


def test_a_log_gets_whole_lines_alone(tmp_path: Path) -> None:
    """The first one before anything is installed, and no control characters."""
    environment = copy_of(tmp_path)
    with subprocess.Popen(
        ["bash", "tools/setup.sh"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(f"setup: making {tmp_path}/.venv with Python 3")
        assert process.stdout.readline().startswith("setup: installing mrl[tasks]")
        (tmp_path / "gate").write_text("go\n")
        rest = process.stdout.read()
    assert process.returncode == 0
    assert rest.splitlines()[-1].startswith("setup: done in")
    assert all(line.startswith("setup: ") for line in rest.splitlines())
    assert "\x1b" not in rest


def test_an_environment_of_another_folder_is_not_emptied(tmp_path: Path) -> None:
    """Which `.venv` may be a link to: the script that would make its own there refuses, and says why."""
    environment = copy_of(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "kept").write_text("")
    (tmp_path / ".venv").symlink_to(other)
    found = subprocess.run(["bash", "tools/setup.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.returncode == 2
    assert f"is a link to {other}" in found.stderr
    assert (other / "kept").exists()
