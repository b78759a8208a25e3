"""Agents that are programs: a process for each episode, with the gateway's address, a key and a row in its environment.

It asks as any client of OpenAI's API does, posts its reward to `/v1/sessions/ID/reward`, and ends.
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
from mrl.gateway.chat_wire import ChatMistake
from mrl.gateway.session import AgentSession
from mrl.gateway.session_book import SessionBook
from mrl.tasks.environments.contract import EXITED, GIVEN_UP, MEMORY, TIMEOUT

MODEL, ROW, SESSION = "MRL_MODEL", "MRL_ROW", "MRL_SESSION"
"""Environment variables of a program: the policy that plays, the row as JSON, the session."""
LIMITED = 'ulimit -c 0; ulimit -v "$1"; ulimit -S -t "$2"; ulimit -H -t "$3"; shift 3; exec "$@"'
LOOK_S = 0.1
LEAVE_S = 10.0
"""For what a program still does when its episode is over."""
TAIL_BYTES, LINE_CHARS = 4096, 300

log = structlog.get_logger()


def limited(table: TaskTable) -> list[str]:
    """The command line of a program, within the address space and the processor time that its task gives."""
    seconds = math.ceil(table.episode_cpu_s)
    limits = (table.agent_memory_mib * 1024, seconds, seconds + 1)
    return ["sh", "-c", LIMITED, "sh", *map(str, limits), *table.command]


def variables(model: str, session_id: str, row: Mapping[str, object]) -> dict[str, str]:
    """What a program is told of its episode."""
    return {MODEL: model, SESSION: session_id, ROW: json.dumps(row)}


class StandardError:
    """What a program says there: its end, and the pipe that is read in the event loop."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._tail = b""
        asyncio.get_running_loop().add_reader(self._read_end, self._read)

    def started(self) -> None:
        """The process has the other end."""
        os.close(self.write_end)

    def close(self) -> str:
        """The last line, "" where there is none."""
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
    """The last line that says anything."""
    lines = [line.strip() for line in said.decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")[:LINE_CHARS]


class AgentPrograms:
    """The programs of all tasks that have one. They end with this process."""

    def __init__(
        self,
        tasks: Mapping[str, TaskTable],
        starts: AgentStarts,
        book: SessionBook,
        *,
        key_of: Callable[[str], str],
    ) -> None:
        """`key_of` gives the key of a session."""
        self._tasks = {task: table for task, table in tasks.items() if table.command}
        self._starts, self._book, self._key_of = starts, book, key_of
        self._places: list[asyncio.Task[None]] = []
        self._told: set[str] = set()
        """Tasks of which a program's failure stands in the log."""
        self.num_alive = 0

    def tend(self) -> None:
        """Play, as many episodes at a time as each task gives processes. Raises what a place of theirs ended by."""
        if not self._places:
            places = [task for task, table in self._tasks.items() for _ in range(table.agent_processes)]
            self._places = [asyncio.ensure_future(self._serve(task)) for task in places]
        for place in self._places:
            if place.done():
                place.result()

    async def close(self) -> None:
        """Kill them."""
        for place in self._places:
            place.cancel()
        await asyncio.gather(*self._places, return_exceptions=True)

    async def _serve(self, task: str) -> None:
        while True:
            try:
                sessions = await self._book.take(task=task)
            except ChatMistake:  # too many agents wait, for now
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
        except OSError as error:  # its row is longer than an environment may be, or the host has no process left
            heard.started()
            heard.close()
            self._failed(session, EXITED, f"its program cannot be started: {error.strerror}")
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
            log.warning("a program gave no reward, and its episode counts as failed", task=session.task, why=words)
        with suppress(ChatMistake):  # it has said so itself
            session.fail(words, kind)


async def _ended(started: Started, session: AgentSession) -> int | None:
    """The exit code; None for one that goes on when its episode is given up, or has been over for a while."""
    left_s = LEAVE_S
    while (code := started.process.poll()) is None and left_s > 0:
        await asyncio.sleep(LOOK_S)
        if session.is_over:
            left_s = 0.0 if session.ending == GIVEN_UP else left_s - LOOK_S
    return code


def kill_all(process: "subprocess.Popen[bytes]") -> None:
    """A process that was started in a session of its own, and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def how_it_failed(code: int | None, line: str, table: TaskTable) -> tuple[str, str]:
    """Kind and words of the end of a program without a reward."""
    if code == -signal.SIGXCPU:
        return TIMEOUT, f"its program used more than {math.ceil(table.episode_cpu_s)} s of processor time"
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
    kind = MEMORY if line.startswith("MemoryError") else EXITED
    return kind, f"its program {how} and gave no reward" + f": {line}" * bool(line)
