"""Watch that ends every Python process of an inference server with the process that started it.

A killed server would otherwise leave its engine and worker processes behind for good (vLLM 0.32 does). Python imports
a module of this name at its start, so the watch runs in the processes that the server spawns as well. The kernel's own
signal at a parent's death would not do: it comes when the thread ends that started the process, and vLLM 0.33 starts
the workers of several GPUs from threads that end at once.
"""

import os
import signal
import threading
import time

LOOK_S = 0.5


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)


threading.Thread(target=_die_with, args=(os.getppid(),), name="parent-watch", daemon=True).start()
