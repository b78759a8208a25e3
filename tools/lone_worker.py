"""A rollout worker as in a run, for benchmarks, with an exchange, an allocator, and a learner that does not train.

Exchange and allocator are processes of their own. The learner's end is the real one: books, link, published weights
with their canary; it hands out as many groups as it is asked to. The regime is PRP, which gives whole answers with
their log-probabilities to the peers, more than any other does. The peer itself is not there.
"""

import os
import subprocess
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_peers.process import end
from transformers import PreTrainedModel

from mrl.config.load import validate
from mrl.config.run_folder import create_run_folder
from mrl.engines.server_backend import Launch
from mrl.engines.server_process import ServerProcess
from mrl.engines.vllm_launch import command
from mrl.engines.vllm_launch import environment as server_environment
from mrl.learner.intake import Intake
from mrl.learner.ledger import SamplingLimits, WorkLedger
from mrl.models.tokenizers import train_byte_level
from mrl.processes.planning.plan import environment, role_argv
from mrl.records.rollouts import ScoredGroup, WeightsNotice
from mrl.records.version import Version
from mrl.tasks.pool import TaskPool, build_pool
from mrl.transport.endpoints import publish_endpoint
from mrl.transport.grants import STANDING_GRANTS, Grant
from mrl.transport.keys import create_keys
from mrl.transport.server import ServerSocket
from mrl.weights.canary import canary_sequences
from mrl.weights.publish import Publisher

POLICY = "a"
WAIT_S, START_S = 600.0, 300.0
MANY_VERSIONS = 1_000_000
# Options of the worker's own server, without which a server takes prompts as text, as other clients need.
WITHOUT_TEXT = ("--tokens-only", "--skip-tokenizer-init", "--enable-scale-out")


def make_policy(folder: Path, model: PreTrainedModel, tables: dict[str, Any]) -> Path:
    """Write the folder of a policy: this model, and a byte-level tokenizer that fits the run's prompts."""
    pool = _pool(tables)
    texts = [pool.prompt_at(position).text for position in range(len(pool))]
    train_byte_level(texts, model.config.vocab_size).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def run_tables(
    folder: Path,
    model_folder: Path,
    *,
    group_size: int,
    max_new_tokens: int,
    at_once: int,
    prompts: int,
    engine: str = "vllm",
) -> dict[str, Any]:
    """Tables of the configuration: the worker samples `at_once` answers, with up to two groups ready behind them."""
    rollout = {
        "engine": engine,
        "group_size": group_size,
        "max_new_tokens": max_new_tokens,
        "answers_at_once": at_once,
        "server": {"context_tokens": 256, "dtype": "float32"},
    }
    slots = at_once + 2 * group_size
    return {
        "run": {"name": "lone", "steps": MANY_VERSIONS, "folder": str(folder)},
        "tasks": {"trim": {"source": "words", "dataset": "trim"}},
        "pool": {"train_prompts": prompts, "held_out_prompts": 1},
        "policies": {POLICY: {"model": str(model_folder), "rollout": rollout}},
        "sharing": {"regime": "prp"},
        "allocation": {"slots": slots, "floor_slots": slots},
    }


class LoneWorker:
    """Worker with its exchange, allocator and learner's books, which is idle until groups are asked for."""

    def __init__(self, tables: dict[str, Any], model: PreTrainedModel, *, groups_a_round: int) -> None:
        """Make the run folder, publish the weights, and start the processes."""
        config = validate(tables, where="lone_worker.py")
        self._folder = create_run_folder(config)
        self._closing = ExitStack()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._began_s: float | None = None
        self._pool = _pool(tables)
        keys = create_keys(self._folder.keys, [*STANDING_GRANTS, Grant("learner", POLICY), Grant("worker", POLICY)])
        rollout = config.policies[POLICY].rollout
        # Nothing is granted before the first round: `total_steps` is the gate.
        pace = SamplingLimits(groups_a_round, rollout.group_size, max_staleness_versions=MANY_VERSIONS, total_steps=0)
        self._ledger = WorkLedger(pace, self._granted, resumed_at=Version(0, 0))
        server = ServerSocket(keys, ipc_path=self._folder.endpoints / "ipc" / f"learner-{POLICY}")
        publish_endpoint(self._folder.endpoints, f"learner-{POLICY}", server.address, server.ipc_path)
        self._intake = Intake(server, self._ledger)
        self._closing.callback(self._intake.close)
        publisher = Publisher(self._folder.weights(POLICY), POLICY, model_folder=Path(config.policies[POLICY].model))
        path = publisher.publish(model, Version(0, 0), canary_sequences(model.config.vocab_size))
        self._intake.announce(WeightsNotice(version=Version(0, 0), manifest_path=str(path)))
        gateway = [("gateway", "")] * config.gateway.serve
        for role, policy in (("exchange", ""), ("allocator", ""), *gateway, ("worker", POLICY)):
            self._start(role_argv(role, self._folder.path, policy=policy), rollout.threads)  # type: ignore[arg-type]

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self._folder.path

    def round(self) -> tuple[list[ScoredGroup], float]:
        """Sample one more round of groups; return it, and the seconds from the first grant to the last arrival."""
        self._began_s, groups = None, list[ScoredGroup]()
        self._ledger.pace = replace(self._ledger.pace, total_steps=self._ledger.pace.total_steps + 1)
        deadline_s = time.monotonic() + WAIT_S
        while len(groups) < self._ledger.pace.groups_per_step:
            self._intake.wait_for_change(1.0)
            groups += self._intake.arrivals()
            if ended := [name for name, process in self._processes.items() if process.poll() is not None]:
                raise RuntimeError(f"{ended[0]} ended:\n{(self._folder.logs / f'{ended[0]}.log').read_text()[-2000:]}")
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{len(groups)} groups came within {WAIT_S:g} s; logs are in {self._folder.logs}")
        assert self._began_s is not None, "what came was granted"
        return groups, time.perf_counter() - self._began_s

    def close(self) -> None:
        """End the processes."""
        self._closing.close()

    def _granted(self, position: int) -> str:
        if self._began_s is None:
            self._began_s = time.perf_counter()
        return self._pool.prompt_at(position).prompt_id

    def _start(self, argv: tuple[str, ...], threads: int) -> None:
        name = argv[3]
        with (self._folder.logs / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(argv, env=os.environ | environment(threads), stdout=log, stderr=log)
        self._processes[name] = process
        self._closing.callback(end, process)


def _pool(tables: dict[str, Any]) -> TaskPool:
    config = validate(tables, where="lone_worker.py")
    return build_pool(config.tasks, config.pool)


def start_with_text(launch: Launch, log: Path) -> ServerProcess:
    """Start a server that takes prompts as text."""
    words = [word for word in command(launch) if word not in WITHOUT_TEXT]
    server = ServerProcess(words, server_environment(launch), log)
    deadline_s = time.monotonic() + START_S
    while "Application startup complete" not in log.read_text(errors="replace"):
        if server.exit_code() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"the server did not come up:\n{server.tail()}")
        time.sleep(0.5)
    return server
