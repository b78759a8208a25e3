"""Time of a step by phase on this rank, and the step's use of its device: memory, floating-point operations."""

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mrl.learner.packing import seen_rows
from mrl.models.skeleton import head_dim
from mrl.sharing.regime import TrainingExample

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12, "4090": 165e12}
"""Part of a GPU's name -> dense bfloat16 floating-point operations per second, by its data sheet."""
KIB_PER_MIB = 1024
PHASES = ("pack", "forward", "backward", "update")


class PhaseClock:
    """Seconds spent in the phases of training. On a GPU a phase ends when its work is done, not when it is queued."""

    def __init__(self, device: torch.device, note: Callable[[str], None] = lambda _: None) -> None:
        """`note` is told the name of every phase that begins."""
        self._device, self._note = device, note
        self.on_phase: Callable[[], None] = lambda: None
        """Called as each phase begins: a sign that training goes on."""
        self._spent_s = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the context for a phase."""
        self.on_phase()
        self._note(name)
        self._settle()
        began_s = time.perf_counter()
        yield
        self._settle()
        self._spent_s[name] += time.perf_counter() - began_s

    def take(self) -> dict[str, float]:
        """Return phase -> seconds since the last call."""
        taken, self._spent_s = self._spent_s, dict.fromkeys(PHASES, 0.0)
        return taken

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def peak_memory_mib(device: torch.device) -> float:
    """Return the largest memory in use, in MiB: of a GPU since the last call, of the process since its start."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / KIB_PER_MIB**2
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB_PER_MIB


def training_flops(model: nn.Module, examples: Sequence[TrainingExample], places: int) -> float:
    """Return the floating-point operations of forward and backward over these rows, nothing counted twice.

        6 N L  +  6 V D sum(S)  +  6 A sum(n^2)

    N: parameters besides embedding and head; of experts only those that a token chooses. L: `places`, where a prompt
    that rows share counts once. V D: parameters of the head, which sees trained tokens alone. A: width of all heads of
    all layers. n: tokens of a row, S of them trained. Of n^2 causal attention needs half (arXiv 2204.02311, B).
    """
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    outside = {id(head): head.numel(), id(embedding): embedding.numel()}
    met = sum(parameter.numel() * _share(name, parameter, config) for name, parameter in model.named_parameters())
    inner = met - sum(outside.values())
    attention = config.num_hidden_layers * config.num_attention_heads * head_dim(config)
    lengths = [seen.size for example in examples for seen in seen_rows(example)]
    answers = sum(example.num_trained_tokens for example in examples)
    return 6.0 * (inner * places + head.numel() * answers + attention * sum(n * n for n in lengths))


def _share(name: str, parameter: nn.Parameter, config: Any) -> float:
    """Return the share of a parameter that one token uses: of experts, those that a token chooses."""
    is_shared_out = ".experts." in name and parameter.ndim == 3
    return getattr(config, "num_experts_per_tok", len(parameter)) / len(parameter) if is_shared_out else 1.0


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak floating-point operations per second; None where `PEAK_FLOPS` does not list it."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
