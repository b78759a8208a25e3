"""Noise of equal weights: differences of log-probabilities between number formats, attention kernels and batches.

An engine and a learner that hold equal bytes may differ by this much. Heads are scaled so that logits have a standard
deviation of 1 to 4, as those of trained models have. Every way of computing is compared with the first one of its
number format, and with float32.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from gpu_hour.bench import Bench
from gpu_hour.shapes import config_of, random_model

SPREADS = (1.0, 2.0, 4.0)
"""Standard deviations of logits."""
SEQUENCES = 8


@dataclass(frozen=True)
class Way:
    """One way to compute log-probabilities."""

    dtype: torch.dtype
    kernel: SDPBackend
    at_once: int = SEQUENCES
    tf32: bool = False

    @property
    def name(self) -> str:
        """Name in the figures."""
        numbers = "tf32" if self.tf32 else str(self.dtype).removeprefix("torch.")
        return f"{numbers}, {self.kernel.name.lower()}, {self.at_once} at once"


MATH, FLASH = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION
WAYS = (
    Way(torch.float32, MATH),
    Way(torch.float32, MATH, at_once=1),
    Way(torch.float32, SDPBackend.EFFICIENT_ATTENTION),
    Way(torch.float32, MATH, tf32=True),
    Way(torch.bfloat16, MATH),
    Way(torch.bfloat16, MATH, at_once=1),
    Way(torch.bfloat16, FLASH),
    Way(torch.bfloat16, FLASH, at_once=1),
    Way(torch.bfloat16, SDPBackend.EFFICIENT_ATTENTION),
    Way(torch.bfloat16, SDPBackend.CUDNN_ATTENTION),
)
"""Ways to compute. The first of each number format is the one with which its others are compared."""


@torch.no_grad()
def measure_noise(bench: Bench) -> None:
    """Write one figure for each depth, spread and way: the mean, with the 99th percentile and the largest beside it."""
    for layers in bench.of((4, 28), (2,)):
        config = config_of(bench.of("1.7B", "tiny"), num_hidden_layers=layers, tie_word_embeddings=False)
        model = random_model(config, bench.device)
        generator = torch.Generator().manual_seed(1)
        length = bench.of(256, 32)
        ids = torch.randint(0, config.vocab_size, (SEQUENCES, length), generator=generator).to(bench.device)
        unit_head = model.lm_head.weight.clone()
        for spread in SPREADS:
            model.lm_head.weight.copy_(spread * unit_head)
            _compare(bench, model, ids, f"{layers} layers, logits of std {spread:g}")


def _compare(bench: Bench, model: PreTrainedModel, ids: Tensor, subject: str) -> None:
    first: dict[torch.dtype, Tensor] = {}
    for way in WAYS:
        try:
            found = logprobs(model, ids, way)
        except RuntimeError as error:  # no such kernel on this device
            why = str(error).splitlines()[0]
            bench.write({"part": bench.part, "name": f"{subject}: {way.name}", "status": "not there", "why": why})
            continue
        same_format = (found - first.setdefault(way.dtype, found)).abs().flatten()
        exact = (found - first[torch.float32]).abs().flatten()
        bench.tell(
            f"{subject}: {way.name}",
            float(same_format.mean()),
            "nats",
            p99_nats=float(same_format.quantile(0.99)),
            max_nats=float(same_format.max()),
            mean_to_float32_nats=float(exact.mean()),
            max_to_float32_nats=float(exact.max()),
        )


def logprobs(model: PreTrainedModel, ids: Tensor, way: Way) -> Tensor:
    """Return [N, L - 1] float32 log-probabilities in nats of every token after the first."""
    torch.set_float32_matmul_precision("high" if way.tf32 else "highest")
    try:
        computing = _rounded(model, way.dtype)
        with sdpa_kernel(way.kernel):
            parts = [computing(input_ids=part, use_cache=False).logits for part in ids.split(way.at_once)]
    finally:
        torch.set_float32_matmul_precision("highest")
    scores = torch.cat(parts)[:, :-1].float().log_softmax(-1)
    return scores.gather(-1, ids[:, 1:, None]).squeeze(-1)


def _rounded(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return model with its weights in a number format; rotary frequencies stay in float32, as engines keep them."""
    if model.dtype == dtype:
        return model
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(dtype)
    return rounded
