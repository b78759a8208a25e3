"""How torchrun starts the ranks of one learner without a listener that other machines can reach.

`--standalone` opens two stores on all interfaces, without authentication, and torch unpickles what lies in a store.
Here agent and ranks meet in files of the host's local folder instead, and collectives stay on the loopback interface.
The agents of a learner over several hosts do not speak to each other: each starts the ranks of its own host, and these
find each other by themselves (`mrl.learner.ranks.meeting`), and the interface that they speak over.
"""

import math
import sys
from collections.abc import Mapping
from pathlib import Path

from mrl.config.policy_tables import PolicyTable

LIFE = "{life}"
"""Stands in a command for a word that differs in every life of a process; a rendezvous is never used twice."""
ALLOCATOR_WORDS = frozenset({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"})
"""The variable's name, and the one that torch knew it by before, and still reads."""
LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch asks for them where it takes 2 MiB or more."""
LOCAL = "{local}"
"""Stands in a command for the host's local folder, which there is only once the run begins."""
SHUTDOWN, AGENT_MARGIN_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30
"""Seconds that an agent leaves its ranks between SIGTERM and SIGKILL."""
# The file only grows, by one record per interval; nobody else's heartbeat is ever looked at.
_STORE = "store_type=file,keep_alive_interval=600"


def torchrun_argv(rendezvous: Path, *, python: str, policy: str, processes: int) -> tuple[str, ...]:
    """The command up to what each rank runs; torchrun never restarts by itself. A rank that is alone needs none."""
    if processes == 1:
        return (python,)
    meeting = f"{policy}-{LIFE}"
    where = ("--rdzv-backend", "c10d", "--rdzv-conf", _STORE, "--rdzv-endpoint", str(rendezvous / meeting))
    options = ("--rdzv-id", meeting, "--max-restarts", "0", "--nproc-per-node", str(processes))
    # A folder for logs is made in any case, and left; nothing is written there.
    logs = ("--log-dir", str(rendezvous / "torchrun"))
    return (python, "-m", "torch.distributed.run", *where, *options, *logs)


LONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
"""What torchrun would say to a rank that is alone, in place of what the user's environment says of ranks of its own."""


def torchrun_environment(
    processes: int, *, stop_s: float = 0.0, reaches_out: bool = False, is_spread: bool = False
) -> dict[str, str]:
    """What agent and ranks need in their environment, where so many ranks are on a host.

    Told to end they have `stop_s`; whoever told them kills them then, and not their agent, which by itself would after
    half a minute, however long a step takes.

    `reaches_out`: the learner broadcasts to other hosts. NCCL chooses its interface once in a process, so that it may
    not be loopback then; gloo is told one for each group. `is_spread`: the learner lives on several.
    """
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", SHUTDOWN: str(math.ceil(stop_s) + AGENT_MARGIN_S)}
    variables |= LONE_RANK if processes == 1 else {}
    if sys.platform == "linux" and not is_spread:
        variables |= {"GLOO_SOCKET_IFNAME": "lo"} | ({} if reaches_out else {"NCCL_SOCKET_IFNAME": "lo"})
    return variables


def nccl_environment(crash: Path, policy: str) -> dict[str, str]:
    """Has NCCL note its last collectives, and write them to `crash/flight-recorder-POLICY-RANK` when one times out.

    `torchfrtrace` reads these files.
    """
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str(crash / f"flight-recorder-{policy}-"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


def allocator_environment(user: Mapping[str, str]) -> dict[str, str]:
    """Of a learner or an embedded engine on a GPU: memory there grows in place, and main memory has large pages.

    Lengths that vary would cut a GPU's memory to pieces. A key-value cache that grows would leave as much behind as it
    has, which torch keeps from all other processes there. The user's own words for either are left alone.

    What lies in memory that grows is shared between processes by file descriptors (`pidfd_getfd`), which containers
    often forbid: what is to be shared by CUDA IPC is allocated apart.
    """
    growing = {} if ALLOCATOR_WORDS & user.keys() else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return growing | _large_pages(user)


def engine_environment(policy: PolicyTable, user: Mapping[str, str]) -> dict[str, str]:
    """Of a worker: the same, where its engine runs in its process and on a GPU."""
    return allocator_environment(user) if policy.device == "cuda" and policy.rollout.engine == "embedded" else {}


def _large_pages(user: Mapping[str, str]) -> dict[str, str]:
    """New memory comes twice as fast (3.4 in place of 1.5 GB/s beside an H200), which a checkpoint waits for."""
    return {} if LARGE_PAGES in user else {LARGE_PAGES: "1"}
