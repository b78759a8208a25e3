"""Requests to end a run lie in its folder until the supervisor takes them."""

import json
from pathlib import Path

from mrl.config.stop_request import clear_requests, file_stop_request, is_ended, note_ended, take_requests


def test_a_request_is_taken_once_and_says_who_asked(tmp_path: Path) -> None:
    """Of a policy and of the whole run, oldest first."""
    first = file_stop_request(tmp_path, "qwen")
    file_stop_request(tmp_path)
    taken = take_requests(tmp_path)
    assert [request.policy for request in taken] == ["qwen", ""]
    assert " on " in taken[0].by
    assert "pid" in taken[0].by
    assert not first.exists()
    assert take_requests(tmp_path) == []


def test_what_cannot_be_read_is_dropped(tmp_path: Path) -> None:
    """Anybody who can write the folder can leave anything there; a half-written file has another name."""
    folder = tmp_path / "requests"
    folder.mkdir()
    for number, text in enumerate(("", "[]", "\xff", json.dumps({"policy": "a"}), "x" * 10_000)):
        (folder / f"stop-{number}.json").write_bytes(text.encode("latin-1"))
    (folder / ".stop-a.json.tmp").write_text("{}")
    assert take_requests(tmp_path) == []
    assert [path.name for path in folder.iterdir()] == [".stop-a.json.tmp"]


def test_the_end_of_a_policy_is_told_and_forgotten_with_the_attempt(tmp_path: Path) -> None:
    """What an earlier attempt did says nothing about this one."""
    file_stop_request(tmp_path, "a")
    note_ended(tmp_path, "a")
    assert is_ended(tmp_path, "a")
    assert not is_ended(tmp_path, "b")
    clear_requests(tmp_path)
    assert not is_ended(tmp_path, "a")
    assert take_requests(tmp_path) == []
