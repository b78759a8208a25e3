"""Processes of an engine on a unit, wherever they went: found by the environment that they were started with."""

from collections.abc import Mapping

import psutil


def processes_with(variables: Mapping[str, str]) -> list[int]:
    """Processes of this user that have all of these in the environment that they were started with."""
    return [pid for pids in grouped_by("", variables).values() for pid in pids]


def grouped_by(name: str, variables: Mapping[str, str]) -> dict[str, list[int]]:
    """The same by the value of another variable, "" where it is not set.

    Every descendant inherits them, also one that leads a session of its own or whose parent has died. Those that have
    ended and are not yet reaped do not count: they hold nothing.
    """
    found: dict[str, list[int]] = {}
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:  # of another user, or gone
            continue
        if variables.items() <= environment.items():
            found.setdefault(environment.get(name, ""), []).append(process.pid)
    return found
