"""What another user of the host can do to a server: attacks of a raw client without a key on the real servers."""

import http.client
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import psutil
import pytest

from mrl.engines.engine import Sampling
from mrl.engines.environment import engine_python
from mrl.engines.server_backend import Launch, ServerBackend
from mrl.engines.server_engine import ServerEngine
from mrl.engines.server_timeouts import ServerTimeouts
from mrl.engines.sglang import SGLang
from mrl.engines.vllm import VLLM
from tests.support.engine_rig import EOS_IDS, make_weights

pytestmark = pytest.mark.engines
TEXT = [7, 8, 9, 300]
CONNECT = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
with socket.socket(socket.AF_UNIX) as raw:
    try:
        raw.connect(sys.argv[1])
    except PermissionError:
        sys.exit(13)
"""
CONTROLS = {
    "vllm": [
        ("/collective_rpc", '{"method": "reload_weights", "kwargs": {"weights_path": "/tmp"}}'),
        ("/pause", ""),
        ("/inference/v1/generate", '{"token_ids": [7], "sampling_params": {"max_tokens": 1}}'),
    ],
    "sglang": [
        ("/update_weights_from_disk", '{"model_path": "/tmp"}'),
        ("/pause_generation", "{}"),
        ("/abort_request", '{"abort_all": true}'),
        ("/generate", '{"input_ids": [7], "sampling_params": {"max_new_tokens": 1}}'),
        ("/server_info", None),
    ],
}


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(request, tmp_path_factory) -> Iterator[ServerEngine]:
    """A real server of random weights, as a worker starts it."""
    folder = tmp_path_factory.mktemp(request.param)
    weights = make_weights(folder / "a", seed=3, family="llama", tied=False)
    launch = Launch(
        engine_python(request.param, device="cpu"), weights.folder, "127.0.0.1", 0, "cpu", "float32", 1, 8, 64, 0
    )
    backend: ServerBackend = {"vllm": VLLM, "sglang": SGLang}[request.param]()
    bounds = ServerTimeouts(start_s=400.0, load_s=60.0)
    made = ServerEngine(backend, Sampling(1.0, 8, EOS_IDS), launch=launch, log=folder / "server.log", bounds=bounds)
    yield made
    made.close()


def tree(engine: ServerEngine) -> list[psutil.Process]:
    root = psutil.Process(engine._process.pid)
    return [root, *root.children(recursive=True)]


def test_no_port_obeys_whoever_has_no_key(engine):
    """Weights are not replaced, nothing is paused, given up or sampled; who has the key is served as before."""
    before = engine.score([TEXT])
    ports = {
        one.laddr.port
        for process in tree(engine)
        for one in process.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    }
    tries = [(port, route, body) for port in ports for route, body in CONTROLS[engine._backend.name]]
    with ThreadPoolExecutor(64) as pool:  # who speaks no HTTP is silent until the end of its second
        answered = list(pool.map(lambda one: status(*one), tries))
    assert set(answered) <= {None, 401}, [*zip(tries, answered, strict=True)]
    assert engine.score([TEXT]) == before


def status(port: int, route: str, body: str | None) -> int | None:
    """What an HTTP request there is answered; None for what speaks no HTTP."""
    with (
        suppress(http.client.HTTPException, OSError),
        closing(http.client.HTTPConnection("127.0.0.1", port, timeout=1)) as link,
    ):
        link.request("GET" if body is None else "POST", route, body, {"Content-Type": "application/json"})
        return link.getresponse().status
    return None


def test_no_command_line_and_no_file_shows_others_the_key(engine):
    """Every user may read the former; the folder of the latter is closed to them, and so is its socket file."""
    folder = engine._process._temporary.path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    key = (folder / "server.yaml").read_text().split('"')[1] if engine._backend.has_port else ""
    for process in tree(engine):
        assert not key or key not in " ".join(process.cmdline())


@pytest.mark.skipif(os.geteuid() != 0, reason="another user can be had by root alone")
def test_another_user_does_not_reach_the_socket_file(engine):
    """The kernel refuses it at the folder."""
    files = [path for path in engine._process._temporary.path.iterdir() if stat.S_ISSOCK(path.stat().st_mode)]
    assert files or engine._backend.has_port
    for path in files:
        done = subprocess.run([sys.executable, "-I", "-S", "-c", CONNECT, str(path)], check=False)
        assert done.returncode == 13
