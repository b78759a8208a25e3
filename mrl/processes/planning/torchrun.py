"""Command and environment of one learner's ranks under torchrun, without a listener that other machines can reach.

`--standalone` opens two stores on all interfaces, without authentication, and torch unpickles what lies in a store.
Here agent and ranks meet in files of the host's local folder instead, and collectives stay on the loopback interface.
The agents of a learner over several hosts do not speak to each other: each starts the ranks of its own host. The ranks
find each other, and the network interface between them, by themselves (`mrl.learner.ranks.rendezvous`).
"""

import math
import sys
from collections.abc import Mapping
from pathlib import Path

from mrl.config.policy_tables import PolicyTable

LIFE = "{life}"
"""Placeholder in a command for a word that differs in every life of a process: a rendezvous is never used twice."""
ALLOCATOR_WORDS = frozenset({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"})
"""Names of the environment variable of torch's allocator: today's, and the earlier one, which torch still reads."""
LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""Environment variable with which torch asks for large pages where it allocates 2 MiB or more."""
LOCAL = "{local}"
"""Placeholder in a command for the host's local folder, which exists only once the run begins."""
SHUTDOWN, AGENT_MARGIN_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30
"""Environment variable with the seconds that torchrun's agent leaves its ranks between SIGTERM and SIGKILL; seconds by
which that is longer than the supervisor's own patience."""
# The file only grows, by one record per interval; no other agent's heartbeat is ever read.
_STORE = "store_type=file,keep_alive_interval=600"


def torchrun_argv(rendezvous: Path, *, policy: str, processes: int) -> tuple[str, ...]:
    """Return the command up to what each rank runs. torchrun never restarts; a single rank needs no torchrun."""
    if processes == 1:
        return (sys.executable,)
    meeting = f"{policy}-{LIFE}"
    where = ("--rdzv-backend", "c10d", "--rdzv-conf", _STORE, "--rdzv-endpoint", str(rendezvous / meeting))
    options = ("--rdzv-id", meeting, "--max-restarts", "0", "--nproc-per-node", str(processes))
    # torchrun makes a folder for logs in any case and leaves it behind; nothing is written there.
    logs = ("--log-dir", str(rendezvous / "torchrun"))
    return (sys.executable, "-m", "torch.distributed.run", *where, *options, *logs)


LONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
"""Variables that torchrun would set for a single rank; they replace such variables in the user's environment."""


def torchrun_environment(
    processes: int, *, stop_s: float = 0.0, reaches_out: bool = False, is_spread: bool = False
) -> dict[str, str]:
    """Return the environment of agent and ranks, with `processes` ranks on a host.

    Ranks told to end have `stop_s`, then the supervisor kills them. By default their agent would kill them after half a
    minute, however long a step takes.

    `reaches_out`: the learner broadcasts to other hosts. NCCL chooses its interface once in a process, which then may
    not be loopback; gloo is told an interface for each group. `is_spread`: the learner lives on several hosts.
    """
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", SHUTDOWN: str(math.ceil(stop_s) + AGENT_MARGIN_S)}
    variables |= LONE_RANK if processes == 1 else {}
    if sys.platform == "linux" and not is_spread:
        variables |= {"GLOO_SOCKET_IFNAME": "lo"} | ({} if reaches_out else {"NCCL_SOCKET_IFNAME": "lo"})
    return variables


def nccl_environment(crash: Path, policy: str) -> dict[str, str]:
    """Return variables with which NCCL records its last collectives and, when one times out, writes them to files.

    The files are `crash/flight-recorder-POLICY-RANK`; `torchfrtrace` reads them.
    """
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str(crash / f"flight-recorder-{policy}-"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


def allocator_environment(user: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a process that computes on a GPU: GPU memory grows in place, main memory has large pages.

    The process is a learner's or has an embedded engine. Varying lengths would otherwise fragment a GPU's memory. A
    growing key-value cache would leave as much memory behind as it has, which torch keeps from all other processes on
    the GPU. The user's own settings of either are left alone.

    Memory that grows in place is shared between processes by file descriptors (`pidfd_getfd`), which containers often
    forbid. So memory to be shared by CUDA IPC is allocated apart.
    """
    growing = {} if ALLOCATOR_WORDS & user.keys() else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return growing | _large_pages(user)


def engine_environment(policy: PolicyTable, user: Mapping[str, str]) -> dict[str, str]:
    """Return variables of a worker: those of `allocator_environment` where its engine is embedded and on a GPU."""
    return allocator_environment(user) if policy.device == "cuda" and policy.rollout.engine == "embedded" else {}


def _large_pages(user: Mapping[str, str]) -> dict[str, str]:
    """Return the variable for large pages: a checkpoint's memory comes faster (3.4, not 1.5 GB/s beside an H200)."""
    return {} if LARGE_PAGES in user else {LARGE_PAGES: "1"}
