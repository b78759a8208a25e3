"""A verifier process that judges each answer in a fresh, sealed process.

`python -m mrl.tasks.sealed.sealed_verifier VERIFIER EVALUATOR MEMORY_BYTES CPU_S TRUSTED`

    keeper ──answer──▶ evaluating side ──forks──▶ sealed process: evaluator(answer) ──text──▶ keeper
    keeper ──forks──▶ sealed process: verifier(reference, text) ──outcome──▶ keeper ──▶ the pool

The keeper (this process) speaks with the pool as `verifier_process` does. It has imported all that judging needs, so
that a process costs only a fork, and it never runs code of a policy. Where the task has an evaluator ("" without), only
the evaluator runs the answer, in a process forked from one that never saw a reference or another answer. That process
can return nothing but a text: all that it can forge is a text, and the verifier compares that.
"""

import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import IO, Any, NoReturn, cast

import msgspec
import setproctitle

from mrl.tasks.rewards import (
    EXITED,
    FAILURES,
    MEMORY,
    RAISED,
    TIMEOUT,
    UNEVALUATED,
    UNNAMED,
    Outcome,
    failed,
    outcome_of,
)
from mrl.tasks.sealed import sealed_child
from mrl.tasks.sealed.seal import Seal, die_with, host_seal
from mrl.tasks.sealed.sealed_child import DIED, DONE, LATE, OUT_OF_MEMORY, ChildLimits, Ended, run_sealed
from mrl.tasks.verifier_process import (
    LENGTH,
    WALL_FACTOR,
    VerifierCall,
    VerifierReady,
    extras_of,
    judged,
    named_function,
    read_request,
)

PREPARE = "mrl_prepare_reference"
"""Name of the function in a verifier's module that is called with the reference, outside the seal, before each
answer. Results that it keeps need not be computed in every sealed process. No other function of the module is
called there."""
TRUSTED = "trusted"
SOONER = 0.9
"""Part of the pool's time limit after which the keeper ends a late process, before the pool would end the keeper."""
MAX_WORDS_CHARS = 500

_call = msgspec.msgpack.Decoder(VerifierCall)
_outcome = msgspec.msgpack.Decoder(Outcome)
_WHAT = {LATE: "time limit exceeded", DIED: "the process ended", OUT_OF_MEMORY: "memory limit exceeded"}
_KIND = {LATE: TIMEOUT, DIED: EXITED, OUT_OF_MEMORY: MEMORY}


def main(words: list[str]) -> int:
    """Serve until stdin ends."""
    name, evaluator, memory_bytes, cpu_s, trust = words
    setproctitle.setproctitle("mrl::verifier")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides when it ends
    found = host_seal()
    if isinstance(found, str) and trust != TRUSTED:
        raise OSError(f"this host cannot seal a process: {found}")
    seal = Seal(b"", -1) if isinstance(found, str) else found
    wall_s = SOONER * WALL_FACTOR * float(cpu_s) / (2 if evaluator else 1)
    limits = ChildLimits(int(memory_bytes), float(cpu_s), wall_s)
    evaluating = _EvaluatingSide(evaluator, seal, limits) if evaluator else None
    replies = os.dup(1)
    os.dup2(2, 1)  # what a module prints while it is imported must not stand between replies
    verifier, prepare = named_function(name), getattr(importlib.import_module(name.partition(":")[0]), PREPARE, None)
    extras = extras_of(verifier, name)
    gc.freeze()
    os.write(replies, msgspec.msgpack.encode(VerifierReady(extras)))
    while (request := read_request(sys.stdin.buffer)) is not None:
        call = _call.decode(request)
        outcome = None
        if evaluating is not None:
            outcome, call = evaluating.evaluated(call)
        if outcome is None:
            outcome = _judged_apart(verifier, prepare, call, extras, seal=seal, limits=limits)
        os.write(replies, msgspec.msgpack.encode(outcome))
    return 0


def _judged_apart(
    verifier: Callable[..., Any],
    prepare: Callable[[str], object] | None,
    call: VerifierCall,
    extras: tuple[str, ...],
    *,
    seal: Seal,
    limits: ChildLimits,
) -> Outcome:
    """Return the outcome of a verifier in a sealed process, which inherits what PREPARE kept of the reference."""
    if prepare is not None:
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        try:
            prepare(call.reference)
        except Exception as error:  # noqa: BLE001 - the data's fault, and the same to every answer: one failure each
            return failed(RAISED, f"{type(error).__name__}: {error}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    ended = run_sealed(lambda: msgspec.msgpack.encode(judged(verifier, call, extras)), seal, limits)
    if ended.status != DONE:
        return failed(_KIND.get(ended.status, RAISED), _said(ended))
    try:
        return _plain(_outcome.decode(ended.reply))
    except (msgspec.DecodeError, ValueError):
        return failed(EXITED, "the verifier's process returned an invalid result")


def _plain(outcome: Outcome) -> Outcome:
    """Return the outcome within the bounds of a valid one: it comes from a process that is not trusted."""
    if not outcome.failure:
        is_single = list(outcome.rewards) == [UNNAMED]
        return outcome_of(outcome.rewards[UNNAMED] if is_single else outcome.rewards)
    words = outcome.words[:MAX_WORDS_CHARS]
    return failed(outcome.failure if outcome.failure in FAILURES else RAISED, ascii(words)[1:-1])


def _said(ended: Ended) -> str:
    return _WHAT.get(ended.status) or ended.reply.decode(errors="replace")


class _EvaluatingSide:
    """The evaluating side as the keeper sees it: a process with the evaluator imported, which forks one per answer."""

    def __init__(self, evaluator: str, seal: Seal, limits: ChildLimits) -> None:
        near, far = socket.socketpair()
        keeper = os.getpid()
        if not os.fork():
            near.close()
            _evaluate(far, evaluator, seal, limits, keeper=keeper)
        far.close()
        self._requests, self._replies = near.makefile("wb"), near.makefile("rb")
        status, reason = self._replies.read(1), read_request(self._replies)
        if status != bytes([DONE]):
            raise ImportError(f"the evaluator {evaluator} does not start: {(reason or b'its process ended').decode()}")

    def evaluated(self, call: VerifierCall) -> tuple[Outcome | None, VerifierCall]:
        """Return the call with the evaluated text as the answer; or a failure of the answer, and the call as it was."""
        answer = call.answer.encode()
        self._requests.write(LENGTH.pack(len(answer)) + answer)
        self._requests.flush()
        status, text = self._replies.read(1), read_request(self._replies)
        if not status or text is None:
            raise EOFError("the evaluator's process ended")
        ended = Ended(status[0], text)
        if ended.status != DONE:
            return failed(UNEVALUATED, f"evaluating the answer: {_said(ended)}"), call
        try:
            return None, call._replace(answer=text.decode())
        except UnicodeDecodeError:
            return failed(UNEVALUATED, "evaluating the answer: the result is not UTF-8 text"), call


def _evaluate(keeper_side: socket.socket, evaluator: str, seal: Seal, limits: ChildLimits, *, keeper: int) -> NoReturn:
    """Fork a process for each answer in turn, before the answer arrives: this process never reads an answer."""
    try:
        die_with(keeper)
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.dup2(2, 1)
        link = cast("IO[bytes]", keeper_side.makefile("rwb"))
        try:
            function = named_function(evaluator)
        except Exception as error:
            _say(link, Ended(sealed_child.RAISED, f"{type(error).__name__}: {error}".encode(errors="replace")))
            raise
        gc.freeze()
        _say(link, Ended(DONE))
        here, status = os.getpid(), 0
        while not status:
            pid = os.fork()
            if not pid:
                _evaluate_one(link, function, seal, limits, parent=here)
            _, status = os.waitpid(pid, 0)
    finally:
        os._exit(1)


def _evaluate_one(
    link: IO[bytes], evaluator: Callable[[str], str], seal: Seal, limits: ChildLimits, *, parent: int
) -> NoReturn:
    """Give one answer to a sealed process and pass its reply on; exit code 0 when there was an answer."""
    code = 1
    try:
        die_with(parent)
        answer = read_request(link)
        if answer is not None:
            ended = run_sealed(lambda: evaluator(answer.decode()).encode(), seal, limits)
            _say(link, ended)
            code = 0
    finally:
        os._exit(code)


def _say(link: IO[bytes], ended: Ended) -> None:
    link.write(bytes([ended.status]) + LENGTH.pack(len(ended.reply)) + ended.reply)
    link.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
