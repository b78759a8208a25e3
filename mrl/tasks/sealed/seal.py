"""The seal of a process that runs code of a policy: the process can compute, and write one reply, and no more.

`seccomp` refuses every system call that is not on a short list (`system_calls`): no process, socket, signal, file for
writing, or look into another process. `Landlock` leaves only Python's own libraries open for reading; where the kernel
has no Landlock, no file can be opened at all. Both need no rights, and hold for root and in a container as well.
"""

import ctypes
import errno
import functools
import os
import platform
import resource
import site
import socket
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mrl.tasks.sealed.system_calls import ARCHITECTURES, filter_program

_SET_SECCOMP, _FILTER, _SET_NO_NEW_PRIVILEGES, _SET_DEATH_SIGNAL, _KILL = 22, 2, 38, 1, 9
_CREATE_RULES, _ADD_RULE, _RESTRICT, _BENEATH = 444, 445, 446, 1
_ALL_FILE_RIGHTS = 0x1FFF
"""Rights of the first version of Landlock. Nothing that is open here could use the rights of later versions."""
_EXECUTE, _READ_FILE, _READ_FOLDER = 1, 4, 8
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache")
OPEN_FILES = 64
TRIAL_S = 60.0

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Seal:
    """The seal of this host, prepared once; every process of the pool closes itself by `close_up`."""

    program: bytes
    """The filter of system calls; empty where answers are trusted and only limits hold."""
    rules: int
    """File descriptor of Landlock's rules; -1 where the kernel has none."""

    def close_up(self, *, reply: int, memory_bytes: int, cpu_s: int) -> None:
        """Close this process: it can then only compute and write to `reply`; 0, 1, 2 lead nowhere. Raises OSError."""
        os.environ.clear()
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        limits = {
            resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_CPU: cpu_s, resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: 0, resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_NOFILE: OPEN_FILES, resource.RLIMIT_NPROC: 0,
        }  # fmt: skip
        _control(_SET_NO_NEW_PRIVILEGES, 1)
        if self.rules >= 0 and libc.syscall(_RESTRICT, self.rules, 0):
            raise _failed("Landlock")
        os.closerange(3, reply)
        os.closerange(reply + 1, max(highest, reply) + 1)
        for limit, value in limits.items():
            resource.setrlimit(limit, (value, value))
        if not self.program:
            return
        text = ctypes.create_string_buffer(self.program, len(self.program))
        program = struct.pack("HxxxxxxQ", len(self.program) // 8, ctypes.addressof(text))
        _control(_SET_SECCOMP, _FILTER, program)


def die_with(parent: int) -> None:
    """Have this process end with the one that forked it, or at once when that is gone already."""
    _control(_SET_DEATH_SIGNAL, _KILL)
    if os.getppid() != parent:
        os._exit(1)


@functools.lru_cache(maxsize=1)
def unsealed_reason() -> str:
    """Return why this host cannot seal a process; empty when it can. Found once, by a separate program."""
    argv = (sys.executable, "-m", "mrl.tasks.sealed.seal")
    try:
        found = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=TRIAL_S, check=False)
    except subprocess.TimeoutExpired:
        return f"sealing a process takes longer than {TRIAL_S:.0f} s"
    said = found.stdout.decode(errors="replace").strip()
    return said if found.returncode == 0 else f"the test of the seal ended with exit code {found.returncode}"


def host_seal() -> "Seal | str":
    """Return the seal of this host, tried on a process forked from this one; or in words why there is none."""
    machine = ARCHITECTURES.get(platform.machine())
    if sys.platform != "linux" or machine is None:
        return f"{sys.platform} on {platform.machine()} is not supported"
    try:
        rules = _file_rules()
        seal = Seal(filter_program(machine, with_files=rules >= 0), rules)
    except OSError as error:
        return f"Landlock rejects its rules ({error.strerror})"
    return _tried(seal) or seal


def _tried(seal: Seal) -> str:
    """Return "" when a sealed process still computes and is refused what it should be, else what happened."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            seal.close_up(reply=write_end, memory_bytes=resource.RLIM_INFINITY, cpu_s=10)
            said = _open_doors()
        except BaseException as error:  # noqa: BLE001 - the process's outer edge; what it says is the finding
            said = f"the kernel rejects the seal: {error}"
        os.write(write_end, said.encode()[:500] or b"\0")
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as replies:
        heard = replies.read()
    os.waitpid(pid, 0)
    if not heard:
        return "a sealed process ends without a reply"
    return heard.strip(b"\0").decode(errors="replace")


def _open_doors() -> str:
    """Return what a sealed process can do and must not; empty when there is nothing."""
    tries: dict[str, Callable[[], object]] = {
        "read a file": lambda: os.open("/proc/self/environ", os.O_RDONLY),
        "write a file": lambda: os.open("/dev/null", os.O_WRONLY),
        "create a process": os.fork,
        "open a socket": socket.socket,
        "signal its parent": lambda: os.kill(os.getppid(), 0),
    }
    for what, attempt in tries.items():
        try:
            attempt()
        except PermissionError:
            continue
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0)
            return f"a sealed process that tries to {what} gets {code} instead of a permission error"
        return f"a sealed process can {what}"
    return ""


def _file_rules() -> int:
    """Return a descriptor of rules that leave Python's libraries for reading; -1 without Landlock. Raises OSError."""
    wanted = struct.pack("Q", _ALL_FILE_RIGHTS)
    rules = libc.syscall(_CREATE_RULES, wanted, len(wanted), 0)
    if rules < 0:
        return -1
    for path in _libraries():
        rights = _READ_FILE | _EXECUTE | (_READ_FOLDER if path.is_dir() else 0)
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if libc.syscall(_ADD_RULE, rules, _BENEATH, struct.pack("=Qi", rights, place), 0):
                raise _failed("Landlock")
        finally:
            os.close(place)
    os.set_inheritable(rules, False)
    return int(rules)


def _libraries() -> Iterator[Path]:
    """Return folders and files with code: of the paths where modules are found only those that installers write."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    found = {Path(sysconfig.get_path(name)) for name in names}
    found |= {Path(sys.base_prefix) / "lib", Path(sys.base_exec_prefix) / "lib", Path(__file__).parents[2]}
    found |= {Path(name) for name in (*site.getsitepackages(), site.getusersitepackages(), *_LIBRARIES)}
    return (path for path in sorted(found) if path.exists())


def _control(option: int, *arguments: int | bytes) -> None:
    """Call `prctl`. Raises OSError."""
    full = [*arguments, 0, 0, 0, 0][:4]
    if libc.prctl(option, *(ctypes.c_ulong(one) if isinstance(one, int) else one for one in full)):
        raise _failed("prctl")


def _failed(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    found = host_seal()
    sys.stdout.write(found if isinstance(found, str) else "")
