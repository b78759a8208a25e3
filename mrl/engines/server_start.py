"""Start and end of a server, seen from outside: the server takes requests, or one line says why it does not.

A server may bind its port only once it has loaded. Until then another process may answer there, which is not asked.
"""

import asyncio
import contextlib
import re
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from mrl.engines.engine import Sampling
from mrl.engines.http import Http, HttpFailure
from mrl.engines.server_backend import ServerBackend
from mrl.engines.server_process import ServerProcess
from mrl.errors import EngineError

T = TypeVar("T")
READY_POLL_S = 0.25
IN_USE = "address already in use"
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
ENDS_ITSELF = "received sigquit"
"""Text in SGLang's log when a part of it has failed, for whatever reason, and it kills itself."""
NO_MEMORY = re.compile(
    r"out of memory|can(?:'t|not) allocate memory|(?:not enough|no available|insufficient) memory"
    r"|less than desired GPU memory|less than requested memory|larger than the available KV cache|exit ?code:? -9",
    re.IGNORECASE,
)
"""Texts in logs of servers and torch about memory that does not suffice, and a process that the kernel has killed."""


class PortTaken(EngineError):
    """Another process has bound the server's port since it was chosen."""


async def await_ready(
    backend: ServerBackend, http: Http, process: ServerProcess | None, port: int, *, start_s: float
) -> None:
    """Wait until the server takes requests: the child `process` at `port`, or the server that `http` leads to.

    Without a `process` the server is somebody else's. With `port` 0 the child listens on a socket file, where no other
    process can listen.

    Raises PortTaken as soon as the child says so, EngineError when it has ended or `start_s` are over.
    """
    deadline_s = asyncio.get_running_loop().time() + start_s
    while not ((process is None or not port or process.listens_at(port)) and await backend.ready(http)):
        if process is not None:
            _check(backend, process, port)
        if asyncio.get_running_loop().time() > deadline_s:
            raise _too_slow(backend, http, process, start_s)
        await asyncio.sleep(READY_POLL_S)


async def soon(call: Coroutine[Any, Any, T], within_s: float) -> T | None:
    """Return the result of a short call; None when it fails, or does not end within `within_s`."""
    with contextlib.suppress(HttpFailure, TimeoutError):
        return await asyncio.wait_for(call, within_s)
    return None


async def check_answers(backend: ServerBackend, http: Http, sampling: Sampling) -> None:
    """Check that the server which takes requests is one of this backend, and tells experts where it has to.

    Raises EngineError; HttpFailure for failures that may pass.
    """
    where = f"{backend.name} at {http.base_url}"
    cure = "use a supported version, or correct server.url or rollout.engine"
    try:
        await backend.probe(http)
        if sampling.tells_experts:
            await _check_experts(backend, http, sampling, where)
    except HttpFailure as failure:
        if not 0 < failure.status < 500:
            raise
        raise EngineError(
            f"the server refused a request that {backend.name} answers", where=where, got=str(failure), cure=cure
        ) from failure
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise EngineError(f"the server does not answer like {backend.name}", where=where, got=got, cure=cure) from error


async def _check_experts(backend: ServerBackend, http: Http, sampling: Sampling, where: str) -> None:
    said = await backend.generate(http, [0, 0], sampling, max_new_tokens=1, seed=0, request_id="check")
    if said.experts is None:
        raise EngineError(
            "the server does not report the experts of its tokens",
            where=where,
            cure="start the server with --enable-return-routed-experts, or remove learner.router_replay",
        )


def why_ended(backend: ServerBackend, process: ServerProcess, code: int) -> EngineError:
    """Return the error that describes why a child ended, with the last lines of its log."""
    text, got, where = process.text(), process.tail(), f"{backend.name}, log {process.log}"
    what, cure = f"the server ended with code {code}", "read the last lines of its log"
    if cause := [line.strip() for line in text.splitlines() if NO_MEMORY.search(line)]:
        what, got, cure = f"{what}: out of memory", cause[-1], backend.less_memory
    elif code in KILLED and ENDS_ITSELF not in text.lower():
        what = f"the server was killed (code {code}), most likely by the kernel because memory ran out"
        cure = backend.less_memory
    return EngineError(what, where=where, got=got, wanted="a running server", cure=cure)


def _check(backend: ServerBackend, process: ServerProcess, port: int) -> None:
    """Raise PortTaken or EngineError for a child that has ended or found its port taken. Some servers log IN_USE and
    end then; others live on for minutes, and log their port with it."""
    code, text = process.exit_code(), process.text()
    lines = [line for line in text.splitlines() if port and IN_USE in line.lower()]
    if any(code is not None or str(port) in line for line in lines):
        cure = "start again: another port will be chosen"
        raise PortTaken(f"port {port} was taken by another process", where=backend.name, got=lines[-1], cure=cure)
    if code is not None:
        raise why_ended(backend, process, code)


def _too_slow(backend: ServerBackend, http: Http, process: ServerProcess | None, start_s: float) -> EngineError:
    what = f"no server at {http.base_url} accepted requests within {start_s:g} s"
    if process is None:
        return EngineError(
            what, where=backend.name, cure="start the server, or remove server.url so that mrl starts one"
        )
    where, cure = f"{backend.name}, log {process.log}", "if the server was still loading, raise server.start_s"
    return EngineError(what, where=where, got=process.tail(), wanted="a server that accepts requests", cure=cure)
