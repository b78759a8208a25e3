"""`mrl exchange keys` as a person meets it."""

import json
import re
from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.transport.allow_list import fingerprint, read_entries
from mrl.transport.grants import Grant
from mrl.transport.keys import create_keys, load_client_keys, load_keys

QWEN = Grant("worker", "qwen")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with the least that the command reads."""
    config = {
        "run": {"name": "r", "steps": 1},
        "tasks": {"reverse": {"source": "words", "dataset": "reverse"}},
        "policies": {"qwen": {"model": "/nowhere"}, "llama": {"model": "/nowhere"}},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    create_keys(tmp_path / "keys", [QWEN])
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> str:
    """What a command that succeeds prints."""
    assert main(["exchange", "keys", str(run), *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def told(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> str:
    """The one line that a refused command leaves on stderr."""
    assert main(["exchange", "keys", str(run), *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.startswith("mrl: error: ")) == ("", 1, True)
    return err


def test_list_shows_every_key_and_no_secret(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    """Name, role, policy, fingerprint, when it was made and when revoked."""
    said(capsys, run, "revoke", "worker/qwen")
    out = said(capsys, run, "list")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip() and "──" not in line}
    assert list(rows) == ["name", "supervisor", "exchange", "allocator", "gateway", "admin", "worker/qwen"]
    [revoked] = [entry for entry in read_entries(run / "keys") if entry.grant == QWEN]
    assert rows["worker/qwen"][:4] == ["worker/qwen", "worker", "qwen", fingerprint(revoked.public)]
    assert len(re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", " ".join(rows["worker/qwen"]))) == 2
    assert rows["admin"][1:3] == ["admin", "-"]
    assert rows["admin"][-1] == "-"
    secrets = [load_keys(run / "keys").server_secret, load_client_keys(run / "keys", Grant("admin")).secret]
    assert not any(secret.decode() in out for secret in secrets)


def test_a_key_is_revoked_and_made_anew(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    """What is said names the key and where the new one lies; the two differ."""
    before = load_client_keys(run / "keys", QWEN)
    assert said(capsys, run, "revoke", "worker/qwen").startswith(
        f"revoked worker/qwen ({fingerprint(before.public.decode())})"
    )
    out = said(capsys, run, "make", "worker", "qwen")
    after = load_client_keys(run / "keys", QWEN)
    assert after.public != before.public
    assert out == (f"made worker/qwen ({fingerprint(after.public.decode())}) in {run / 'keys' / 'worker.qwen.json'}\n")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["make", "worker", "qwen"], ["a key of this name already exists", "'worker/qwen'", "revoke worker/qwen"]),
        (["make", "worker", "gemma"], ["no such policy", "'gemma'", "qwen, llama"]),
        (["make", "worker"], ["a worker needs a policy"]),
        (["make", "exchange", "qwen"], ["the role exchange takes no policy", "'qwen'"]),
        (["make", "king"], ["invalid choice: 'king'"]),
        (["make"], ["required: ROLE"]),
        (["revoke", "worker/gemma"], ["no such key", "'worker/gemma'", "worker/qwen"]),
        ([], ["required: list|make|revoke"]),
        (["forget"], ["invalid choice: 'forget'"]),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], run: Path, words: list[str], parts: list[str]
) -> None:
    """What is wrong, what was wanted, and nothing is changed."""
    before = read_entries(run / "keys")
    line = told(capsys, run, *words)
    assert [part for part in parts if part not in line] == []
    assert read_entries(run / "keys") == before


def test_a_folder_without_a_run_or_without_keys_is_one_line(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    """Nothing is made in it."""
    assert "not a run folder" in told(capsys, run / "nowhere", "list")
    assert not (run / "nowhere").exists()
    for file in (run / "keys").iterdir():
        file.unlink()
    (run / "keys").rmdir()
    assert "mrl train" in told(capsys, run, "make", "worker", "qwen")
    assert not (run / "keys").exists()


def test_the_role_of_the_same_name_is_still_there(capsys: pytest.CaptureFixture[str]) -> None:
    """`mrl exchange` without `keys` starts the daemon."""
    assert main(["exchange", "--run-folder", "/nowhere"]) == 2
    assert "/nowhere: not a run folder" in capsys.readouterr().err
