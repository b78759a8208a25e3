"""The memory plan of a configuration: models are looked at (never their weights), each process gets its numbers."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mrl.config.memory_savings import shortest_cure
from mrl.config.policy_tables import LearnerTable
from mrl.config.schema import RunConfig
from mrl.config.unit_names import parse_units
from mrl.config.unit_rules import may_sleep
from mrl.engines.sglang_launch import context_of
from mrl.engines.vllm_launch import cpu_cache_gib
from mrl.errors import ConfigError, MissingError, ModelFolderError
from mrl.memory_plan.needs import (
    AGENT_MIB,
    DAEMON_MIB,
    MIB,
    NEW_WEIGHTS,
    SERVER_MIB,
    TORCH_MIB,
    Need,
    at_worst_turn,
    element_bytes,
    engine_need,
    largest_microbatch,
    process_parts,
    rank_needs,
    server_need,
    staged_bytes,
)
from mrl.models.size import ModelSize
from mrl.processes.planning.hosts import is_in_memory
from mrl.processes.planning.placement import least_gpus, most_gpus
from mrl.processes.planning.plan import Plan, ProcessSpec, planned
from mrl.processes.planning.unit_workers import UNIT
from mrl.processes.preparation.comparison_training import RunNeed
from mrl.processes.preparation.made_policies import cached_folder, is_made, recipe_of
from mrl.processes.preparation.model_bytes import named_parameters
from mrl.weights.canary_texts import largest_canary

UNKNOWN_PROMPT_TOKENS = 128
LOOKED_AT_PROMPTS = 64
BYTES_PER_TOKEN = 3
"""Of prompts whose tokenizer is not there yet."""


@dataclass(frozen=True, slots=True)
class ProcessNeed:
    """What one process of the plan needs: on the host, all ranks and torchrun together, and each of them on a GPU."""

    spec: ProcessSpec
    host: Need
    """Of the first rank."""
    count: int = 1
    """Processes of its kind: ranks of a learner."""
    agent_mib: float = 0.0
    device: Need | None = None
    other: Need | None = None
    """Of every further rank on the host; None where they are like the first."""

    @property
    def host_mib(self) -> float:
        """All of its processes together."""
        return self.agent_mib + self.host.mib + (self.count - 1) * (self.other or self.host).mib


def memory_plan(config: RunConfig, plan: Plan) -> list[ProcessNeed]:
    """Every process of the plan, and what may lie on its units at their fullest.

    The weights of no model are read, and none need be there.
    """
    policies = {name: _Policy(config, name) for name in config.policies}
    needs = [_need(config, spec, policies) for spec in plan.processes]
    for _, specs in itertools.groupby(plan.leased, key=lambda spec: spec.env[UNIT]):
        needs += _on_unit(config, list(specs), policies)
    return needs


def run_need(config: RunConfig) -> RunNeed:
    """By the plan that `mrl check` shows."""

    host_mib = sum(need.host_mib for need in memory_plan(config, planned(config)))
    names_cores = any(unit.kind == "cpu" for unit in parse_units(config.allocation.units, where=""))
    names_ports = config.exchange.port > 0 or config.exchange.metrics_port > 0
    return RunNeed(
        len(config.policies), host_mib, least_gpus(config), most_gpus(config), is_alone=names_cores or names_ports
    )


def check_sleepers(config: RunConfig, plan: Plan, *, host_mib: float, where: str) -> None:
    """Raises ConfigError where engines that sleep, with all that runs beside them on the first host, are too much."""
    if not any(may_sleep(config, spec.policy) for spec in plan.leased):
        return
    needs = [need for need in memory_plan(config, plan) if need.spec.host == plan.first_host]
    wanted_mib = sum(need.host_mib for need in needs)
    if wanted_mib > host_mib:
        leased_mib = sum(need.host_mib for need in needs if UNIT in need.spec.env)
        raise ConfigError(
            'allocation.residency = "sleep": all that is in main memory at once does not fit into it',
            where=where,
            got=f"{wanted_mib:.0f} MiB, {leased_mib:.0f} of them on units, where all but one engine sleep",
            wanted=f"at most {host_mib:.0f} MiB",
            cure='residency = "stop", or fewer units',
        )


def too_little(
    config: RunConfig, needs: list[ProcessNeed], host_mib: float, device_mib: Mapping[str, float]
) -> Iterator[str]:
    """What will not fit, and the setting to change. `device_mib` holds the sizes of the GPUs that are known."""
    on_host = sum(need.host_mib for need in needs)
    if on_host > host_mib:
        largest = max(needs, key=lambda need: need.host_mib)
        room_mib = largest.host_mib - (on_host - host_mib)
        yield f"memory: {on_host:.0f} MiB will not fit into the {host_mib:.0f} MiB of this host"
        room_mib = (room_mib - largest.agent_mib) / largest.count
        yield f"  cure: {_cure(config, largest, room_mib, on_device=False)}"
    told: dict[str, str] = {}
    for device, wanted_mib in by_device(needs).items():
        if wanted_mib > device_mib.get(device, float("inf")):
            yield f"cuda {device}: {wanted_mib:.0f} MiB will not fit into its {device_mib[device]:.0f} MiB"
            on_it = [(need.device.mib, need) for need in needs if need.device and device in _devices(need.spec)]
            largest_mib, largest = max(on_it, key=lambda one: one[0])
            if largest.spec.name not in told:  # its other ranks need the same
                room_mib = device_mib[device] - (wanted_mib - largest_mib)
                told[largest.spec.name] = _cure(config, largest, room_mib, on_device=True)
    yield from (f"  cure: {cure}" for cure in told.values())


def by_device(needs: list[ProcessNeed]) -> dict[str, float]:
    """GPU -> MiB that the plan needs there."""
    found: dict[str, float] = {}
    for need in needs:
        for device in _devices(need.spec) if need.device else ():
            found[device] = found.get(device, 0.0) + (need.device.mib if need.device else 0.0)
    return dict(sorted(found.items()))


def _devices(spec: ProcessSpec) -> list[str]:
    return [device for device in spec.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]


def _need(config: RunConfig, spec: ProcessSpec, policies: Mapping[str, "_Policy"]) -> ProcessNeed:
    if spec.role == "learner":
        policy = policies[spec.policy]
        (host, device), (other, _) = policy.ranks(policy.table.learner)
        on_gpu = device if policy.table.device == "cuda" else None
        return ProcessNeed(spec, host, policy.table.learner.processes, AGENT_MIB, on_gpu, other)
    if spec.role == "worker":
        return _worker(spec, policies[spec.policy])
    return ProcessNeed(spec, Need("", {"process": DAEMON_MIB * MIB}))


def _worker(spec: ProcessSpec, policy: "_Policy") -> ProcessNeed:
    gpus = max(1, len(_devices(spec)))
    host, engine = policy.process(), policy.engine(gpus).parts
    on_gpu, processes = policy.table.device == "cuda", policy.server_processes(gpus)
    host |= processes if on_gpu else processes | engine
    device = Need("sampling", engine) if on_gpu and engine else None
    return ProcessNeed(spec, Need("sampling", host), device=device)


def _on_unit(config: RunConfig, specs: list[ProcessSpec], policies: Mapping[str, "_Policy"]) -> list[ProcessNeed]:
    """The engines that take turns on one unit; they may be at their fullest at different turns on host and GPU."""
    turns = [_worker(spec, policies[spec.policy]) for spec in specs]
    rests = [policies[spec.policy].resting(is_asleep=may_sleep(config, spec.policy)) for spec in specs]
    hosts = at_worst_turn([(turn.host, rest) for turn, rest in zip(turns, rests, strict=True)])
    gone = Need("", {})
    devices = at_worst_turn([(turn.device or gone, gone) for turn in turns])
    return [
        ProcessNeed(spec, host, device=device if device.parts else None)
        for spec, host, device in zip(specs, hosts, devices, strict=True)
    ]


def _cure(config: RunConfig, need: ProcessNeed, room_mib: float, *, on_device: bool) -> str:
    """For one process of the kind, which has `room_mib` on its GPU, or on the host."""
    if need.spec.role == "learner":
        policy = _Policy(config, need.spec.policy)

        def needed_mib(table: LearnerTable) -> float:
            return policy.ranks(table)[0][on_device].mib

        cure = shortest_cure(needed_mib, policy.table.learner, room_mib, on_device=on_device)
        return f"policies.{policy.name}: {cure}"
    if UNIT in need.spec.env:
        return f"{need.spec.name}: fewer units" + ', or residency = "stop"' * may_sleep(config, need.spec.policy)
    parts = (need.device or need.host).parts
    if parts.get("key-value cache", 0.0) > parts.get("weights", 0.0):
        return f"{need.spec.name}: a smaller rollout.answers_at_once, or a shorter rollout.max_new_tokens"
    return f"{need.spec.name}: fewer processes on this device (rollout.workers), or a smaller model"


class _Policy:
    """One policy of a configuration, of which the models are looked at once."""

    def __init__(self, config: RunConfig, name: str) -> None:
        self.name, self.table, self._config = name, config.policies[name], config
        self._scored: dict[tuple[str, bool], float] = {}
        """Number format, and whether it is the learner's -> bytes of a canary's pass."""

    def ranks(self, table: LearnerTable) -> list[tuple[Need, Need]]:
        """The first rank of its learner under a table, and another one: on the host, and on the device."""
        from mrl.memory_plan.pass_memory import pass_peaks
        from mrl.models.skeleton import model_size

        policy = self.table.model_copy(update={"learner": table})
        on_gpu = policy.device == "cuda"
        batch, num_passes = largest_microbatch(policy, self._prompt_tokens)
        peaks = pass_peaks(
            self._model_config,
            precision=table.precision,
            batch=batch,
            with_entropy=policy.objective.entropy_coefficient > 0,
            checkpointing=table.activation_checkpointing,
            lora=table.lora,
            chunk_logits=table.chunk_logits,
        )
        size = model_size(self._model_config, table.lora)
        return [
            rank_needs(
                size,
                peaks,
                table,
                num_passes=num_passes,
                holds_reference=bool(policy.objective.kl_coefficient) and table.lora is None,
                saves_beside_training=0 < table.checkpoint_every < self._config.run.steps,
                on_gpu=on_gpu,
                is_first=is_first,
                scoring=self._scoring(table.precision, is_learner=True),
                staged=staged_bytes(size, policy, is_first=is_first, in_memory=is_in_memory(self._config, self.name)),
            )
            for is_first in (True, False)
        ]

    def engine(self, gpus: int = 1) -> Need:
        """That of one worker; of a server on several GPUs on each of them."""
        rollout, learner, allocation = self.table.rollout, self.table.learner, self._config.allocation
        if rollout.engine != "embedded":
            return self._server(gpus)
        wanted = learner.prompts_per_step * rollout.group_size
        if not self._config.run.sync:
            share = allocation.slots - allocation.floor_slots * (len(self._config.policies) - 1)
            share = allocation.slots // len(allocation.units) if allocation.units else share
            wanted = min(wanted * (1 + learner.max_staleness_versions), max(share, rollout.group_size))
        return self._engine(min(wanted, rollout.answers_at_once or wanted))

    def _server(self, gpus: int) -> Need:
        """That of a server that the run starts."""
        from mrl.processes.engines import answers_at_once

        server = self.table.rollout.server
        if server.url:
            return Need("sampling", {})
        cached_tokens = answers_at_once(self._config, self.name) * context_of(self._model_config, server.context_tokens)
        return server_need(
            self._size, self.table, cached_tokens=cached_tokens, vllm_cache_gib=cpu_cache_gib(), gpus=gpus
        )

    def server_processes(self, gpus: int = 1) -> dict[str, float]:
        """What they hold on the host, wherever weights and cache lie, with a process more for each further GPU.

        They stay while a server sleeps.
        """
        rollout = self.table.rollout
        if rollout.engine == "embedded" or rollout.server.url:
            return {}
        parts = {"server's processes": float((SERVER_MIB[rollout.engine] + (gpus - 1) * TORCH_MIB) * MIB)}
        if rollout.engine == "vllm" and self.table.device == "cuda" and rollout.weights != "adapters":
            parts[NEW_WEIGHTS] = float(element_bytes(self.table) * self._size.parameters)
        return parts

    def resting(self, *, is_asleep: bool) -> Need:
        """What is left of that on the host while another policy has its unit: the memory of the GPU is given back.

        An engine that sleeps keeps its processes; transformers also keep the weights that were served.
        """
        if not is_asleep:
            return Need("ended", {})
        is_server, process = self.table.rollout.engine != "embedded", self.process()
        if is_server:
            return Need("asleep", process | self.server_processes())
        return Need("asleep", process | {"weights": float(element_bytes(self.table) * self._size.parameters)})

    def process(self) -> dict[str, float]:
        """One of its workers without an engine."""
        return process_parts(self._size)

    def _engine(self, answers: int) -> Need:
        scoring = self._scoring(self.table.rollout.engine_dtype, is_learner=False)
        prompt_tokens = self._prompt_tokens
        return engine_need(
            self._size, self.table, answers_at_once=answers, prompt_tokens=prompt_tokens, scoring=scoring
        )

    def _scoring(self, dtype: str, *, is_learner: bool) -> float:
        """Bytes of a pass over the largest canary, where the model computes in `dtype`."""
        from mrl.memory_plan.pass_memory import scoring_peak
        from mrl.models.number_formats import coarser

        if (dtype, is_learner) not in self._scored:
            rollout, learner = self.table.rollout, self.table.learner
            num_rows = learner.prompts_per_step * rollout.group_size
            rows, tokens = largest_canary(num_rows, self._prompt_tokens, rollout.max_new_tokens)
            number_format: Any = coarser(dtype, rollout.engine_dtype) if is_learner else None  # type: ignore[arg-type]
            if number_format == "float32" and self.table.device == "cuda":
                number_format = "tf32"
            self._scored[dtype, is_learner] = float(
                scoring_peak(self._model_config, dtype=dtype, rows=rows, tokens=tokens, number_format=number_format)
            )
        return self._scored[dtype, is_learner]

    @cached_property
    def _folder(self) -> Path | None:
        folder = Path(self.table.model)
        if self.table.make is not None:
            folder = cached_folder(recipe_of(self._config, self.name))
            return folder if is_made(folder) else None
        return folder if (folder / "config.json").is_file() else None

    @cached_property
    def _model_config(self) -> Any:
        """What is known of the model: its folder's word, its recipe, or the number in the name of its source."""
        from mrl.models.skeleton import config_of_folder, config_of_number, config_of_recipe

        if self._folder is not None:
            try:
                return config_of_folder(self._folder)
            except ModelFolderError:  # one that preflight let pass, and that loading will refuse
                weights = self._folder.glob("*.safetensors")
                return config_of_number(sum(file.stat().st_size for file in weights) // 2)
        return config_of_recipe(self.table.make) if self.table.make else config_of_number(named_parameters(self.table))

    @cached_property
    def _size(self) -> ModelSize:
        from mrl.models.skeleton import model_size

        return model_size(self._model_config)

    @cached_property
    def _prompt_tokens(self) -> int:
        """The mean of some prompts, by the policy's tokenizer, or by their bytes where there is none yet."""
        from mrl.models.prompting import PromptEncoder
        from mrl.tasks.pool import build_pool

        try:
            pool = build_pool(self._config.tasks, self._config.pool)
        except MissingError:
            return UNKNOWN_PROMPT_TOKENS
        prompts = [pool.prompt_at(place) for place in range(min(LOOKED_AT_PROMPTS, len(pool)))]
        pool.close()
        try:
            encode = None if self._folder is None else PromptEncoder(self._folder).token_ids
        except ModelFolderError:  # as above
            encode = None
        tokens = sum(
            encode(one.content).size if encode else len(one.text.encode()) / BYTES_PER_TOKEN for one in prompts
        )
        return math.ceil(tokens / len(prompts))
