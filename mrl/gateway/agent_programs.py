"""Agents that are programs: a process for each episode, with the gateway's address, a key and a row in its environment.

The program asks as any client of OpenAI's API does, posts its reward to `/v1/sessions/ID/reward`, and ends.
"""

import asyncio
import json
import math
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress

import structlog

from mrl.config.task_tables import TaskTable
from mrl.gateway.agent_start import AgentStarts, Started
from mrl.gateway.chat_wire import ChatRefusal
from mrl.gateway.session import AgentSession
from mrl.gateway.session_registry import SessionRegistry
from mrl.tasks.environments.contract import EXITED, GIVEN_UP, MEMORY, TIMEOUT

MODEL, ROW, SESSION = "MRL_MODEL", "MRL_ROW", "MRL_SESSION"
"""Environment variables of a program: the policy that plays, the row as JSON, the session."""
LIMITED = 'ulimit -c 0; ulimit -v "$1"; ulimit -S -t "$2"; ulimit -H -t "$3"; shift 3; exec "$@"'
"""Shell script whose arguments are KiB of address space, seconds of processor time (soft, hard) and the command."""
LOOK_S = 0.1
"""Seconds between two looks at a program."""
LEAVE_S = 10.0
"""Seconds that a program may go on after its episode is over."""
TAIL_BYTES, LINE_CHARS = 4096, 300
"""Bytes at the end of standard error that are kept, and characters of its last line that are told."""

log = structlog.get_logger()


def limited(table: TaskTable) -> list[str]:
    """Command line of a task's program, with the task's limits of address space and processor time."""
    seconds = math.ceil(table.episode_cpu_s)
    limits = (table.agent_memory_mib * 1024, seconds, seconds + 1)
    return ["sh", "-c", LIMITED, "sh", *map(str, limits), *table.command]


def variables(model: str, session_id: str, row: Mapping[str, object]) -> dict[str, str]:
    """Environment variables that describe an episode to its program."""
    return {MODEL: model, SESSION: session_id, ROW: json.dumps(row)}


class StandardError:
    """Standard error of one program: a pipe that is read in the event loop, of which the last TAIL_BYTES are kept."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._tail = b""
        asyncio.get_running_loop().add_reader(self._read_end, self._read)

    def started(self) -> None:
        """Close the write end here, once the process has its own copy of it."""
        os.close(self.write_end)

    def close(self) -> str:
        """Close the pipe, and return the last line that is not blank; "" where there is none."""
        self._read()
        asyncio.get_running_loop().remove_reader(self._read_end)
        os.close(self._read_end)
        return last_line(self._tail)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while data := os.read(self._read_end, 1 << 16):
                self._tail = (self._tail + data)[-TAIL_BYTES:]
            asyncio.get_running_loop().remove_reader(self._read_end)


def last_line(said: bytes) -> str:
    """Return the last line that is not blank, at most LINE_CHARS of it; "" where there is none."""
    lines = [line.strip() for line in said.decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")[:LINE_CHARS]


class AgentPrograms:
    """The programs of all tasks with a `command`. They end with this process."""

    def __init__(
        self,
        tasks: Mapping[str, TaskTable],
        starts: AgentStarts,
        registry: SessionRegistry,
        *,
        key_of: Callable[[str], str],
    ) -> None:
        """`key_of` gives the key of a session's id."""
        self._tasks = {task: table for task, table in tasks.items() if table.command}
        self._starts, self._registry, self._key_of = starts, registry, key_of
        self._places: list[asyncio.Task[None]] = []
        """Loops that each take one episode after another, `agent_processes` of them for a task."""
        self._told: set[str] = set()
        """Tasks of which the failure of a program was logged."""
        self.num_alive = 0
        """Number of programs that run."""

    def tend(self) -> None:
        """Start the loops that play, `agent_processes` of them for a task. Raises the exception that ended a loop."""
        if not self._places:
            places = [task for task, table in self._tasks.items() for _ in range(table.agent_processes)]
            self._places = [asyncio.ensure_future(self._serve(task)) for task in places]
        for place in self._places:
            if place.done():
                place.result()

    async def close(self) -> None:
        """Kill all programs."""
        for place in self._places:
            place.cancel()
        await asyncio.gather(*self._places, return_exceptions=True)

    async def _serve(self, task: str) -> None:
        while True:
            try:
                sessions = await self._registry.take(task=task)
            except ChatRefusal:  # too many agents wait, for now
                await asyncio.sleep(LEAVE_S)
                continue
            for session in sessions:
                await self._play(session)

    async def _play(self, session: AgentSession) -> None:
        table, heard = self._tasks[session.task], StandardError()
        told = variables(session.policy, session.session_id, session.row)
        environment = self._starts.environment(self._key_of(session.session_id)) | told
        how = {"stdout": subprocess.DEVNULL, "stderr": heard.write_end, "start_new_session": True}
        try:
            started = await self._starts.start(
                session.task, limited(table), environment, is_fenced=table.is_fenced, **how
            )
        except OSError as error:  # the row is too long for an environment variable, or the host has no process left
            heard.started()
            heard.close()
            self._failed(session, EXITED, f"the agent program could not be started: {error.strerror}")
            return
        heard.started()
        self.num_alive += 1
        try:
            code = await _ended(started, session)
        finally:
            self.num_alive -= 1
            kill_all(started.process)
            await started.end()
            line = heard.close()
        if not session.is_over:
            self._failed(session, *how_it_failed(code, line, table))

    def _failed(self, session: AgentSession, kind: str, words: str) -> None:
        if session.task not in self._told:
            self._told.add(session.task)
            log.warning("agent program gave no reward; its episode counts as failed", task=session.task, why=words)
        with suppress(ChatRefusal):  # the program has ended its episode itself
            session.fail(words, kind)


async def _ended(started: Started, session: AgentSession) -> int | None:
    """Wait for the exit code; None for a program that goes on when its episode is given up, or over for LEAVE_S."""
    left_s = LEAVE_S
    while (code := started.process.poll()) is None and left_s > 0:
        await asyncio.sleep(LOOK_S)
        if session.is_over:
            left_s = 0.0 if session.ending == GIVEN_UP else left_s - LOOK_S
    return code


def kill_all(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process that was started in a session of its own, with its process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def how_it_failed(code: int | None, line: str, table: TaskTable) -> tuple[str, str]:
    """Return kind and description of the failure of a program that ended without a reward."""
    if code == -signal.SIGXCPU:
        return TIMEOUT, f"the agent program used more than {math.ceil(table.episode_cpu_s)} s of CPU time"
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
    kind = MEMORY if line.startswith("MemoryError") else EXITED
    return kind, f"the agent program {how} and gave no reward" + f": {line}" * bool(line)
