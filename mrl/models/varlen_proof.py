"""Proof that torch's flash kernel for rows of all lengths works here, by a small comparison with another kernel.

The kernel is chosen by default on GPUs. A device, a build of torch or a model that it does not support has to be found
before the first step, and not in it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig

from mrl.errors import ConfigError
from mrl.models.skeleton import head_dim, most_cached_heads
from mrl.models.varlen_attention import CURE, KEY, attend_at_once, check_varlen

LENGTHS = (3, 64, 1, 129)
"""Lengths of the compared rows: shorter and longer than a tile of the kernel."""
TOLERANCE = 2e-2
"""Largest difference between the kernels, for values of size one at most in bfloat16, which has eight bits of them."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads of a model."""

    num_query: int
    num_cached: int
    size: int
    """Width of a query or a key."""
    value_size: int
    softcap: float | None


def heads_of(config: PretrainedConfig) -> Heads:
    """Return the attention heads that a model's configuration names."""
    text = config.get_text_config()
    apart = [getattr(text, key, None) for key in ("qk_nope_head_dim", "qk_rope_head_dim")]
    size = sum(apart) if all(apart) else head_dim(text)  # type: ignore[arg-type]
    num_query = text.num_attention_heads
    return Heads(
        num_query,
        most_cached_heads(text),
        size,
        getattr(text, "v_head_dim", None) or size,
        getattr(text, "attn_logit_softcapping", None),
    )


def prove_varlen(device: torch.device, heads: Heads, attend: Callable[..., Tensor] = attend_at_once) -> None:
    """Raises ConfigError where the kernel does not support this GPU or model, fails, or computes something else."""
    if heads.value_size != heads.size:
        raise ConfigError(
            f"{KEY}: the kernel needs keys and values of the same width",
            got=f"{heads.size} and {heads.value_size}",
            cure=CURE,
        )
    check_varlen(device, head_size=heads.size, softcap=heads.softcap)
    query_RHD, key_RKD, value_RKD = _states(device, heads)
    bounds_N = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=device)
    longest = max(LENGTHS)
    try:
        found_RHD = attend(query_RHD, key_RKD, value_RKD, bounds_N, longest=longest, scaling=None, sliding_window=None)
    except (RuntimeError, ImportError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{KEY}: the kernel fails on this machine", got=reason, cure=CURE) from error
    gap = float((found_RHD.float() - _row_by_row(query_RHD, key_RKD, value_RKD).float()).abs().max())
    if not gap <= TOLERANCE:
        raise ConfigError(
            f'{KEY}: the kernel\'s results on this machine differ from those of "rows"',
            got=f"off by {gap:.2g}",
            wanted=f"<= {TOLERANCE:g}",
            cure=CURE,
        )


def _states(device: torch.device, heads: Heads) -> list[Tensor]:
    """Return queries, keys and values of rows that lie end to end; the same in every run."""
    made = torch.Generator().manual_seed(0)
    return [
        torch.empty(sum(LENGTHS), num_heads, heads.size).uniform_(-1, 1, generator=made).to(device, torch.bfloat16)
        for num_heads in (heads.num_query, heads.num_cached, heads.num_cached)
    ]


def _row_by_row(query_RHD: Tensor, key_RKD: Tensor, value_RKD: Tensor) -> Tensor:
    attended = []
    for query, key, value in zip(*(states.split(LENGTHS) for states in (query_RHD, key_RKD, value_RKD)), strict=True):
        query_1HLD, key_1KLD, value_1KLD = (states.transpose(0, 1).unsqueeze(0) for states in (query, key, value))
        found_1HLD = functional.scaled_dot_product_attention(
            query_1HLD, key_1KLD, value_1KLD, is_causal=True, enable_gqa=True
        )
        attended.append(found_1HLD[0].transpose(0, 1))
    return torch.cat(attended)
