"""One verifier process: `python -m mrl.tasks.verifier_process MODULE:FUNCTION MEMORY_BYTES CPU_S`.

It reads calls from stdin and writes one reply each to stdout, until stdin ends. So it ends with the process that
started it, and a hanging verifier whose parent is gone ends by its own limits. Requests are msgpack text from that
parent; nothing is unpickled, and nothing imported but the function named at the start.
"""

import faulthandler
import importlib
import inspect
import json
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import IO, Any, NamedTuple, cast

import msgspec
import setproctitle

from mrl.plugins import see_modules
from mrl.tasks.rewards import EXITED, MEMORY, RAISED, CodeLine, Outcome, failed, outcome_of, place_of, with_costs

LENGTH = struct.Struct("<I")
"""Prefix of every request: its length in bytes. A reply has no prefix: it is one write that a pipe carries whole."""
EXTRAS = ("prompt", "row")
"""Arguments that a verifier gets beside reference and answer when it has arguments of these names."""
WALL_FACTOR = 6.0
"""Multiple of the limit of CPU time after which a process that does not use the CPU is killed."""


class VerifierCall(NamedTuple):
    """A request to a verifier; extras that it does not take are empty."""

    reference: str
    answer: str
    prompt: str = ""
    row: str = ""
    """Row of the data as JSON."""


class VerifierReady(msgspec.Struct, frozen=True, array_like=True):
    """First reply: the function was found, and takes these extras."""

    extras: tuple[str, ...]


_call = msgspec.msgpack.Decoder(VerifierCall)


def main(words: list[str]) -> int:
    """Serve until stdin ends."""
    name, memory_bytes, cpu_s = words
    setproctitle.setproctitle("mrl::verifier")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides when it ends
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    replies = os.dup(1)
    os.dup2(2, 1)  # what a verifier prints must not stand between replies
    verifier = named_function(name)
    extras = extras_of(verifier, name)
    for limit in (signal.SIGPROF, signal.SIGALRM):  # a process that a limit ends first writes its stack
        faulthandler.register(limit, file=replies, all_threads=False, chain=True)
    os.write(replies, msgspec.msgpack.encode(VerifierReady(extras)))
    while (request := read_request(sys.stdin.buffer)) is not None:
        call = _call.decode(request)
        # CPU time, so that a loaded machine makes no answer wrong. The default action of the signal ends this process
        # at once, also inside a regular expression or a big multiplication, where Python's handlers never run.
        signal.setitimer(signal.ITIMER_PROF, float(cpu_s))
        signal.setitimer(signal.ITIMER_REAL, 2 * WALL_FACTOR * float(cpu_s))  # the parent kills earlier, if it lives
        outcome = judged(verifier, call, extras)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        os.write(replies, msgspec.msgpack.encode(outcome))
    return 0


def named_function(name: str) -> Callable[..., Any]:
    """Return the function "module:function". Raises ImportError, AttributeError or TypeError."""
    module, _, function = name.partition(":")
    see_modules()
    found = getattr(importlib.import_module(module), function)
    if not callable(found):
        raise TypeError(f"{name} is not callable")
    return cast("Callable[..., Any]", found)


def extras_of(verifier: Callable[..., Any], name: str) -> tuple[str, ...]:
    """Return the extras that a verifier takes by name. Raises TypeError for a verifier that cannot be called with them.

    Its first two arguments are the reference and the answer, under any names. The names "answer", "reference" in this
    order also raise TypeError, since nothing else would reveal the mistake; so does an async function.
    """
    try:
        signature = inspect.signature(verifier)
    except (TypeError, ValueError):  # a function in C may have no signature
        return ()
    taken = [one for one in signature.parameters.values() if one.kind is not one.VAR_POSITIONAL]
    takes_all = any(one.kind is one.VAR_KEYWORD for one in taken)
    named = {one.name for one in taken if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    extras = tuple(one for one in EXTRAS if takes_all or one in named)
    try:
        signature.bind("", "", **dict.fromkeys(extras, ""))
        if list(signature.parameters)[:2] == ["answer", "reference"]:
            raise TypeError("the reference must be the first argument")
        if inspect.iscoroutinefunction(verifier):
            raise TypeError("async functions are not supported")
    except TypeError as error:
        wanted = "(reference, answer), plus prompt and row if it has arguments of these names"
        raise TypeError(f"{name}{signature} cannot be called as {wanted}: {error}") from None
    return extras


def judged(verifier: Callable[..., Any], call: VerifierCall, extras: tuple[str, ...]) -> Outcome:
    """Return the outcome of the verifier's value or of its exception."""
    given: dict[str, object] = {}
    if "prompt" in extras:
        given["prompt"] = call.prompt
    if "row" in extras:
        given["row"] = json.loads(call.row) if call.row else {}
    try:
        returned = verifier(call.reference, call.answer, **given)
        return with_costs(outcome_of(returned, _definition(verifier)), returned)
    except MemoryError as error:
        return failed(MEMORY, "out of memory", _place(error.__traceback__))
    except (SystemExit, KeyboardInterrupt) as error:
        return failed(EXITED, f"{type(error).__name__}: {error}", _place(error.__traceback__))
    except Exception as error:  # noqa: BLE001 - whatever a verifier raises, its answer counts as failed, and is counted
        return with_costs(failed(RAISED, f"{type(error).__name__}: {error}", _place(error.__traceback__)), error)


def _place(trace: TracebackType | None) -> str:
    frames = traceback.extract_tb(trace)[1:]  # without this module's own
    return place_of([CodeLine(frame.filename, frame.lineno or 0, frame.name) for frame in frames])


def _definition(verifier: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(verifier), "__code__", None)
    return "" if code is None else str(CodeLine(code.co_filename, code.co_firstlineno, code.co_name))


def read_request(stream: IO[bytes]) -> bytes | None:
    """Read one request; return None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = stream.read(length)
    return body if len(body) == length else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
