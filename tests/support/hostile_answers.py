"""Answers that want more than to be right: Python programs for an evaluator that runs whatever it is given.

Each sets `result` to the right answer when it got what it is after; so a reward says that the seal broke. Names in
braces are filled in by the test: what exactly there is to be had on its machine.
"""

import textwrap

ATTACKS: dict[str, str] = {
    "a forged reply on every descriptor": """
        import os, struct
        good = b"\\x93\\x81\\xa0\\xcb" + struct.pack(">d", 1.0) + b"\\xa0\\xa0"
        for number in range(64):
            for reply in (good, b"\\0" + good, struct.pack("<BI", 0, len(good)) + good):
                try:
                    os.write(number, reply)
                except OSError:
                    pass
        os._exit(0)
    """,
    "a second reply behind the first": """
        import os
        for number in range(3, 64):
            try:
                os.write(number, b"\\0result")
            except OSError:
                pass
    """,
    "the verifier replaced": """
        import sys
        for name, module in list(sys.modules.items()):
            if name.startswith(("mrl.", "tests.")):
                for place, value in list(vars(module).items()):
                    if callable(value) and not isinstance(value, type):
                        setattr(module, place, lambda *a, **k: 1.0)
        import tests.support.evaluating
        tests.support.evaluating.KEPT.append("mine")
    """,
    "builtins replaced": """
        import builtins
        builtins.float = lambda *a: 1.0
        builtins.len = lambda *a: 0
        str.__eq__
    """,
    "what an earlier answer left": """
        import tests.support.evaluating
        if tests.support.evaluating.KEPT:
            result = {right!r}
        tests.support.evaluating.KEPT.append("mine")
    """,
    "the reference, among all objects": """
        import gc, re, sys
        token = re.compile("sesame" + "-[0-9]+-" + "reference")
        seen, frame = gc.get_objects(), sys._getframe()
        while frame:
            seen.append(frame.f_locals)
            frame = frame.f_back
        for one in seen:
            if not isinstance(one, type) and (found := token.search(repr(one))):
                result = found[0]
    """,
    "the reference, in raw memory": """
        import ctypes, re
        token = re.compile(b"sesame" + b"-[0-9]+-" + b"reference")
        for one in (result, {{}}, token, ctypes, "x" * 99, b"x" * 9):
            if found := token.search(ctypes.string_at(id(one) & ~0xFFFFF, 2**20)):
                result = found[0].decode()
    """,
    "the environment": """
        import ctypes, os
        ctypes.CDLL(None).getenv.restype = ctypes.c_char_p
        if "MRL_SECRET" in os.environ or ctypes.CDLL(None).getenv(b"MRL_SECRET"):
            result = {right!r}
    """,
    "a key file, in many ways": """
        import io, linecache, mmap, os, pathlib, importlib.machinery
        ways = [
            lambda: open({key!r}).read(), lambda: os.open({key!r}, os.O_RDONLY), lambda: io.open_code({key!r}).read(),
            lambda: pathlib.Path({key!r}).read_bytes(), lambda: linecache.getlines({key!r})[0],
            lambda: importlib.machinery.SourceFileLoader("x", {key!r}).get_data({key!r}),
            lambda: os.listdir(os.path.dirname({key!r}))[0], lambda: os.open({key!r}, os.O_PATH),
            lambda: os.sendfile(1, os.open({key!r}, os.O_RDONLY), 0, 9), lambda: os.link({key!r}, {made!r}),
            lambda: open("/proc/self/environ").read(), lambda: open("/proc/self/maps").read(),
            lambda: open(f"/proc/{{os.getppid()}}/environ").read(), lambda: os.listdir("/proc/self/fd"),
            lambda: open("/etc/passwd").read(), lambda: open("/dev/zero").read(1), lambda: os.chdir("/"),
        ]
        for way in ways:
            try:
                way()
                result = {right!r}
            except (OSError, IndexError):
                pass
    """,
    "a file written, in many ways": """
        import logging, os, sqlite3, tempfile
        from multiprocessing import shared_memory
        ways = [
            lambda: open({made!r}, "w"), lambda: os.open({made!r}, os.O_CREAT | os.O_WRONLY), lambda: os.mkdir({made!r}),
            lambda: sqlite3.connect({made!r}).execute("create table t (x)"), lambda: logging.FileHandler({made!r}),
            lambda: os.symlink("/", {made!r}), lambda: os.mkfifo({made!r}), lambda: os.rename({key!r}, {made!r}),
            lambda: os.unlink({key!r}), lambda: os.chmod({key!r}, 0o777), lambda: os.truncate({key!r}, 0),
            lambda: os.open({key!r}, os.O_WRONLY), lambda: tempfile.TemporaryFile(), lambda: os.memfd_create("x"),
            lambda: os.open("/dev/shm/mrl-hostile", os.O_CREAT | os.O_RDWR), lambda: os.utime({key!r}),
            lambda: shared_memory.SharedMemory("mrl-hostile", create=True, size=4096), lambda: os.pipe(),
            lambda: os.posix_fallocate(1, 0, 2**30), lambda: os.setxattr({key!r}, "user.x", b"1"),
        ]
        for way in ways:
            try:
                way()
                result = {right!r}
            except (OSError, sqlite3.Error):
                pass
    """,
    "a socket": """
        import socket
        for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, 16, 17):
            try:
                link = socket.socket(family, socket.SOCK_STREAM if family < 16 else socket.SOCK_RAW)
                result = {right!r}
                link.connect(("127.0.0.1", {port}))
            except OSError:
                pass
        try:
            socket.socketpair()
            result = {right!r}
        except OSError:
            pass
    """,
    "signals": """
        import os, signal
        for pid in (os.getppid(), {tester}, 1, -1, 0, os.getpid()):
            for kind in (0, signal.SIGTERM, signal.SIGKILL):
                for way in (os.kill, os.killpg):
                    try:
                        way(pid, kind)
                        result = {right!r}
                    except OSError:
                        pass
        try:
            signal.pidfd_send_signal(os.pidfd_open(os.getppid()), signal.SIGKILL)
            result = {right!r}
        except OSError:
            pass
    """,
    "raw system calls": """
        import ctypes, os
        call = ctypes.CDLL(None, use_errno=True).syscall
        room = ctypes.create_string_buffer(4096)
        parent = os.getppid()
        raw = {{
            "clone": (56, 17), "fork": (57,), "vfork-like clone3": (435, room, 88), "execve": (59, b"/bin/true", 0, 0),
            "kill": (62, parent, 9), "tkill": (200, parent, 9), "tgkill": (234, parent, parent, 9),
            "ptrace": (101, 16, parent, 0, 0), "process_vm_readv": (310, parent, room, 1, room, 1, 0),
            "socket": (41, 2, 1, 0), "shmget": (29, 4242, 4096, 0o1777), "shmget kept": (29, 0, 4096, 0o1777),
            "msgget": (68, 4242, 0o1777), "memfd": (319, b"x", 0), "unshare": (272, 0x10000000), "setns": (308, 0, 0),
            "mount": (165, b"none", b"/tmp", b"tmpfs", 0, 0), "chroot": (161, b"/"), "bpf": (321, 0, room, 120),
            "io_uring": (425, 8, room), "keyctl": (250, 0, -3, 1), "add_key": (248, b"user", b"k", b"v", 1, -3),
            "prctl death signal": (157, 1, 0, 0, 0, 0), "setrlimit": (160, 9, room), "prlimit": (302, parent, 9, room, 0),
            "setitimer": (38, 2, room, 0), "timer_create": (222, 0, 0, room), "setpriority": (141, 0, parent, 19),
            "sched_setaffinity": (203, parent, 8, room), "openat2": (437, -100, b"/etc/passwd", room, 24),
            "open_by_handle_at": (304, 0, room, 0), "userfaultfd": (323, 0), "perf_event": (298, room, 0, -1, -1, 0),
            "setsid": (112,), "dup": (32, 1), "dup2": (33, 1, 9), "pipe": (22, room), "eventfd": (290, 0, 0),
            "creat": (85, b"/tmp/mrl-hostile", 0o644), "unlink": (87, {key!r}.encode()), "sysctl-like uname write": (170, room, 1),
            "reboot": (169, 0xFEE1DEAD, 672274793, 0), "pidfd_open": (434, parent, 0), "landlock": (446, 9, 0),
            "fcntl setown": (72, 1, 8, parent), "ioctl": (16, 1, 0x5412, room), "personality": (135, 0x0040000),
        }}
        if os.uname().machine == "x86_64":
            for name, (number, *rest) in raw.items():
                values = [ctypes.c_long(one) if isinstance(one, int) else one for one in rest]
                if call(ctypes.c_long(number), *values) != -1:
                    result = {right!r}
    """,
    "processes": """
        import multiprocessing, os, subprocess
        ways = [
            os.fork, os.forkpty, lambda: subprocess.run(["true"]), lambda: os.posix_spawn("/bin/true", ["true"], {{}}),
            lambda: multiprocessing.Process(target=print).start(), lambda: os.execv("/bin/true", ["true"]),
            lambda: os.popen("true"),
        ]
        for way in ways:
            try:
                if way() == 0:
                    os._exit(0)
                result = {right!r}
            except OSError:
                pass
    """,
    "a process by the C module": """
        import os, _posixsubprocess
        result = ""
        try:
            import subprocess
            subprocess._USE_VFORK = subprocess._USE_POSIX_SPAWN = False
            subprocess.Popen(["/bin/sh", "-c", "touch {made}"])
            result = {right!r}
        except OSError:
            pass
    """,
    "a thread that goes on": """
        import threading
        try:
            threading.Thread(target=lambda: None).start()
            result = {right!r}
        except RuntimeError:
            pass
    """,
    "limits lifted": """
        import resource, signal
        limits = [resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE]
        ways = [lambda: signal.setitimer(signal.ITIMER_PROF, 0)]
        ways += [lambda one=one: resource.setrlimit(one, (-1, -1)) for one in limits]
        for way in ways:
            try:
                way()
                result = {right!r}
            except (OSError, ValueError):
                pass
    """,
    "log lines forged": """
        import faulthandler, os, sys, warnings
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            print("FORGED", file=stream, flush=True)
        for number in (0, 1, 2):
            os.write(number, b"FORGED\\n")
        warnings.warn("FORGED")
        faulthandler.dump_traceback()
    """,
    "an exception that forges a log line": 'raise ValueError("\\nFORGED " + {right!r})',
    "an exception that hides what it is": """
        class Strange(BaseException):
            def __str__(self): raise self
            __repr__ = __str__
        raise Strange
    """,
    "no text as a result": "result = 1.0",
    "a text that is none": 'result = "\\ud83d"',
    "something that says it is equal": """
        class Equal(str):
            def __eq__(self, other): return True
            def encode(self, *a): return {right!r}.encode()[:3]
            __hash__ = str.__hash__
        result = Equal("x")
    """,
    "too much of a result": 'result = "x" * 10_000_000',
    "a flood on the reply": """
        import os
        while True:
            for number in range(3, 64):
                try:
                    os.write(number, b"x" * 65536)
                except OSError:
                    pass
    """,
    "the reply closed": """
        import os
        os.closerange(0, 64)
        while True:
            pass
    """,
    "an exit": "import os; os._exit(0)",
    "a polite exit": "raise SystemExit(0)",
    "an abort": "import os; os.abort()",
    "a null pointer": "import ctypes; ctypes.string_at(0)",
    "a stack overflow": "def f(): f()\nimport sys; sys.setrecursionlimit(10**9); f()",
    "deep brackets": "(" * 5_000,
    "much memory": "result = bytearray(10**11)",
    "memory bit by bit": "x = []\nwhile True: x.append(bytearray(10**7))",
    "what is left for the interpreter's end": """
        import atexit
        atexit.register(lambda: None)
        class Late:
            def __del__(self): open({made!r}, "w")
        kept = Late()
    """,
}
"""What it is after -> the program."""

ENDLESS: dict[str, str] = {
    "an endless loop": "while True: pass",
    "a loop that ignores the signal": "import signal\nsignal.signal(signal.SIGPROF, signal.SIG_IGN)\nwhile True: pass",
    "a sleep": "import time; time.sleep(1000)",
    "a wait for a lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "a big power": "result = str(9**9**9)",
    "a regular expression": 'import re; re.match(r"(a+)+$", "a" * 64 + "b")',
}
"""Programs that end by a limit alone."""


def program(text: str, **names: object) -> str:
    """One attack, with what there is to be had filled in; those on one line are taken as they stand."""
    text = textwrap.dedent(text)
    return text.format(**names) if "{" in text else text
