"""The folder that processes of a run have in common on one host."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.config.run_folder import LOCAL_FOLDER, local_folder
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError
from mrl.processes.planning.local_folder import PREFIX, local_folder_of, parent_of
from mrl.transport.server import MAX_IPC_PATH_BYTES
from tests.support.word_runs import word_run


def config_of(policy: str = "a", local: str = "") -> RunConfig:
    return word_run({policy: {}}, run={"local_folder": local})


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_it_is_private_and_found_by_children_and_gone_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with what lies in it."""
    monkeypatch.delenv(LOCAL_FOLDER, raising=False)
    assert local_folder() is None
    with local_folder_of(config_of(local=str(tmp_path))) as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
        child = "from mrl.config.run_folder import local_folder; print(local_folder())"
        said = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
        assert said.strip() == str(folder)
        (folder / "a-attempt_1-1.ranks").touch()
        with local_folder_of(config_of(local=str(tmp_path))) as another:
            assert another != folder
            assert folder.is_dir(), "that of a run that goes on"
        os.environ[LOCAL_FOLDER] = str(folder)
    assert list(tmp_path.iterdir()) == []
    assert local_folder() is None


def test_what_a_killed_supervisor_left_goes_with_the_next_run(tmp_path: Path) -> None:
    """Nobody owns it."""
    config = f"{config_of(local=str(tmp_path)).model_dump_json()}"
    left = (
        "import os; from mrl.config.schema import RunConfig\n"
        "from mrl.processes.planning.local_folder import local_folder_of\n"
        f"held = local_folder_of(RunConfig.model_validate_json({config!r})); held.__enter__(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", left], check=False).returncode == -signal.SIGKILL
    (stale,) = tmp_path.glob(f"{PREFIX}*")
    with local_folder_of(config_of(local=str(tmp_path))):
        assert not stale.exists()


def test_it_lies_in_the_temporary_folder(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the user's runtime folder, which goes when the user logs out; a long temporary one is of no use."""
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    runtime = short / "user"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert parent_of(config_of()) == short
    deep = short / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert parent_of(config_of()) == Path("/tmp")


@pytest.mark.parametrize("policy", ["a", "p" * 32])
def test_paths_of_sockets_may_be_just_as_long_as_the_kernel_takes_them(short: Path, policy: str) -> None:
    """One byte more is refused, in one line that names the key."""
    socket = f"{PREFIX}12345678/" + max(f"learner-{policy}", "exchange", key=len)
    fill = MAX_IPC_PATH_BYTES - len(str(short)) - len("//") - len(socket)
    fits, too_long = short / ("f" * fill), short / ("f" * (fill + 1))
    for folder in (fits, too_long):
        folder.mkdir()
    assert parent_of(config_of(policy, str(fits))) == fits
    with pytest.raises(ConfigError, match=r"run.local_folder: socket paths would be 1 bytes over the limit of 107"):
        parent_of(config_of(policy, str(too_long)))


def test_what_is_no_folder_of_this_host_is_refused(tmp_path: Path) -> None:
    """Nobody makes it, so that a misspelt one is told."""
    with pytest.raises(ConfigError, match=r"run.local_folder: not a folder on this host; got '.*/nowhere'"):
        parent_of(config_of(local=str(tmp_path / "nowhere")))
