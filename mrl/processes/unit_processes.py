"""Find all processes of an engine on a unit, by the environment that they were started with."""

from collections.abc import Mapping

import psutil


def processes_by(name: str, variables: Mapping[str, str]) -> dict[str, list[int]]:
    """Return this user's processes that were started with `variables`, as pids by the value of the variable `name`.

    The value is "" where `name` is not set. Every descendant inherits the variables, also a descendant that leads a
    session of its own, or whose parent has died. A process that has ended and is not yet reaped does not count: it
    holds no resources.
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
