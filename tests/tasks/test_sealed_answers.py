"""Hostile answers against the real sealed process, with an evaluator that runs whatever it is given."""

import ctypes
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from mrl.tasks.sealed.sealing import Sealing
from mrl.tasks.verifier_pool import VerifierPool
from mrl.tasks.verifier_process import VerifierCall
from tests.support.hostile_answers import ATTACKS, ENDLESS, program

PR_SET_CHILD_SUBREAPER = 36
RIGHT = "sesame-42-reference"
ROOT = Path(__file__).parents[2]


def make_pool(**settings) -> VerifierPool:
    """One process, that judges by an evaluator without any scruple."""
    settings = {"processes": 1, "timeout_s": 30.0, "memory_bytes": 256 * 1024**2} | settings
    sealing = Sealing("tests.support.evaluating:run")
    return VerifierPool("tests.support.evaluating:same", sealing=sealing, **settings)


def rewards(pool: VerifierPool, *answers: str) -> list[float]:
    """What the answers get, 0 where there is a failure."""
    found = pool.submit([VerifierCall(RIGHT, answer) for answer in answers]).result()
    return [one.rewards.get("", 0.0) for one in found]


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    """One for many attacks: what one leaves behind would show at the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("MRL_SECRET", "s3cret")
        with closing(make_pool()) as made:
            yield made


@pytest.fixture
def brief_pool(monkeypatch) -> Iterator[VerifierPool]:
    """One with little time."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with closing(make_pool(timeout_s=0.4)) as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def _adopted() -> Iterator[None]:
    """What an answer might start and leave becomes a child of this process, and is seen."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """The pool's process, the one that forks for the evaluator, and below it one that waits for the next answer."""
    return psutil.Process().children(recursive=True)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_gets_no_reward_and_leaves_no_trace(name, pool, tmp_path, capfd):
    """Nothing is read, written, started, signalled or said; the answers before and behind it are judged rightly."""
    right, wrong = f"result = {RIGHT!r}", "result = 'other'"
    assert rewards(pool, right, wrong) == [1.0, 0.0]
    key, made = tmp_path / "key", tmp_path / "made"
    key.write_text("k3y")
    key.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        names = {"right": RIGHT, "key": str(key), "made": str(made), "tester": os.getpid()}
        attack = program(ATTACKS[name], port=listening.getsockname()[1], **names)

        assert rewards(pool, attack, wrong, right, attack) == [0.0, 0.0, 1.0, 0.0]

        with pytest.raises(BlockingIOError):
            listening.accept()
    assert (key.read_text(), key.stat().st_mode & 0o777, sorted(tmp_path.iterdir())) == ("k3y", 0o600, [key])
    assert not list(Path("/dev/shm").glob(f"*mrl-hostile-{os.getpid()}"))
    assert len(descendants()) <= 3
    assert "FORGED" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("name", ENDLESS)
def test_an_answer_that_does_not_end_is_ended(name, brief_pool):
    """By a limit; the process that forks goes on."""
    right = f"result = {RIGHT!r}"
    assert rewards(brief_pool, right) == [1.0]
    pids = {child.process.pid for child in brief_pool._children}
    assert rewards(brief_pool, ENDLESS[name], right) == [0.0, 1.0]
    assert {child.process.pid for child in brief_pool._children} == pids


@pytest.mark.parametrize(
    "name", ["a key file, in many ways", "a file written, in many ways", "a socket", "a process by the C module"]
)
def test_without_the_seal_they_get_what_they_are_after(name, tmp_path):
    """So it is the seal that holds, and not a mistake in the attack."""
    key = tmp_path / "key"
    key.write_text("k3y")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        names = {"right": RIGHT, "key": str(key), "made": str(tmp_path / "made"), "tester": os.getpid()}
        attack = program(ATTACKS[name], port=listening.getsockname()[1], **names)
        code = f"""
            from mrl.tasks.sealed.seal import Seal
            from mrl.tasks.sealed.sealed_child import ChildLimits, run_sealed
            from tests.support.evaluating import run
            limits = ChildLimits(2**29, 30.0, 60.0)
            print(run_sealed(lambda: run({attack!r}).encode(), Seal(b"", -1), limits).reply.decode())
        """
        argv = [sys.executable, "-c", textwrap.dedent(code)]
        assert subprocess.run(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True).stdout.strip() == RIGHT
    Path(f"/dev/shm/mrl-hostile-{os.getpid()}").unlink(missing_ok=True)
