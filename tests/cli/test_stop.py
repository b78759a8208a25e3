"""`mrl stop`: what it refuses, and what it waits for."""

import threading
import time
from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.config.run_folder import RunFolder, create_run_folder, lock_run_folder
from mrl.config.stop_request import note_ended, take_requests
from tests.support.word_runs import word_run


def run_in(folder: Path, *, sync: bool = False) -> RunFolder:
    return create_run_folder(word_run({"a": {}, "b": {}}, run={"folder": str(folder), "min_free_mib": 0, "sync": sync}))


@pytest.mark.parametrize(
    ("words", "sync", "part"),
    [
        (["--policy", "c"], False, "no such policy; got 'c'; wanted a, b"),
        (["--policy", "a"], True, "a synchronous run waits for all of its policies"),
        ([], False, "the run is not running"),
    ],
)
def test_what_cannot_be_stopped_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], sync: bool, part: str
) -> None:
    """Exit code 2, and no request is left for a later attempt."""
    folder = run_in(tmp_path, sync=sync)
    assert main(["stop", str(folder.path), *words]) == 2
    said = capsys.readouterr().err
    assert part in said
    assert said.count("\n") == 1
    assert take_requests(folder.path) == []


def test_a_folder_that_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is made in it."""
    assert main(["stop", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_request_is_filed_and_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one policy until its processes are gone, of the run until its supervisor is."""
    folder = run_in(tmp_path)
    release = lock_run_folder(folder)
    assert main(["stop", str(folder.path)]) == 0
    assert [request.policy for request in take_requests(folder.path)] == [""]
    seen: list[str] = []

    def supervise() -> None:
        for is_run in (False, True):
            while not (taken := take_requests(folder.path)):
                time.sleep(0.01)
            seen.append(taken[0].policy)
            time.sleep(0.3)
            release() if is_run else note_ended(folder.path, "a")

    supervisor = threading.Thread(target=supervise)
    supervisor.start()
    began_s = time.monotonic()
    assert main(["stop", str(folder.path), "--policy", "a", "--wait"]) == 0
    assert time.monotonic() - began_s > 0.3
    assert main(["stop", str(folder.path), "--wait"]) == 0
    assert time.monotonic() - began_s > 0.6
    supervisor.join()
    assert seen == ["a", ""]
    assert "a has ended" in capsys.readouterr().out
