"""A network namespace for an agent, from which it reaches the gateway and nothing else.

Runs as a script before the agent, `python -I -S agent_network.py PORT COMMAND...`: the script leaves the host's network
for a namespace that has nothing but loopback, listens there at the gateway's port, hands the listening socket to the
gateway over its standard input, and becomes the agent. A socket stays in the namespace in which it was made, so the
gateway answers any client inside, at its usual port. Where the kernel gives no namespace, the script sends the reason
to the gateway, and the agent keeps the host's network.

The namespace guards against accidents of an agent, and against calls that a policy has its tools make. It is no
sandbox: files and Unix sockets stay within reach, and the agent runs with the user's rights.
"""

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache

URL, KEY = "MRL_GATEWAY_URL", "MRL_GATEWAY_KEY"
"""Environment variables of an agent process: the gateway's URL, which ends in /v1, and the run's key."""
PLAYER = "MRL_AGENT_PLAYER"
"""Environment variable of a process that plays functions: its name, by which its episodes are given up when it ends."""
BASE_URL = "OPENAI_BASE_URL"
"""Environment variable of the gateway's URL in which OpenAI's own clients look for it."""
FENCED = "MRL_AGENT_FENCED"
"""Environment variable that is set for an agent process in a network of its own."""
START_S = 60.0
"""Seconds that the script has to report whether it has a namespace."""
BACKLOG = 1024
"""Length of the queue of connections to accept: a process of agents makes hundreds at once."""
MAX_REASON_BYTES = 1024
_PROBE = "--probe"
_HERE = "127.0.0.1"
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_SET_FLAGS, _UP = 0x8914, 0x1


def fenced(argv: Sequence[str], port: int) -> list[str]:
    """Command line that runs `argv` in a network of its own. Standard input has to be a socket for `handed_over`."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(port), *argv]


def handed_over(ours: socket.socket) -> tuple[socket.socket | None, str]:
    """Return the socket at which the gateway is to listen, or None and the reason. Waits for START_S at most."""
    ours.settimeout(START_S)
    try:
        said, descriptors, _, _ = socket.recv_fds(ours, MAX_REASON_BYTES, 1)
    except OSError as error:
        return None, f"the process did not answer at its start: {error}"
    if not descriptors:
        return None, said.decode(errors="replace") or "the process exited at its start"
    return socket.socket(fileno=descriptors[0]), ""


@cache
def unfenced_reason() -> str:
    """Return why agents have this host's network; "" where they get their own. Tried once in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", os.path.abspath(__file__), _PROBE],
        capture_output=True, text=True, timeout=START_S, check=False,
    )  # fmt: skip
    return (
        ""
        if not done.returncode
        else (done.stdout + done.stderr).strip()[-MAX_REASON_BYTES:] or "the trial process exited"
    )


def described_network() -> str:
    """Describe in words what agents that a run starts can reach on this host."""
    reason = unfenced_reason()
    return f"all that this host reaches: no network namespace available ({reason})" if reason else "only the gateway"


def inside(environment: Mapping[str, str], port: int) -> dict[str, str]:
    """Environment variables of a process in a network of its own, in which the gateway listens at `port`."""
    url = f"http://{_HERE}:{port}/v1"
    return {**environment, URL: url, BASE_URL: url, FENCED: "1"}


def _leave() -> None:
    """Move this process into a new network namespace, which has loopback alone. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare"):
        raise OSError("network namespaces require Linux")
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_NEW_NETWORK):  # root may do this; others need a user namespace, in which they have root's rights
        if libc.unshare(_NEW_USER | _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
        for name, words in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
                file.write(words)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        fcntl.ioctl(asked, _SET_FLAGS, struct.pack("16sH14x", b"lo", _UP))


def _tried() -> str:
    """Return why this process can get no namespace, or "". A forked child tries, since half a move has no way back."""
    read_end, write_end = os.pipe()
    if not (pid := os.fork()):
        try:
            _leave()
            with socket.create_server((_HERE, 0)):
                os._exit(0)
        except OSError as error:
            os.write(write_end, str(error).encode()[:MAX_REASON_BYTES])
        finally:
            os._exit(1)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as said:
        reason = said.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    return reason or "the trial process exited" if status else ""


def _main(words: list[str]) -> int:
    reason = _tried()
    if words == [_PROBE]:
        print(reason)
        return int(bool(reason))
    port, argv = int(words[0]), words[1:]
    environment: Mapping[str, str] = os.environ
    with socket.socket(fileno=os.dup(0)) as handing:
        if reason:
            handing.send(reason.encode())
        else:
            _leave()
            environment = inside(environment, port)
            with socket.create_server((_HERE, port), backlog=BACKLOG) as listening:
                socket.send_fds(handing, [b"here"], [listening.fileno()])
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.execvpe(argv[0], argv, environment)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
