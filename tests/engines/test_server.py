"""A server as an engine, with a real process that speaks HTTP and whose every token can be predicted."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from mrl.engines.engine import (
    EngineUsage,
    FinishedAnswer,
    GenerationRequest,
    PartialAnswer,
    Sampling,
    ScoringRequest,
    TokenScore,
    generate_all,
)
from mrl.engines.http import Http, HttpFailure
from mrl.engines.server_backend import Launch, Segment
from mrl.engines.server_engine import ServerEngine
from mrl.engines.server_process import free_port
from mrl.engines.server_timeouts import ServerTimeouts, load_timeout_s
from mrl.errors import EngineError, EngineLost, WeightsError
from mrl.records.finish import FinishReason
from mrl.records.version import Version, VersionSpan

pytestmark = pytest.mark.system
SCRIPT = Path(__file__).parents[1] / "support" / "toy_server.py"
SAMPLING = Sampling(temperature=1.0, max_new_tokens=50, eos_ids=tuple(range(0, 1000, 10)))
BOUNDS = ServerTimeouts(start_s=120.0, silence_s=60.0, stall_s=120.0, load_s=120.0)
"""Never reached where the server is well, however busy the machine."""


class Toy:
    """What the toy server's routes are called."""

    name = "toy"
    has_port = True
    less_memory = "fewer toys"

    def __init__(self, *, token_s: float = 0.0, argv: Sequence[str] | None = None) -> None:
        self._token_s, self._argv = token_s, argv

    def command(self, launch: Launch) -> list[str]:
        return list(self._argv or [sys.executable, str(SCRIPT), str(launch.port), str(self._token_s)])

    def environment(self, launch: Launch) -> dict[str, str]:
        return {}

    def reach(self, launch: Launch) -> Http:
        return Http(f"http://{launch.host}:{launch.port}")

    async def ready(self, http: Http) -> bool:
        return await self.alive(http)

    async def alive(self, http: Http) -> bool:
        try:
            await http.get("/state", within_s=1.0)
        except HttpFailure:
            return False
        return True

    async def probe(self, http: Http) -> None:
        await http.get("/state")

    async def generate(self, http, token_ids, sampling, *, max_new_tokens, seed, request_id) -> Segment:
        body = {"token_ids": list(token_ids), "max_new_tokens": max_new_tokens}
        found = await http.post_json("/generate", body, within_s=None)
        reason, labels = FinishReason(found["finish_reason"]), (found["label"],) if found["label"] else ()
        return Segment(found["token_ids"], found["logprobs"], reason, labels)

    async def abort_all(self, http: Http) -> None:
        await http.post("/pause")

    async def load(self, http: Http, folder: Path, label: str) -> None:
        if not (folder / "weights").exists():
            raise WeightsError(f"{folder}: no weights")
        await http.post("/load", {"folder": str(folder), "label": label})

    async def resume(self, http: Http) -> None:
        await http.post("/resume")

    async def score(self, http: Http, token_ids: Sequence[int], *_how: float) -> list[TokenScore]:
        return [TokenScore(-float((await http.get_json("/state"))["weights"]))] * (len(token_ids) - 1)

    async def checksums(self, http: Http) -> None:
        return None

    async def usage(self, http: Http) -> EngineUsage:
        state = await http.get_json("/state")
        return EngineUsage(state["running"], 0, 0.0, state["generated"])

    async def sleep(self, http: Http) -> None: ...

    async def wake(self, http: Http) -> None: ...


def launch(tmp_path: Path) -> Launch:
    return Launch(Path(sys.executable), tmp_path, "127.0.0.1", 0, "cpu", "float32", 1, 64, 100, 0)


@pytest.fixture
def make(tmp_path) -> Iterator:
    """Engines that are closed at the end."""
    made: list[ServerEngine] = []

    def start(*, bounds: ServerTimeouts = BOUNDS, kind: type[Toy] = Toy, **toy) -> ServerEngine:
        made.append(ServerEngine(kind(**toy), SAMPLING, launch=launch(tmp_path), log=tmp_path / "log", bounds=bounds))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


@pytest.fixture
def weights(tmp_path):
    """Folders with a number in them."""

    def write(number: int) -> Path:
        folder = tmp_path / f"weights-{number}"
        folder.mkdir(exist_ok=True)
        (folder / "weights").write_text(str(number))
        return folder

    return write


def ask(name: str, *prompt: int, answers: int = 1) -> GenerationRequest:
    return GenerationRequest(name, np.array(prompt, dtype=np.int32), np.arange(answers, dtype=np.uint64))


def collect(engine: ServerEngine, count: int, within_s: float = 120.0) -> list[FinishedAnswer]:
    """`count` answers, within a time that is only reached when something is wrong."""
    found: list[FinishedAnswer] = []
    deadline_s = time.monotonic() + within_s
    while len(found) < count:
        assert time.monotonic() < deadline_s, f"{len(found)} of {count} answers came"
        found += engine.collect(0.2)
    return found


@pytest.mark.parametrize(("status", "is_lost"), [(400, False), (413, False), (500, True), (429, True)])
def test_a_text_that_the_server_refuses_has_no_score_and_the_server_goes_on(make, status, is_lost):
    """It would be refused by its successor as well; any other failure is the server's own."""

    class Refusing(Toy):
        async def score(self, http: Http, token_ids: Sequence[int], *how: float) -> list[TokenScore]:
            if len(token_ids) > 3:
                raise HttpFailure("/score", status, "too long")
            return await super().score(http, token_ids, *how)

    engine = make(kind=Refusing)
    engine.label(Version(0, 0))
    answers = [np.array(ids, dtype=np.int32) for ids in ([5, 6], [5, 6, 7], [5])]
    asked = ScoringRequest(np.array([1], dtype=np.int32), answers)
    if is_lost:
        with pytest.raises(EngineLost, match="too long"):
            engine.score_answers(asked)
    else:
        assert [row is None or row.logprobs.size for row in engine.score_answers(asked)] == [2, True, 1]


def await_loss(engine: ServerEngine, within_s: float = 120.0) -> str:
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        try:
            engine.collect(0.1)
        except EngineLost as error:
            return str(error)
    raise AssertionError("the engine was not lost")


def sampled_by_the_server(engine: ServerEngine) -> int:
    return engine._run(engine._backend.usage(engine._link()), 5.0).generated_tokens


def members() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.is_running()]


@pytest.mark.parametrize("within_s", [0.0, 0.05])
def test_a_nudge_ends_one_wait_for_answers(make, weights, within_s):
    """Before it begins or, from another thread, in it; it counts as no answer: what is in flight still comes."""
    engine = make(token_s=0.2)
    engine.load(weights(3), Version(0, 3))
    engine.submit([ask("a", 1)])
    nudging = threading.Timer(within_s, engine.nudge)
    nudging.start()
    if not within_s:
        nudging.join()
    assert engine.collect(3600.0) == []
    nudging.join()
    assert [one.request_id for one in collect(engine, 1)] == ["a"]
    assert engine.collect(3600.0) == [], "nothing is in flight"


def test_answers_come_as_they_end_with_the_version_that_sampled_them(make, weights):
    """Two prompts, the second with two answers; the EOS is the last token."""
    engine = make()
    engine.load(weights(3), Version(0, 3))

    (first,), (second, third) = generate_all(engine, [ask("a", 1), ask("b", 5, 18, answers=2)])

    assert first.token_ids.tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert second.token_ids.tolist() == third.token_ids.tolist() == [19, 20]
    assert first.logprobs.tolist() == [-3.0] * 9
    assert second.versions == [VersionSpan(2, Version(0, 3))]
    assert first.finish_reason is FinishReason.STOP
    assert engine.collect(0.0) == []


def test_an_update_in_mid_answer_gives_exact_spans_and_no_token_twice(make, weights):
    """What was sampled before is of the old weights, token by token; the answer itself is what it would have been."""
    engine = make(token_s=0.1)
    engine.load(weights(1), Version(0, 1))
    engine.submit([ask("a", 1, answers=3)])
    while sampled_by_the_server(engine) < 6:
        assert engine.collect(0.0) == []

    engine.load(weights(2), Version(0, 2))
    found = [one.generation for one in collect(engine, 3)]

    for generation in found:
        old, new = generation.versions
        assert generation.token_ids.tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 10]
        assert (old.version, new.version) == (Version(0, 1), Version(0, 2))
        assert generation.logprobs.tolist() == [-1.0] * old.num_tokens + [-2.0] * new.num_tokens


def test_weights_that_do_not_fit_leave_the_old_ones(make, weights, tmp_path):
    """And the gate is open again."""
    engine = make()
    engine.load(weights(1), Version(0, 1))

    with pytest.raises(WeightsError, match="no weights"):
        engine.load(tmp_path, Version(0, 2))

    assert engine.version == Version(0, 1)
    ((answer,),) = generate_all(engine, [ask("a", 8)])
    assert answer.versions == [VersionSpan(2, Version(0, 1))]


def test_nothing_is_sampled_before_there_are_weights(make):
    """A server has weights of its own when it starts; nobody knows their version."""
    engine = make()

    with pytest.raises(WeightsError, match="no weights to sample"):
        engine.submit([ask("a", 1)])
    engine.label(Version(0, 0))
    ((answer,),) = generate_all(engine, [ask("a", 8)])

    assert answer.versions == [VersionSpan(2, Version(0, 0))]


def test_what_is_aborted_is_never_collected(make, weights):
    """The other request is not touched, and nothing is awaited for ever."""
    engine = make(token_s=0.02)
    engine.load(weights(1), Version(0, 1))
    engine.submit([ask("a", 1, answers=2), ask("b", 1)])
    engine.abort(["a"])

    assert [one.request_id for one in collect(engine, 1)] == ["b"]
    deadline_s = time.monotonic() + 120
    while engine._in_flight and time.monotonic() < deadline_s:
        assert engine.collect(0.1) == []
    assert engine._in_flight == 0


def test_a_killed_server_is_noticed_and_replaced(make, weights):
    """In mid-batch: every method says that the engine is lost, and after a restart nothing of it is remembered."""
    engine = make(token_s=0.05)
    engine.load(weights(1), Version(0, 1))
    engine.submit([ask("a", 1, answers=4)])
    before = engine._process.pid
    os.kill(before, signal.SIGKILL)

    assert "toy" in await_loss(engine)
    with pytest.raises(EngineLost):
        engine.score([[1, 2]])
    engine.restart()

    assert engine._process.pid != before
    assert engine.version is None
    engine.load(weights(2), Version(0, 2))
    ((again,),) = generate_all(engine, [ask("a", 8)])
    assert again.logprobs.tolist() == [-2.0, -2.0]
    assert engine.collect(0.0) == []


def test_a_server_that_does_not_come_up_again_is_lost_and_not_unusable(make, weights):
    """It did serve: whatever keeps it from starting may pass, and the next restart finds it gone."""
    engine = make()
    works, engine._backend._argv = engine._backend._argv, [sys.executable, "-c", "raise SystemExit('no memory')"]

    with pytest.raises(EngineLost, match="no memory"):
        engine.restart()
    engine._backend._argv = works
    engine.restart()

    engine.label(Version(0, 0))
    assert generate_all(engine, [ask("a", 8)])


def test_a_server_that_hangs_is_noticed_within_the_bound_and_ended(make, weights):
    """SIGSTOP: it lives and says nothing, also to a call that is under way."""
    engine = make()
    engine.load(weights(1), Version(0, 1))
    process = psutil.Process(engine._process.pid)
    engine._bounds = replace(BOUNDS, silence_s=1.0)
    process.suspend()

    with pytest.raises(EngineLost, match=r"has been silent for 1 s|no answer within 1 s"):
        engine.score([[1, 2]])
    engine._bounds = BOUNDS
    engine.restart()

    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    engine.label(Version(0, 0))
    assert generate_all(engine, [ask("a", 8)])


def test_an_update_that_hangs_is_noticed_at_its_bound_and_nothing_is_awaited_beyond(make, weights):
    """SIGSTOP as it is about to load: deaf, as a server may be then. Its successor takes the same weights."""

    class Stopped(Toy):
        async def load(self, http: Http, folder: Path, label: str) -> None:
            if label == "0.2" and not stopped:
                stopped.append(psutil.Process(engine._process.pid))
                stopped[0].suspend()
            await super().load(http, folder, label)

    stopped: list[psutil.Process] = []
    engine = make(kind=Stopped)
    engine.load(weights(1), Version(0, 1))
    engine._bounds = replace(BOUNDS, load_s=1.0)
    began_s = time.monotonic()
    with pytest.raises(EngineLost, match="no answer within 1 s"):
        engine.load(weights(2), Version(0, 2))
    assert time.monotonic() - began_s >= 1.0
    engine._bounds = BOUNDS
    engine.restart()
    assert not stopped[0].is_running() or stopped[0].status() == psutil.STATUS_ZOMBIE
    engine.load(weights(2), Version(0, 2))
    ((answer,),) = generate_all(engine, [ask("a", 8)])
    assert answer.versions == [VersionSpan(2, Version(0, 2))]


@pytest.mark.parametrize(("gigabytes", "bound_s"), [(0, 60.0), (1, 80.0), (14, 340.0)])
def test_the_time_for_new_weights_grows_with_the_model(tmp_path, gigabytes, bound_s):
    """Files of a size without content are as good as any."""
    for number in range(2):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(gigabytes * 10**9 // 2)

    assert load_timeout_s(tmp_path) == pytest.approx(bound_s)


def test_a_server_that_samples_nothing_any_more_is_noticed(make, weights):
    """It answers every question and no answer gets on."""
    engine = make(token_s=3600.0, bounds=replace(BOUNDS, stall_s=1.0))
    engine.label(Version(0, 0))
    engine.submit([ask("a", 1)])

    assert "no token came for 1 s" in await_loss(engine)


def test_a_server_that_names_other_weights_is_not_believed(make, weights):
    """It says 7.7, and was given 0.1."""
    engine = make()
    engine.load(weights(1), Version(0, 1))
    engine._run(engine._link().post("/lie"), 5.0)
    engine.submit([ask("a", 1)])

    assert "7.7" in await_loss(engine)


def test_closing_leaves_no_process(make, weights):
    """Whatever was in flight."""
    before = set(members())
    engine = make(token_s=1.0)
    engine.label(Version(0, 0))
    engine.submit([ask("a", 1)])
    engine.close()
    engine.close()

    assert set(members()) <= before


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("os.kill(os.getpid(), 9)", r"killed \(code -9\), most likely by the kernel .*cure: fewer toys"),
        ("sys.exit(137)", r"killed \(code 137\), most likely by the kernel .*cure: fewer toys"),
        ("print('DefaultCPUAllocator: can't allocate memory'); sys.exit(1)", "code 1: out of memory.*fewer toys"),
        (
            "print('kv cache is less than requested memory for kv'); print('0'); sys.exit(1)",
            "of memory; got 'kv cache is",
        ),
        ("print('scheduler_0 crashed with exit code -9'); sys.exit(2)", "code 2: out of memory.*fewer toys"),
        ("print('Received sigquit', flush=True); os.kill(os.getpid(), 9)", "ended with code -9; .*read the last lines"),
        ("print('No module named vllm'); sys.exit(1)", "ended with code 1; .*No module named vllm.*read the last"),
    ],
)
def test_a_server_that_lacks_memory_is_told_from_one_that_ends_otherwise(make, script, told):
    """By its code, or by its log, whose last words are shown; the cure is the setting of its kind."""
    with pytest.raises(EngineError, match=told):
        make(argv=[sys.executable, "-c", f"import os, sys; {script}"])


def test_a_server_that_is_killed_later_is_told_with_the_likely_cause(make):
    """It may be started again: it is lost, not unusable."""
    engine = make()
    os.kill(engine._process.pid, signal.SIGKILL)

    assert "killed (code -9), most likely by the kernel because memory ran out" in await_loss(engine)


@pytest.mark.parametrize("said", ["", "port 1: address already in use"])
def test_a_server_that_never_gets_ready_is_given_up(make, said):
    """Within the bound for its start; another port that is in use is no reason to start again: it may try several."""
    before = set(members())
    argv = [sys.executable, "-c", f"print({said!r}, flush=True); import time; time.sleep(60)"]
    with pytest.raises(EngineError, match=r"accepted requests within 0\.8 s"):
        make(argv=argv, bounds=ServerTimeouts(start_s=0.8, silence_s=5.0))
    assert set(members()) <= before


def test_a_port_that_was_taken_meanwhile_costs_another_start(make, monkeypatch):
    """The server says that the address is in use; the next start takes another port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = taken.getsockname()[1]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports = [busy, probe.getsockname()[1]]
        monkeypatch.setattr("mrl.engines.server_engine.free_port", lambda host: ports.pop(0))
        make()

    assert ports == []


STAYS = """
import socket, sys, time
try:
    socket.create_server(("127.0.0.1", int(sys.argv[2])))
except OSError:
    print(f"[Errno 98] error while attempting to bind on address ('127.0.0.1', {sys.argv[2]}): address already in use")
    sys.stdout.flush()
    time.sleep(3600)
sys.argv = sys.argv[1:]
"""


def test_a_server_that_lives_on_without_its_port_is_replaced_at_once(make, monkeypatch):
    """As SGLang does: it says that its address is in use, and ends much later or never."""

    class Staying(Toy):
        def command(self, launch: Launch) -> list[str]:
            run = "import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
            return [sys.executable, "-c", f"{STAYS}\n{run}", *super().command(launch)[1:]]

    with socket.create_server(("127.0.0.1", 0)) as stranger:
        ports = [stranger.getsockname()[1], free_port("127.0.0.1")]
        monkeypatch.setattr("mrl.engines.server_engine.free_port", lambda host: ports.pop(0))
        make(kind=Staying)

    assert ports == []


def test_a_stranger_at_the_port_of_a_server_that_still_loads_is_not_believed(make, weights, monkeypatch):
    """It answers all that is asked; the child finds the port taken once it has loaded, and gets another one."""
    ports = [free_port("127.0.0.1"), free_port("127.0.0.1")]
    busy = ports[0]
    monkeypatch.setattr("mrl.engines.server_engine.free_port", lambda host: ports.pop(0))
    late = "import runpy, sys, time; time.sleep(1); del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"

    class Loading(Toy):
        def command(self, launch: Launch) -> list[str]:
            return [sys.executable, "-c", late, *super().command(launch)[1:]]

    with subprocess.Popen([sys.executable, str(SCRIPT), str(busy), "0"]) as stranger:
        try:
            await_state(busy)
            make(kind=Loading).load(weights(3), Version(0, 1))
            assert await_state(busy)["weights"] == 0, "it was the child that was given weights"
        finally:
            stranger.kill()

    assert ports == []


def await_state(port: int, within_s: float = 120.0) -> dict[str, int]:
    """What a toy server says of itself, once it answers."""
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/state", timeout=60) as answer:
                state: dict[str, int] = json.load(answer)
                return state
        except OSError:
            assert time.monotonic() < deadline_s, f"nobody at port {port}"
            time.sleep(0.05)


def test_a_server_that_somebody_else_started_is_used_and_left_alone(make, tmp_path, weights):
    """By its URL; closing the engine does not end it."""
    theirs = make()
    ours = ServerEngine(Toy(), SAMPLING, launch=None, url=theirs._http.base_url, bounds=BOUNDS)
    ours.load(weights(4), Version(0, 4))
    ((answer,),) = generate_all(ours, [ask("a", 8)])
    ours.close()

    assert answer.logprobs.tolist() == [-4.0, -4.0]
    assert theirs.score([[1, 2]]) == [[-4.0]]


TOO_LONG = "This model's maximum context length is 4 tokens."
CURED = rf"{TOO_LONG}.* wanted an answer of 50 tokens after 2 tokens; cure: .*raise server\.context_tokens"


@pytest.mark.parametrize(
    ("fault", "error", "told"),
    [
        *((HttpFailure("/generate", status, TOO_LONG), EngineError, CURED) for status in (400, 403, 404)),
        *((HttpFailure("/generate", status, TOO_LONG), EngineLost, TOO_LONG) for status in (429, 503)),
        (EngineError("an answer exceeds the server's context"), EngineError, "^an answer exceeds"),
    ],
)
def test_a_request_that_every_server_would_refuse_is_told_with_the_servers_words(make, fault, error, told):
    """It is not tried again and again; what may pass is the end of this server alone."""

    class Refusing(Toy):
        async def generate(self, http, token_ids, sampling, **named) -> Segment:
            raise fault

    engine = make(kind=Refusing)
    engine.label(Version(0, 0))
    engine.submit([ask("a", 1, 2)])
    with pytest.raises(error, match=told):
        collect(engine, 1)


@pytest.mark.parametrize(
    ("fault", "error", "told"),
    [
        (
            HttpFailure("/a", 404, "Not Found"),
            EngineError,
            r"toy at http://127.*refused a request that toy answers; .*answered 404: Not Found",
        ),
        (
            HttpFailure("/a", 200, "no JSON: <html>"),
            EngineError,
            r"refused a request .*no JSON: <html>",
        ),
        (KeyError("paths"), EngineError, r"does not answer like toy; got \"KeyError: 'paths'\"; cure: .*server\.url"),
        (HttpFailure("/a", 503, "not yet"), EngineLost, "answered 503"),
    ],
)
def test_somebody_at_the_url_who_is_no_such_server_is_told_at_the_start(make, fault, error, told):
    """It is not asked again and again; a server whose own fault may pass is."""

    class Stranger(Toy):
        async def probe(self, http: Http) -> None:
            raise fault

    with pytest.raises(error, match=told):
        make(kind=Stranger)


def test_a_request_that_may_be_refused_costs_itself_alone(make):
    """Its answer has no token; the server goes on with the others."""

    class Refusing(Toy):
        async def generate(self, http, token_ids, sampling, **named) -> Segment:
            if token_ids[0] == 1:
                raise HttpFailure("/generate", 400, TOO_LONG)
            return await super().generate(http, token_ids, sampling, **named)

    engine = make(kind=Refusing)
    engine.label(Version(0, 0))
    engine.submit([replace(ask("a", 1), may_be_refused=True), ask("b", 8)])
    found = {one.request_id: one.generation for one in collect(engine, 2)}

    assert (found["a"].token_ids.size, found["a"].versions, found["a"].finished) == (0, [], False)
    assert found["b"].token_ids.size > 0


def test_of_an_answer_that_grows_the_newest_alone_is_kept(make, weights):
    """However long nobody collects; one word that something has grown is enough until the next look."""
    engine = make(kind=Streaming)
    engine.load(weights(3), Version(0, 3))
    for name, looks in (("a", True), ("b", False)):
        before = engine.usage().generated_tokens
        engine.submit([replace(ask(name, 1), streams=True)])
        while engine._tasks or engine.usage().generated_tokens == before:
            time.sleep(0.001)
        assert engine._finished.qsize() == 2
        assert not looks or [grown.generation.token_ids.size for grown in engine.grown()] == [8]
        assert [one.generation.token_ids.size for one in collect(engine, 1)] == [9]
        assert engine.grown() == []


def test_of_an_answer_that_is_given_up_nothing_is_kept(make, weights):
    """Nobody would ask for it any more."""
    engine = make(kind=Streaming)
    engine.load(weights(3), Version(0, 3))
    engine.submit([replace(ask("a", 1), streams=True)])
    while engine._tasks:
        time.sleep(0.001)
    engine._grown["a", 1] = engine._grown["b", 0] = PartialAnswer("a", 1, collect(engine, 1)[0].generation)
    engine.abort(["a"])
    while ("a", 1) in engine._grown:
        engine.collect(0.01)
    assert list(engine._grown) == [("b", 0)]


class Streaming(Toy):
    """Token by token."""

    async def stream(self, http, token_ids, sampling, **asked):
        whole = await self.generate(http, token_ids, sampling, **asked)
        reasons = [FinishReason.ABORT] * (len(whole.token_ids) - 1) + [whole.finish_reason]
        for token_id, logprob, reason in zip(whole.token_ids, whole.logprobs, reasons, strict=True):
            yield Segment([token_id], [logprob], reason, whole.labels)
