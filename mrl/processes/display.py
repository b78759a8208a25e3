"""The supervisor's output: a live view on a terminal, lines elsewhere.

A run goes on without a reader: once its terminal is closed, or the program that read its output has ended, it shows
nothing.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

import structlog
from rich.console import Console, RenderableType
from rich.live import Live

from mrl.files import DISK_FULL
from mrl.records.telemetry_messages import TelemetryRecord

if TYPE_CHECKING:
    from mrl.report.run_display import RunDisplay

REFRESH_S = 0.5
HEARTBEAT_LINE_S = 10.0
STDERR = 2

log = structlog.get_logger()


class RunConsole(Console):
    """A console that may be lost (terminal closed, pipe broken) without ending the run."""

    def say(self, text: str) -> None:
        """Print one line as it is, without markup. Raises OSError as `show` does."""
        self.show(self.print, text, markup=False, highlight=False, soft_wrap=True)

    def show(self, tell: Callable[..., None], *words: RenderableType, **how: bool) -> None:
        """Call `tell`, a method that prints on this console; losing the console is no error.

        Raises OSError when a disk is full: a person has to cure that, for the run's own files too.
        """
        try:
            tell(*words, **how)
        except OSError as error:
            if error.errno in DISK_FULL:
                raise
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Print nothing from now on. rich alone would end the process once its reader has left.

        Redirects the console's file to /dev/null for every writer, and stderr too where both are the same file.
        """
        self.quiet = True
        with suppress(OSError):  # the console's file has no descriptor
            shown, nothing = self.file.fileno(), os.open(os.devnull, os.O_WRONLY)
            if os.path.sameopenfile(shown, STDERR):
                os.dup2(nothing, STDERR)
            os.dup2(nothing, shown)
            os.close(nothing)
        log.warning("output closed: nothing more is shown, but the run continues", reason=str(sys.exception()))


class Display:
    """Shows a board on `console`; a context manager that restores the terminal however the run ends."""

    def __init__(self, board: "RunDisplay", console: RunConsole) -> None:
        self.board, self.console = board, console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._next_s = 0.0

    def __enter__(self) -> "Display":
        if self._live:
            self.console.show(self._live.start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self.console.show(self._live.update, self.board.render_ended(), refresh=True)
            self.console.show(self._live.stop)

    def record(self, record: TelemetryRecord, now_s: float) -> None:
        """Update the board with one record and, without a terminal, print the record's line."""
        self.board.apply(record, now_s)
        line = self.board.step_line(record) if self._live is None else None
        if line is not None:
            self.line(line)
        for text in self.board.take_due():
            self.event(text, now_s)

    def event(self, text: str, now_s: float) -> None:
        """Show an event in the live view, or print it where there is none."""
        self.board.note(text, now_s)
        if self._live is None:
            self.line(text)

    def line(self, text: str) -> None:
        """Print one line as it is, above the live view if there is one."""
        self.console.say(text)

    def refresh(self, now_s: float) -> None:
        """Redraw the live view, or print the heartbeat line, when that is due."""
        if now_s < self._next_s:
            return
        if self._live:
            self.console.show(self._live.update, self.board.render(now_s), refresh=True)
        elif self._next_s:
            self.line(self.board.heartbeat_line(now_s))
        self._next_s = now_s + (REFRESH_S if self._live else HEARTBEAT_LINE_S)
