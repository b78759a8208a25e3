"""The learner at the shapes of released models: tokens per second, share of the peak, memory beside the plan's."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
from torch.distributed.tensor import DTensor

from gpu_hour.bench import Bench, SkippedError
from gpu_hour.shapes import config_of, random_model
from mrl.config.defaults import by_device
from mrl.config.policy_tables import PolicyTable
from mrl.config.schema import RunConfig
from mrl.learner.ranks.world import World
from mrl.learner.step_order import StepOrder
from mrl.learner.step_timing import training_flops
from mrl.learner.trainer import Trainer
from mrl.memory_plan.needs import CUDA_CONTEXT_MIB, MIB, Need, largest_microbatch, on_gpu_with, rank_needs
from mrl.memory_plan.pass_memory import pass_peaks
from mrl.models.device_memory import OffDevice
from mrl.models.skeleton import model_size
from mrl.models.tensor_file import digest
from mrl.objectives.liger import missing_packages
from mrl.objectives.specs import Clipped, Correction
from mrl.sharing.regime import Component, TrainingExample

GRPO = Component("own", Clipped(0.2, 0.2, correction=Correction()), 1.0, "rows", "own")
TIMED_STEPS = 3
TURNS = 3
"""Number of turns; the first one also takes and locks main memory."""
RESERVED_S = 60.0
"""Seconds of the stage's time that must be left to begin a combination."""
LEAN = {"activation_checkpointing": True, "microbatch_tokens": 8192}
COMBINATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "1.7B": ("1.7B", {}),
    "8B-adapters": ("8B", LEAN | {"lora": {"rank": 16}}),
    "8B-host-moments": ("8B", LEAN | {"optimizer_memory": "host"}),
    "8B-small-moments": ("8B", LEAN | {"optimizer_dtype": "bfloat16"}),
    "8B-small-parameters": ("8B", LEAN | {"optimizer_dtype": "bfloat16", "parameter_dtype": "bfloat16"}),
    "8B-offload": ("8B", LEAN | {"optimizer_dtype": "bfloat16", "activation_offload": True}),
    "1.7B-liger": ("1.7B", {"logprob_kernel": "liger"}),
    "1.7B-checkpointing": ("1.7B", {"activation_checkpointing": True}),
    "1.7B-host-moments": ("1.7B", {"optimizer_memory": "host"}),
    "0.6B": ("0.6B", {}),
    "0.6B-rows": ("0.6B", {"attention_kernel": "rows"}),
    "0.6B-float32": ("0.6B", {"precision": "float32"}),
    "1.7B-compiled": ("1.7B", {"compile": True}),
    "8B": ("8B", LEAN),
}
"""Part -> shape, and keys of the learner's table; keys that are left out have the values of a run on a GPU. The most
valuable come first, should time run out."""
ON_CPU = {"attention_kernel": "rows", "logprob_kernel": "chunked", "chunk_logits": 1 << 12, "compile": False}
"""Keys in place of those that need a GPU, or minutes."""


def learner_parts() -> dict[str, Callable[[Bench], None]]:
    """Parts of the stage: one for each combination, and one for turns."""
    combinations = {name: partial(_measure, *combination) for name, combination in COMBINATIONS.items()}
    return combinations | {"1.7B-turns": _measure_turns}


def _measure(shape: str, keys: dict[str, Any], bench: Bench) -> None:
    config = config_of(bench.of(shape, "tiny"))
    policy = _policy(keys, bench)
    need = plan_of(config, policy, bench)
    bench.tell("planned memory", need.mib, "MiB", moment=need.moment, with_context_mib=on_gpu_with(need).mib)
    _check_room(config, policy, need, bench)
    _check(policy, bench)
    began_s = time.monotonic()
    trainer = _trainer(config, policy, bench)
    if bench.device == "cuda":  # making the model with random weights took more memory
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    order = StepOrder(rows(policy, config.vocab_size, bench), {"own": 1.0})
    trainer.train(order, 0)
    bench.settle()
    bench.tell("making the model and the first step", time.monotonic() - began_s, "s")
    trainer.take_measurements(order)  # which begins its peak anew
    began_s = time.monotonic()
    for step in range(1, 1 + TIMED_STEPS):
        trainer.train(order, step)
    bench.settle()
    seconds = (time.monotonic() - began_s) / TIMED_STEPS
    _tell(bench, trainer, order, seconds, need=need, settings=policy.learner.model_dump(exclude_defaults=True))
    trainer.world.close()


def _trainer(config: Any, policy: PolicyTable, bench: Bench) -> Trainer:
    world = World(0, 1, torch.device(bench.device, 0) if bench.device == "cuda" else torch.device("cpu"))
    model = random_model(config, bench.device)
    return Trainer(model, policy.learner, [GRPO], temperature=1.0, seed=0, total_steps=100, world=world)


def _measure_turns(bench: Bench) -> None:
    """Let a learner leave its device between steps and come back, as in turns. Raises RuntimeError for other bits."""
    config, policy = config_of(bench.of("1.7B", "tiny")), _policy({}, bench)
    _check_room(config, policy, plan_of(config, policy, bench), bench)
    _check(policy, bench)
    trainer, away = _trainer(config, policy, bench), OffDevice()
    order = StepOrder(rows(policy, config.vocab_size, bench), {"own": 1.0})
    trainer.train(order, 0)
    trainer.optimizer.zero_grad(set_to_none=True)
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in trainer.held()]
    held = [tensor.detach() for tensor in local if tensor.device.type == bench.device]
    before = [digest(tensor.to("cpu", copy=True)) for tensor in held]
    gib = sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values()) / MIB / 1024
    for turn in range(TURNS):
        left_s = _seconds(bench, lambda: away.leave(held))
        if bench.device == "cuda":
            bench.tell("left on the device", torch.cuda.memory_reserved() / MIB, "MiB", turn=turn)
        came_s = _seconds(bench, away.come_back)
        bench.tell("leaving", left_s, "s", turn=turn, gib=gib, gib_s=gib / left_s)
        bench.tell("coming back", came_s, "s", turn=turn, gib=gib, gib_s=gib / came_s)
    if [digest(tensor.to("cpu", copy=True)) for tensor in held] != before:
        raise RuntimeError("other bits came back than had left")
    bench.tell("a step behind it", _seconds(bench, lambda: trainer.train(order, 1)), "s")
    trainer.world.close()


def _seconds(bench: Bench, act: Callable[[], object]) -> float:
    """Seconds of one call and of the work that it queued on the device."""
    began_s = time.monotonic()
    act()
    bench.settle()
    return time.monotonic() - began_s


def _tell(
    bench: Bench, trainer: Trainer, order: StepOrder, seconds: float, *, need: Need, settings: dict[str, Any]
) -> None:
    measured = trainer.take_measurements(order)
    prompts = {example.prompt_id: example.prompt_token_ids.size for example in order.examples}
    tokens = sum(prompts.values()) + sum(example.answer_token_ids.size for example in order.examples)
    bench.tell("speed", tokens / seconds, "tokens/s", tokens_a_step=tokens, settings=settings)
    bench.tell("step", seconds, "s", **{name: measured[name] / TIMED_STEPS for name in measured if "time/" in name})
    bench.tell("work", training_flops(trainer.model, order.examples, tokens) / seconds / 1e12, "TFLOP/s")
    if "rate/mfu" in measured:
        bench.tell("share of the peak", measured["rate/mfu"] * TIMED_STEPS, "MFU")
    peak_mib = measured["memory/learner_peak_mib"]
    bench.tell("peak memory", peak_mib, "MiB", planned_mib=need.mib, planned_parts_mib=_in_mib(need))
    bench.tell("planned / measured memory", need.mib / peak_mib, "ratio")
    if bench.device == "cuda":
        taken_mib = torch.cuda.memory_reserved() / MIB + CUDA_CONTEXT_MIB
        bench.tell("taken memory", taken_mib, "MiB", context_mib=CUDA_CONTEXT_MIB)
        bench.tell("planned / taken memory", on_gpu_with(need).mib / taken_mib, "ratio")


def _policy(keys: dict[str, Any], bench: Bench) -> PolicyTable:
    """Policy with these learner keys as a run on a GPU resolves it; on a CPU without keys that need a GPU."""
    table = {"microbatch_tokens": 16384, "prompts_per_step": 4} | keys
    rollout = {"group_size": 8, "max_new_tokens": 768}
    if bench.device == "cpu":
        table, rollout = table | {"microbatch_tokens": 256}, {"group_size": 4, "max_new_tokens": 24}
    policy = {"model": "random", "device": "cuda", "rollout": rollout, "learner": table}
    tasks = {"trim": {"source": "words", "dataset": "trim"}}
    tables = {"run": {"name": "gpu-hour", "steps": 1}, "tasks": tasks, "policies": {"a": policy}}
    resolved = by_device(RunConfig.model_validate(tables)).config.policies["a"]
    learner = resolved.learner.model_copy(update=ON_CPU if bench.device == "cpu" else {})
    return resolved.model_copy(update={"device": bench.device, "learner": learner})


def _prompt_tokens(bench: Bench) -> int:
    return bench.of(256, 8)


def plan_of(config: Any, policy: PolicyTable, bench: Bench) -> Need:
    """Memory need that `mrl check` plans for this rank: on its GPU or, without one, of its process."""
    table = policy.learner
    batch, num_passes = largest_microbatch(policy, _prompt_tokens(bench), policy.rollout.max_new_tokens)
    peaks = pass_peaks(
        config,
        precision=table.precision,
        batch=batch,
        checkpointing=table.activation_checkpointing,
        offload=table.activation_offload and bench.device == "cuda",
        lora=table.lora,
        chunk_logits=table.chunk_logits,
    )
    _, on_device = rank_needs(
        model_size(config, table.lora),
        peaks,
        table,
        num_passes=num_passes,
        holds_reference=False,
        saves_beside_training=False,
        on_gpu=bench.device == "cuda",
    )
    return on_device


def rows(policy: PolicyTable, vocab_size: int, bench: Bench) -> list[TrainingExample]:
    """Training examples of one step: groups of random answers, each as long as may be."""
    rng = np.random.default_rng(1)
    made: list[TrainingExample] = []
    answer_tokens = policy.rollout.max_new_tokens
    for group in range(policy.learner.prompts_per_step):
        prompt = rng.integers(2, vocab_size, _prompt_tokens(bench)).astype(np.int32)
        for _ in range(policy.rollout.group_size):
            answer = rng.integers(2, vocab_size, answer_tokens).astype(np.int32)
            advantages = np.full(answer_tokens, rng.normal(), np.float32)
            weights = np.full(answer_tokens, 1.0 / answer_tokens, np.float32)
            behaviour = np.full(answer_tokens, -np.log(vocab_size), np.float32)
            made.append(TrainingExample(prompt, answer, "own", advantages, weights, behaviour, f"p{group}", "me"))
    return made


def _check_room(config: Any, policy: PolicyTable, need: Need, bench: Bench) -> None:
    """Compare the plan with free memory. Raises SkippedError when it does not fit."""
    room_mib = host_mib = psutil.virtual_memory().available / MIB
    if bench.device == "cuda":
        room_mib = torch.cuda.mem_get_info()[0] / MIB + CUDA_CONTEXT_MIB  # this process has its context already
        need = on_gpu_with(need)
    if need.mib > room_mib:
        raise SkippedError(f"the plan says {need.mib:.0f} MiB, and {room_mib:.0f} MiB are free")
    moments_mib = 8 * model_size(config, policy.learner.lora).trained / MIB
    if policy.learner.optimizer_memory == "host" and moments_mib > host_mib:
        raise SkippedError(f"{moments_mib:.0f} MiB of moments, and {host_mib:.0f} MiB of main memory are free")


def _check(policy: PolicyTable, bench: Bench) -> None:
    """Check time and packages. Raises SkippedError when too little time is left or a package is missing."""
    if bench.left_s < bench.of(RESERVED_S, 0.0):
        raise SkippedError("the stage's time is used up")
    if policy.learner.logprob_kernel == "liger" and (missing := missing_packages()):
        raise SkippedError(f"the package {missing[0]} is not there (extra `liger`)")


def _in_mib(need: Need) -> dict[str, int]:
    return {part: round(size / MIB) for part, size in need.parts.items()}
