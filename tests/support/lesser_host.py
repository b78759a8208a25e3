"""Restrictions of a lesser host: filters that a container would install, laid on a test's own process."""

import ctypes
import platform
import struct

ENOSYS, EINVAL = 38, 22
LANDLOCK = 444
PRCTL = {"x86_64": 157, "aarch64": 167}[platform.machine()]
SET_SECCOMP = 22
LOAD, EQUAL, RETURN, ALLOW, FAIL = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000


def without_landlock() -> None:
    """Make this process find no Landlock, as on a kernel without it."""
    _filter([(EQUAL, 0, 1, LANDLOCK), (RETURN, 0, 0, FAIL | ENOSYS)])


def without_seccomp() -> None:
    """Make this process unable to install filters."""
    _filter([(EQUAL, 0, 3, PRCTL), (LOAD, 0, 0, 16), (EQUAL, 0, 1, SET_SECCOMP), (RETURN, 0, 0, FAIL | EINVAL)])


def without_rights() -> None:
    """Drop all of root's capabilities, now and for all processes started from here."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    if libc.capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def _filter(steps: list[tuple[int, int, int, int]]) -> None:
    program = b"".join(struct.pack("<HBBI", *one) for one in [(LOAD, 0, 0, 0), *steps, (RETURN, 0, 0, ALLOW)])
    text = ctypes.create_string_buffer(program, len(program))
    libc = ctypes.CDLL(None, use_errno=True)
    pointer = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(text))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(SET_SECCOMP, 2, pointer, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")
