"""A judge on loopback: rewards, what is kept and counted, and every fault of a server, each within its bounds."""

import json
import os
import re
import socket
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mrl.config.load import validate
from mrl.config.rules.reward_rules import check_rewards
from mrl.config.schema import RunConfig
from mrl.config.task_tables import JUDGE, JudgeTable, TaskTable
from mrl.errors import ConfigError
from mrl.metrics.names import is_known
from mrl.tasks.judging import judge_model, judge_request
from mrl.tasks.judging.judge_model import question, score_in
from mrl.tasks.rewards import RAISED
from mrl.tasks.source import Item
from mrl.tasks.sources import open_source
from mrl.tasks.verify import Judge, Verdict

KEY = "a-key-that-nobody-may-read"
PAGE = Path(__file__).parents[3] / "docs/judges.md"
Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any], int], None]


def say(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def reply(text: object, **usage: object) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}], "usage": usage}).encode()


def scored(handler: BaseHTTPRequestHandler, body: dict[str, Any], number: int) -> None:
    """9 for an answer with a "yes", else 2."""
    score = 9 if "yes" in body["messages"][-1]["content"] else 2
    say(handler, reply(f"Score: 1. No, after all:\nScore: {score}", prompt_tokens=40, completion_tokens=7))


class Server:
    """A judge whose words a function gives; it remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.answer: Answer = scored
        outer, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.asked.append(body)
                    outer.paths.append(self.path)
                    outer.keys.append(self.headers.get("Authorization"))
                    number = len(outer.asked)
                outer.answer(self, body, number)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A judge; what is kept lies in a folder of the test, and no proxy stands between."""
    monkeypatch.setenv("MRL_CACHE", str(tmp_path / "kept"))
    judge = Server()
    yield judge
    judge.close()


def task(url: str, *, timeout_s: float = 20.0, failed_reward: float = 0.0, **judge: Any) -> TaskTable:
    tables = {"source": "jsonl", "dataset": "x", "verifier_timeout_s": timeout_s, "failed_reward": failed_reward}
    return TaskTable.model_validate(tables | {"judge": {"url": url, "model": "j", "backoff_s": 0.01} | judge})


def verdicts(table: TaskTable, *answers: str, tmp_path: Path) -> tuple[list[Verdict], dict[str, float]]:
    """By the processes of a task, with what they counted."""
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "Is it? {answer}", "reference": "of course"}) + "\n")
    table = table.model_copy(update={"dataset": str(data)})
    source = open_source("t", table, seed=0)
    item: Item = next(iter(source.items(1)))
    judge = Judge({"t": table})
    try:
        found = judge.submit_answers("t", source, [(item, answer) for answer in answers]).result(60)
        return found, judge.values()
    finally:
        judge.close()


def asked(table: TaskTable, monkeypatch: pytest.MonkeyPatch, answer: str = "yes") -> float:
    """The reward of one answer, in this process."""
    settings = judge_model.judge_environment(table, {})
    assert settings is not None
    monkeypatch.setenv(judge_model.SETTINGS, settings[judge_model.SETTINGS])
    return judge_model.judge("of course", answer, "Is it?")


def failure(table: TaskTable, monkeypatch: pytest.MonkeyPatch, answer: str = "yes") -> judge_request.JudgeError:
    with pytest.raises(judge_request.JudgeError) as caught:
        asked(table, monkeypatch, answer)
    return caught.value


def test_answers_get_what_the_judge_says(server: Server, tmp_path: Path) -> None:
    """Its last score, between 0 and 1; tokens are counted as the server counts them, and equal questions asked once."""
    table = task(server.url)
    found, counts = verdicts(table, "yes", "no", tmp_path=tmp_path)
    assert [one.reward for one in found] == [0.9, 0.2]
    known = {"verify/answers": 2.0, "verify/pending": 0.0}
    spent = {"requests": 2.0, "prompt_tokens": 80.0, "completion_tokens": 14.0}
    assert counts == known | {f"verify/judge/{name}": count for name, count in spent.items()} | {
        "verify/judge/cached": 0.0
    }
    assert all(map(is_known, counts))

    again, counts = verdicts(table, "no", "yes", tmp_path=tmp_path)
    assert [one.reward for one in again] == [0.2, 0.9]
    assert (counts["verify/judge/cached"], counts["verify/judge/requests"], len(server.asked)) == (2.0, 0.0, 2)
    assert server.paths == ["/v1/chat/completions"] * 2
    assert server.keys == [None, None]


def test_failures_of_a_judge_are_failures_of_the_verifier(server: Server, tmp_path: Path) -> None:
    """Counted with what they cost, with the words in the verdict and the task's reward for failures."""
    server.answer = lambda handler, body, number: say(
        handler, reply("I like it.", prompt_tokens=5, completion_tokens=3)
    )
    (verdict,), counts = verdicts(task(server.url, failed_reward=-0.5), "yes", tmp_path=tmp_path)
    assert (verdict.reward, verdict.failure) == (-0.5, RAISED)
    assert verdict.words.startswith(
        "JudgeError: the judge said 'I like it.'; wanted a score from 0 to 10 that matches '"
    )
    assert (counts["verify/failures/raised"], counts["verify/judge/completion_tokens"]) == (1.0, 3.0)
    assert not list((tmp_path / "kept").rglob("*"))


RUBBISH = [
    (reply("Score: 11"), "the judge said 'Score: 11'; wanted a score from 0 to 10"),
    (reply("Score: -1"), "wanted a score from 0 to 10"),
    (reply("Score: nine"), "wanted a score"),
    (reply(""), "wanted a score"),
    (reply(None), r"no choices\[0\]\.message\.content"),
    (b'{"choices": []}', r"no choices\[0\]\.message\.content"),
    (b'{"choices": {"0": 1}}', r"no choices\[0\]\.message\.content"),
    (b"[]", "the reply is not a JSON object"),
    (b"<html>", "the reply is not a JSON object: '<html>'"),
    (b"[" * 100_000, "the reply is not a JSON object"),
    (b"", "the reply is not a JSON object"),
    (b'{"x": "' + b"y" * (1 << 20) + b'"}', "the reply is longer than 1,048,576 bytes"),
]


@pytest.mark.parametrize(("body", "told"), RUBBISH, ids=[told[:40] + str(n) for n, (_, told) in enumerate(RUBBISH)])
def test_rubbish_is_no_score(server: Server, monkeypatch: pytest.MonkeyPatch, body: bytes, told: str) -> None:
    """And is not asked for again."""
    server.answer = lambda handler, *_: say(handler, body)
    error = failure(task(server.url), monkeypatch)
    assert error.spent.requests == 1
    assert re.search(told, str(error))


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_is_busy_is_asked_again(server: Server, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """As often as `retries` says, and then it is a failure."""

    def busy(handler: BaseHTTPRequestHandler, body: dict[str, Any], number: int) -> None:
        if number < 3:
            say(handler, b"later", status)
        else:
            scored(handler, body, number)

    server.answer = busy
    assert asked(task(server.url, retries=2), monkeypatch) == 0.9
    server.asked.clear()
    assert str(failure(task(server.url, retries=1, cache=False), monkeypatch)) == (
        f"status {status}: later after 2 requests"
    )


def test_pauses_double_and_are_what_the_server_asks_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry-After in seconds counts; a pause for which there is no time left is none."""
    pauses: list[float] = []
    monkeypatch.setattr(judge_request.time, "sleep", pauses.append)
    server.answer = lambda handler, body, number: say(handler, b"", 429, Retry_After="7" if number == 2 else "soon")
    failure(task(server.url, retries=3, backoff_s=0.5), monkeypatch)
    assert 0.5 <= pauses[0] <= 0.75
    assert pauses[1] == 7.0
    assert 2.0 <= pauses[2] <= 3.0
    pauses.clear()
    server.answer = lambda handler, *_: say(handler, b"", 429, Retry_After="3600")
    error = failure(task(server.url, timeout_s=1.0), monkeypatch)
    assert str(error) == "status 429: ; no time left for another request"
    assert pauses == []


@pytest.mark.parametrize("status", [302, 400, 401, 404])
def test_other_statuses_are_final(server: Server, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """A redirect too, which would take the key elsewhere."""
    server.answer = lambda handler, *_: say(handler, b"no such model", status, Location=server.url + "/other")
    assert str(failure(task(server.url), monkeypatch)) == f"status {status}: no such model"
    assert len(server.asked) == 1


def hangs(handler: BaseHTTPRequestHandler, body: dict[str, Any], number: int) -> None:
    handler.connection.recv(1)  # until the other side has given up


def drips(handler: BaseHTTPRequestHandler, body: dict[str, Any], number: int) -> None:
    """A byte at a time, each soon enough after the one before."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    handler.connection.settimeout(0.02)
    for _ in range(3000):
        try:
            handler.wfile.write(b" ")
            if not handler.connection.recv(1):
                return
        except TimeoutError:
            continue
        except OSError:
            return


@pytest.mark.parametrize("late", [hangs, drips])
def test_nobody_waits_for_long(server: Server, monkeypatch: pytest.MonkeyPatch, late: Answer) -> None:
    """A server that says nothing, and one whose every byte comes soon."""
    server.answer = late
    began_s = time.monotonic()
    table = JudgeTable(url=server.url, model="j", timeout_s=0.2, retries=1, backoff_s=0.01)
    error = failure(task(server.url).model_copy(update={"judge": table}), monkeypatch)
    assert str(error) == "no reply within 0.2 s after 2 requests"
    assert time.monotonic() - began_s < 30


def test_a_server_that_is_not_there_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing listens at this port, which is bound."""
    monkeypatch.setenv("MRL_CACHE", str(tmp_path))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        error = failure(task(f"http://127.0.0.1:{bound.getsockname()[1]}", retries=1), monkeypatch)
    assert "ConnectionRefusedError" in str(error)
    assert error.spent.requests == 2


def test_the_key_goes_to_the_judge_and_nowhere_else(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not into what is told when the server repeats it, nor onto the disk."""
    monkeypatch.setenv("MY_JUDGE", KEY + "\n")  # as files of secrets end
    table = task(server.url, key_variable="MY_JUDGE")
    assert asked(table, monkeypatch) == 0.9
    assert server.keys == [f"Bearer {KEY}"]
    server.answer = lambda handler, *_: say(handler, f"wrong key {KEY}".encode(), 401)
    assert str(failure(table, monkeypatch, "no")) == "status 401: wrong key ***"
    assert [file for file in tmp_path.rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()] == []
    assert KEY not in str(judge_model.judge_environment(table, {}))
    monkeypatch.setenv("MY_JUDGE", f"{KEY}\nX: y")
    with pytest.raises(judge_request.JudgeError, match="an HTTP header cannot hold") as caught:
        judge_model._headers(table.judge)
    assert KEY not in str(caught.value)
    monkeypatch.delenv("MY_JUDGE")
    assert str(failure(table, monkeypatch, "other")) == (
        "the environment variable MY_JUDGE for the judge's key is not set"
    )


def test_what_is_kept_goes_by_all_that_it_depends_on(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model, question, options and scale; what is damaged there is asked for again."""
    asked(task(server.url), monkeypatch)
    asked(task(server.url, retries=1, max_tokens=512), monkeypatch)
    assert len(server.asked) == 1
    others = ({"model": "k"}, {"most": 9.0}, {"system": "Be kind."}, {"options": {"temperature": 1.0}})
    for number, other in enumerate(others, start=2):
        asked(task(server.url, **other), monkeypatch)
        assert len(server.asked) == number
    assert server.asked[-2]["messages"][0] == {"role": "system", "content": "Be kind."}
    assert server.asked[-1]["temperature"] == 1.0
    for file in Path(os.environ["MRL_CACHE"]).rglob("*"):
        if file.is_file():
            file.write_text("7.0")
    assert asked(task(server.url), monkeypatch) == 0.9
    asked(task(server.url, cache=False), monkeypatch)
    assert len(server.asked) == 7


def test_braces_of_an_answer_are_its_own() -> None:
    """They name nothing of the template."""
    table = JudgeTable(url="http://h", model="j", template="{prompt}|{answer}|{reference}|{other}")
    body = question(table, prompt="{answer}", answer="{reference}{prompt}", reference="r")
    assert body["messages"] == [{"role": "user", "content": "{answer}|{reference}{prompt}|r|{other}"}]


def test_scores_are_numbers_within_their_bounds() -> None:
    """As the pattern finds them; the last one counts."""
    table = JudgeTable(url="http://h", model="j", score=r"\[\[(.*?)\]\]", least=1.0, most=5.0)
    said = {"[[1]]": 1.0, "[[5]] or [[4.5]]": 4.5, "[[0.5]]": None, "[[nan]]": None, "[[]]": None, "[[five]]": None}
    assert {text: score_in(table, text) for text in said} == said


def config(**table: Any) -> RunConfig:
    judge = {"url": "http://h/v1", "model": "j"} | table.pop("judge", {})
    tables = {
        "run": {"name": "r", "steps": 3},
        "tasks": {"t": {"source": "jsonl", "dataset": "x", "judge": judge} | table},
        "policies": {"a": {"model": "m"}},
    }
    return validate(tables, where="c.toml")


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"judge": {"template": "Is it good?"}}, "tasks.t.judge.template: the judge would not see the answer"),
        ({"judge": {"least": 10.0}}, "tasks.t.judge.least: not below judge.most; got 10.0; wanted < 10"),
        ({"judge": {"score": "(x"}}, "tasks.t.judge.score: missing ), unterminated subpattern"),
        (
            {"judge": {"score": "x"}},
            "tasks.t.judge.score: the expression has 0 groups; got 'x'; wanted one group, the score",
        ),
        ({"verifier": "m:f"}, "tasks.t.verifier: cannot be combined with a judge; got 'm:f'"),
        ({"evaluator": "m:f"}, "tasks.t.evaluator: cannot be combined with a judge; got 'm:f'"),
        ({"judge": {"url": "h/v1"}}, "tasks.t.judge.url: invalid value"),
        ({"judge": {"key_variable": "sk-123"}}, "tasks.t.judge.key_variable: invalid value"),
    ],
)
def test_a_judge_that_could_not_judge_is_refused(table: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rewards(config(**table))
    assert told in str(caught.value)


def test_a_judge_is_the_verifier_of_its_task() -> None:
    """Also in a configuration that was written and is read again; without a table it judges nothing."""
    found = config()
    check_rewards(found)
    assert found.tasks["t"].verifier == JUDGE
    assert validate(found.model_dump(), where="c.toml").tasks == found.tasks
    alone = found.tasks["t"].model_copy(update={"judge": None})
    with pytest.raises(ConfigError, match=r"tasks\.t\.judge: missing"):
        check_rewards(found.model_copy(update={"tasks": {"t": alone}}))


def test_the_example_of_the_page_is_a_judge() -> None:
    """Its tables are a task that is accepted."""
    (toml,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    tables = {"run": {"name": "r", "steps": 3}, "policies": {"a": {"model": "m"}}, **tomllib.loads(toml)}
    found = validate(tables, where="page")
    check_rewards(found)
    assert found.tasks["essays"].verifier == JUDGE
    judge = found.tasks["essays"].judge
    assert judge is not None
    assert score_in(judge, "Good. Score: 7") == 7.0
