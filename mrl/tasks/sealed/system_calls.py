"""The system calls that a sealed process may make, and the filter that refuses all others.

The list is what a computing and importing Python interpreter needs: memory, clocks, its own signals, files for reading.
No call in it makes a process, a socket, a file, a mapping of another process's memory, or a signal to another process;
so there is nothing that namespaces would have to hide. Numbers are the kernel's own, per architecture.
"""

import os
import struct
from collections.abc import Iterator
from typing import NamedTuple


class Architecture(NamedTuple):
    """System call numbers of one architecture. `opening` maps calls to the place of their flags; `controls`: fcntl."""

    audit_arch: int
    allowed: frozenset[int]
    opening: dict[int, int]
    controls: int
    foreign_from: int
    """First number of another calling convention; 0 where there is none."""


_X86_64 = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8, "mmap": 9, "mprotect": 10,
    "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17, "readv": 19,
    "writev": 20, "access": 21, "sched_yield": 24, "mremap": 25, "madvise": 28, "nanosleep": 35, "getpid": 39,
    "exit": 60, "uname": 63, "getcwd": 79, "readlink": 89, "gettimeofday": 96, "getrusage": 98, "times": 100,
    "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "sigaltstack": 131, "gettid": 186, "time": 201,
    "futex": 202, "sched_getaffinity": 204, "getdents64": 217, "restart_syscall": 219, "clock_gettime": 228,
    "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231, "newfstatat": 262, "readlinkat": 267,
    "faccessat": 269, "getrandom": 318, "statx": 332, "rseq": 334, "faccessat2": 439,
}  # fmt: skip
_AARCH64 = {
    "read": 63, "write": 64, "close": 57, "fstat": 80, "lseek": 62, "mmap": 222, "mprotect": 226, "munmap": 215,
    "brk": 214, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139, "pread64": 67, "readv": 65,
    "writev": 66, "sched_yield": 124, "mremap": 216, "madvise": 233, "nanosleep": 101, "getpid": 172, "exit": 93,
    "uname": 160, "getcwd": 17, "gettimeofday": 169, "getrusage": 165, "times": 153, "getuid": 174, "getgid": 176,
    "geteuid": 175, "getegid": 177, "sigaltstack": 132, "gettid": 178, "futex": 98, "sched_getaffinity": 123,
    "getdents64": 61, "restart_syscall": 128, "clock_gettime": 113, "clock_getres": 114, "clock_nanosleep": 115,
    "exit_group": 94, "newfstatat": 79, "readlinkat": 78, "faccessat": 48, "getrandom": 278, "statx": 291,
    "rseq": 293, "faccessat2": 439,
}  # fmt: skip
ARCHITECTURES = {
    "x86_64": Architecture(0xC000003E, frozenset(_X86_64.values()), {2: 1, 257: 2}, 72, 0x40000000),
    "aarch64": Architecture(0xC00000B7, frozenset(_AARCH64.values()), {56: 2}, 25, 0),
}
"""`platform.machine()` -> numbers; other machines have no seal."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000
"""Actions of the filter. A refused call returns EPERM, an exception to an honest scorer; a call by another
convention ends the process."""
_PATH_ONLY, _TEMPORARY = 0o10000000, 0o20000000
CHANGING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | _PATH_ONLY | _TEMPORARY
"""Flags of opening a file that allow more than reading it."""
READING_CONTROLS = (1, 2, 3)
"""F_GETFD, F_SETFD and F_GETFL: the fcntl commands that opening a file needs."""


def filter_program(machine: Architecture, *, with_files: bool) -> bytes:
    """Return the seccomp program of a sealed process; `with_files`: whether files may be opened for reading."""
    return b"".join(struct.pack("<HBBI", *step) for step in _steps(machine, with_files=with_files))


def _steps(machine: Architecture, *, with_files: bool) -> Iterator[tuple[int, int, int, int]]:
    """Yield instructions: operation, steps to skip if true, steps to skip if false, operand."""
    yield _LOAD, 0, 0, _ARCH_AT
    yield _EQUAL, 1, 0, machine.audit_arch
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER_AT
    if machine.foreign_from:
        yield _AT_LEAST, 0, 1, machine.foreign_from
        yield _RETURN, 0, 0, _KILL
    for number in sorted(machine.allowed):
        yield _EQUAL, 0, 1, number
        yield _RETURN, 0, 0, _ALLOW
    if with_files:
        for number, place in machine.opening.items():
            yield _EQUAL, 0, 4, number
            yield _LOAD, 0, 0, _ARGUMENTS_AT + 8 * place
            yield _ANY_BIT, 1, 0, CHANGING
            yield _RETURN, 0, 0, _ALLOW
            yield _RETURN, 0, 0, _REFUSE
    yield _EQUAL, 0, 3 + len(READING_CONTROLS), machine.controls
    yield _LOAD, 0, 0, _ARGUMENTS_AT + 8
    for place, control in enumerate(READING_CONTROLS):
        yield _EQUAL, len(READING_CONTROLS) - place, 0, control
    yield _RETURN, 0, 0, _REFUSE
    yield _RETURN, 0, 0, _ALLOW
    yield _RETURN, 0, 0, _REFUSE
