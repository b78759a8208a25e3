"""Every Python process of an inference server dies with the process that started it.

A killed server would otherwise leave its engine and worker processes behind for good (vLLM 0.32 does). Python imports
a module of this name at its start, so the request reaches the processes that the server spawns as well.
"""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1

if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
