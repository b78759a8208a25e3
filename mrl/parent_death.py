"""Bind a process to the life of its supervisor: it dies with the supervisor, however the supervisor ends.

The module runs as a script, `python -I -S parent_death.py SUPERVISOR_PID COMMAND...`, between the supervisor and a
role: it asks the kernel for SIGKILL at the parent's death, then becomes the role by exec. This replaces a `preexec_fn`,
which is unsafe in a process with threads. The request survives exec but not fork, so torchrun's ranks call
`die_with_supervisor` themselves.
"""

import ctypes
import os
import signal
import sys

SUPERVISOR_PID = "MRL_SUPERVISOR_PID"
CORES = "MRL_CORES"
"""Environment variable with the cores that a role may run on, as "0,1"; applied before the role starts any thread."""
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask for SIGKILL at the death of this process's parent (Linux only; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def die_with_supervisor() -> None:
    """Call `die_with_parent` if a supervisor started this process, directly or through torchrun; else do nothing.

    Ends the process at once when the supervisor has ended already. Every role command calls this first.
    """
    supervisor = os.environ.get(SUPERVISOR_PID, "")
    if not supervisor.isdigit():
        return
    die_with_parent()
    try:
        os.kill(int(supervisor), 0)
    except ProcessLookupError:
        os._exit(1)
    except PermissionError:
        pass


def command(supervisor_pid: int, argv: tuple[str, ...]) -> list[str]:
    """Return the command line that runs `argv` bound to the life of the process `supervisor_pid`."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(supervisor_pid), *argv]


def bind(cores: set[int]) -> None:
    """Bind this process to these cores; end it with an error message when it may not run on one of them."""
    lacking = sorted(cores - os.sched_getaffinity(0))
    if lacking:  # the kernel would silently bind to the rest, or its error would name no core
        sys.stderr.write(f"mrl: error: CPU core {lacking[0]} is not available to this run on this host\n")
        os._exit(2)
    os.sched_setaffinity(0, cores)


def _main(supervisor_pid: int, argv: list[str]) -> None:
    die_with_parent()
    if os.getppid() != supervisor_pid:  # the supervisor died before `die_with_parent` took effect
        os._exit(1)
    try:
        if os.environ.get(CORES):
            bind({int(core) for core in os.environ[CORES].split(",")})
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"mrl: error: cannot start {argv[0]} ({error.strerror})\n")
        os._exit(2)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
