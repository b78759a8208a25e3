"""`mrl completion`: the script, asked by real shells on a terminal of their own."""

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from mrl.cli.main import COMMANDS, main
from mrl.cli.shell.completion_script import completion_script

WAIT_S = 60.0
CONFIG = "[run]\nname = 'x'\n[tasks.sums]\nsource = 'jsonl'\n[policies.qwen.make]\n[policies.smol.learner]\nlr = 1\n"


class Shell:
    """An interactive shell that has read the script."""

    def __init__(self, shell: str, folder: Path) -> None:
        script = folder / "script"
        script.write_text(completion_script(shell))
        (folder / "mine.toml").write_text(CONFIG)
        (folder / ".zshrc").write_text("PS1='ready> '\n")
        argv = ["bash", "--norc", "--noprofile", "-i"] if shell == "bash" else ["zsh", "-i"]
        self._end, far = pty.openpty()
        self._process = subprocess.Popen(
            argv,
            stdin=far,
            stdout=far,
            stderr=far,
            cwd=folder,
            start_new_session=True,
            env=os.environ | {"PS1": "ready> ", "ZDOTDIR": str(folder), "TERM": "dumb", "INPUTRC": "/dev/null"},
        )
        os.close(far)
        self.type(
            f"source ./script; stty columns 10000; bind 'set completion-query-items 0' 2>/dev/null; {self.said}\n"
        )
        self.read_until("SAID")

    said = "echo SA''ID"

    def type(self, text: str) -> None:
        """As from a keyboard."""
        os.write(self._end, text.encode())

    def read_until(self, wanted: str) -> str:
        """What the terminal shows until it has shown `wanted`."""
        shown, end_s = "", time.monotonic() + WAIT_S
        while wanted not in shown:
            assert select.select([self._end], [], [], max(0.0, end_s - time.monotonic()))[0], f"no {wanted}: {shown!r}"
            shown += os.read(self._end, 65536).decode(errors="replace").replace("\r", "").replace("\x07", "")
        return shown

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        os.close(self._end)


@pytest.fixture(params=["bash", "zsh"])
def shell(request, tmp_path):
    """One of the shells that are here."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not here")
    one = Shell(request.param, tmp_path)
    yield one
    one.close()


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("mrl quic", "mrl quickstart"),
        ("mrl train --cle", "mrl train --clean"),
        ("mrl check min", "mrl check mine.toml"),
        ("mrl train mine.toml --run.success_r", "--run.success_reward"),
        ("mrl train mine.toml --sharing.sgt.lam", "--sharing.sgt.lambda"),
        ("mrl train mine.toml --policies.smol.learner.checkpoint_ev", "--policies.smol.learner.checkpoint_every"),
        ("mrl train mine.toml --tasks.sums.verifier_tim", "--tasks.sums.verifier_timeout_s"),
        ("mrl completion z", "mrl completion zsh"),
        ("mrl exchange k", "mrl exchange keys"),
    ],
)
def test_a_shell_completes_what_is_unique(shell, typed, completed):
    """With one press of the tabulator."""
    shell.type(f"{typed}\t")
    shell.read_until(completed)


def test_every_command_has_its_options_in_the_script():
    """Of all that people call; roles are called by launchers alone."""
    script = completion_script("bash")
    for name, command in COMMANDS.items():
        assert command.is_role or f'"{name}") words="' in script, name
    assert "--policies.$name" in script
    assert "@" not in script.replace('"${COMP_WORDS[@]}"', "").replace("pass@k", "")


def test_an_unknown_shell_is_one_line(capsys):
    """Exit code 2, with those that there are."""
    assert main(["completion", "fish"]) == 2
    assert "choose from" in capsys.readouterr().err
