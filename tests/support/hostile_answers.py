"""Hostile answers: Python programs for an evaluator that runs any program.

Each sets `result` to the right answer when its attack succeeded; so a reward says that the seal broke. Names in braces
are filled in by the test with the files, ports and process ids of its machine.
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
            lambda: open({made!r}, "w"), lambda: os.open({made!r}, os.O_CREAT | os.O_WRONLY),
            lambda: os.mkdir({made!r}),
            lambda: sqlite3.connect({made!r}).execute("create table t (x)"), lambda: logging.FileHandler({made!r}),
            lambda: os.symlink("/", {made!r}), lambda: os.mkfifo({made!r}), lambda: os.rename({key!r}, {made!r}),
            lambda: os.unlink({key!r}), lambda: os.chmod({key!r}, 0o777), lambda: os.truncate({key!r}, 0),
            lambda: os.open({key!r}, os.O_WRONLY), lambda: tempfile.TemporaryFile(), lambda: os.memfd_create("x"),
            lambda: os.open("/dev/shm/mrl-hostile-{tester}", os.O_CREAT | os.O_RDWR), lambda: os.utime({key!r}),
            lambda: shared_memory.SharedMemory("mrl-hostile-{tester}", create=True, size=4096), lambda: os.pipe(),
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
            except (OSError, TypeError):
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
            for way in (os.kill, os.killpg):
                try:
                    way(pid, 0)
                    result = {right!r}
                except (OSError, ValueError):
                    pass
        for way in (lambda: os.kill(os.getppid(), signal.SIGKILL), lambda: os.pidfd_open(os.getppid())):
            try:
                way()
                result = {right!r}
            except OSError:
                pass
    """,
    "raw system calls": """
        import ctypes, os
        libc, parent = ctypes.CDLL(None, use_errno=True), os.getppid()
        numbers = dict(
            clone=56, fork=57, vfork=58, clone3=435, execve=59, execveat=322, kill=62, tkill=200, tgkill=234,
            ptrace=101, process_vm_readv=310, process_vm_writev=311, socket=41, shmget=29, socketpair=53,
            shmat=30, msgget=68, semget=64, mq_open=240, memfd_create=319, unshare=272, setns=308, mount=165,
            umount=166, chroot=161, pivot_root=155, bpf=321, keyctl=250, add_key=248, io_uring_setup=425,
            io_setup=206, prctl=157, arch_prctl=158, setrlimit=160, prlimit64=302, setitimer=38,
            timer_create=222, alarm=37, setpriority=141, openat2=437, sched_setaffinity=203,
            open_by_handle_at=304, userfaultfd=323, perf_event_open=298, dup=32, setsid=112, dup2=33, pipe=22,
            pipe2=293, eventfd2=290, creat=85, unlink=87, mkdir=83, rename=82, link=86, symlink=88, chmod=90,
            chown=92, truncate=76, ftruncate=77, fallocate=285, utime=132, mknod=133, setxattr=188,
            inotify_init=253, fanotify_init=300, pidfd_open=434, pidfd_send_signal=424, pidfd_getfd=438,
            landlock_restrict_self=446, ioctl=16, seccomp=317, personality=135, setuid=105, capset=126,
            sendfile=40, splice=275, poll=7, msync=26, mlock=149, sysinfo=99, syslog=103, wait4=61, chdir=80,
            umask=95,
        )
        if os.uname().machine == "x86_64":
            nothing = [ctypes.c_long(0)] * 6
            for name, number in numbers.items():
                if libc.syscall(ctypes.c_long(number), *nothing) != -1 or ctypes.get_errno() != 1:
                    result = {right!r}
            if libc.fcntl(1, 8, parent) != -1:  # F_SETOWN: a signal by way of a descriptor
                result = {right!r}
    """,
    "calls of another convention": """
        import ctypes, os
        if os.uname().machine == "x86_64":
            ctypes.CDLL(None).syscall(ctypes.c_long(2**30 + 39))
            result = {right!r}
        else:
            os._exit(0)
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
"""Aim of an attack -> the program."""

ENDLESS: dict[str, str] = {
    "an endless loop": "while True: pass",
    "a loop that ignores the signal": "import signal\nsignal.signal(signal.SIGPROF, signal.SIG_IGN)\nwhile True: pass",
    "a sleep": "import time; time.sleep(1000)",
    "a wait for a lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "a big power": "result = str(9**9**9)",
    "a regular expression": 'import re; re.match(r"(a+)+$", "a" * 64 + "b")',
}
"""Programs that end by a limit alone, by name."""


def program(text: str, **names: object) -> str:
    """Return the program of an attack with its names filled in; programs on one line are taken as they stand."""
    text = textwrap.dedent(text)
    return text.format(**names) if "{" in text else text
