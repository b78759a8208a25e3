"""The process that serves one kept version of a policy, a checkpoint, beside the run for clients that name its step.

Owns: an engine of transformers in this process, with the weights of a checkpoint.
Speaks: answers to the gateway, over a line as rollout workers have.
Waits for: requests, without a bound: an idle process costs memory alone, and the gateway ends it.
Unblocked by: the gateway.
If it dies: the gateway tells the clients that wait, and starts it again for the next request.
"""

import shutil
import threading
from contextlib import ExitStack
from pathlib import Path

import structlog

from mrl.alignment.receiver import load_receiver
from mrl.config.policy_tables import ELEMENT_BYTES, PolicyTable
from mrl.config.run_folder import RunFolder
from mrl.config.schema import RunConfig
from mrl.engines.embedded import EmbeddedEngine
from mrl.errors import RoleFailed
from mrl.gateway.checkpoint_servers import KEPT_VERSIONS
from mrl.gateway.gateway_connection import GatewayConnection
from mrl.host_memory import free_memory_bytes
from mrl.models.tensor_header import read_header
from mrl.processes import role_runtime
from mrl.processes.engines import answers_at_once, build_embedded
from mrl.processes.episode_setup import direct_codec
from mrl.processes.evaluation.measuring import engine_table
from mrl.processes.preparation.checkpoint_folder import sound_checkpoint, write_folder
from mrl.processes.preparation.model_folder import weight_files
from mrl.records.version import Version
from mrl.rollout.direct_serving import DirectServing
from mrl.rollout.held_out_answers import InFlight

MAX_AT_ONCE = 16
"""Most answers that are sampled at a time, on the CPU that the run uses, too."""
COLLECT_S, IDLE_SLICE_S = 0.05, 0.5
SPARE_SHARE = 1.25
"""Free memory that is needed, as a multiple of the bytes of the weights."""
MIB = 1024 * 1024

log = structlog.get_logger()


def main(run_folder: Path, policy: str, index: int) -> int:
    """Serve the weights of step `index` until told to stop."""
    role = f"kept-version/{policy}/{index}"

    def body(config: RunConfig, folder: RunFolder, closing: ExitStack) -> int:
        woken = threading.Event()
        serving, engine = _start(config, folder, policy, step=index, woken=woken, closing=closing)
        stop = role_runtime.stop_event()  # not earlier: a signal while the weights load ends the process at once
        log.info("serving a kept version", step=index)
        while not stop.is_set():
            woken.clear()
            serving.serve(_most(config, policy), InFlight(0, 0), _is_good)
            if serving.in_flight:
                serving.arrive(engine.collect(COLLECT_S), _is_good)
            elif not serving.has_work:
                woken.wait(IDLE_SLICE_S)
        return 0

    return role_runtime.run_role(run_folder, role, policy, body)


def _start(
    config: RunConfig, folder: RunFolder, policy: str, *, step: int, woken: threading.Event, closing: ExitStack
) -> tuple[DirectServing, EmbeddedEngine]:
    """Load the weights and connect to the gateway.

    Raises CheckpointError, and RoleFailed where the weights have no room in memory.
    """
    own = config.policies[policy]
    table = engine_table(own, engine="embedded", device="cpu", max_new_tokens=0)
    _check_memory(table)
    part = folder.path / KEPT_VERSIONS / f"{policy}-{step}"
    shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed while it loaded
    part.mkdir(parents=True)
    closing.callback(shutil.rmtree, part, ignore_errors=True)
    write_folder(part, own, sound_checkpoint(folder, policy, step))
    served = config.model_copy(update={"policies": {policy: table.model_copy(update={"model": str(part)})}})
    receiver = load_receiver(part)
    engine = build_embedded(served, policy, receiver)
    closing.callback(engine.close)
    codec = direct_codec(served, policy, receiver)
    shutil.rmtree(part)
    engine.label(Version(0, step))
    line = GatewayConnection(folder.path)
    closing.callback(line.close)

    def heard() -> None:
        engine.nudge()
        woken.set()

    line.on_heard = heard
    return DirectServing(line, codec, engine, share=1.0, group_size=1, is_kept=True), engine


def _is_good(version: Version) -> bool:
    """Whether answers under `version` may be used: always, since the engine's weights never change."""
    return True


def _most(config: RunConfig, policy: str) -> int:
    return min(MAX_AT_ONCE, answers_at_once(config, policy))


def _check_memory(table: PolicyTable) -> None:
    """Raises RoleFailed where memory is short: the kernel might otherwise kill a process of the run."""
    num_elements = sum(read_header(file).num_elements for file in weight_files(Path(table.model), "", ""))
    # Where adapters are trained, they are merged in float32 before the engine has its own.
    size = ELEMENT_BYTES["float32" if table.learner.lora else table.rollout.engine_dtype]
    wanted, free = SPARE_SHARE * size * num_elements, free_memory_bytes()
    if wanted > free:
        raise RoleFailed(
            f"not enough memory to serve this version: it needs {wanted / MIB:,.0f} MiB, and {free / MIB:,.0f} MiB "
            "are free on this host"
        )
