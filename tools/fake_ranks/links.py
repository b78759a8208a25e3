"""Bytes that an update sends over the links within a host and between hosts, and the network speed that they need.

A collective of n ranks on h hosts is taken for a ring, as NCCL makes one: it goes through the n / h ranks of a host
before it goes on to the next host. There are as many rings as ranks on a host, each of which leaves it by the network
card of another rank. So of the bytes that a rank sends, h / n go over its own card, and the rest stays within the host;
with one rank on each host all bytes leave it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fake_ranks.layouts import Layout
from fake_ranks.watched import Phase, Sent
from mrl.models.size import ModelSize

COMPUTED_PER_S = 400e12
"""Floating-point operations per second of a GPU, none of them recomputed: torchtitan reports 390e12 of H100 for Qwen3
32B (https://github.com/pytorch/torchtitan/pull/1690)."""
SHARE = 0.1
"""Share of the time of the arithmetic that the network may take if nothing of it were hidden behind the arithmetic."""
PARAMETER_BYTES, GRADIENT_BYTES = 2, 4
"""Bytes of an element on its way: parameters are gathered in bfloat16, gradients summed in float32."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank sends."""

    within: float = 0.0
    """Bytes sent to ranks of the same host."""
    between: float = 0.0
    """Bytes sent to other hosts."""

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.within + other.within, self.between + other.between)

    def __mul__(self, times: float) -> "Traffic":
        return Traffic(times * self.within, times * self.between)


def traffic(collectives: Iterable[Sent], per_host: int) -> Traffic:
    """Traffic of all these collectives, with `per_host` ranks on each host."""
    total = Traffic()
    for one in collectives:
        num_hosts = len({rank // per_host for rank in one.ranks})
        leaves = num_hosts / len(one.ranks) if num_hosts > 1 else 0.0
        total += Traffic((1 - leaves) * one.num_bytes, leaves * one.num_bytes)
    return total


def of_update(phases: Sequence[Phase], num_passes: int, per_host: int) -> Traffic:
    """Traffic of an update of `num_passes` passes, from the phases of one or two: all but the last are alike."""
    ends = [1 + index for index, phase in enumerate(phases) if phase.name == "backward"]
    assert len(ends) == min(2, num_passes)
    parts = [phases[start:end] for start, end in zip([0, *ends], [*ends, len(phases)], strict=True)]
    sums = [traffic((sent for phase in part for sent in phase.sent), per_host) for part in parts]
    *before, last, update = sums
    return last + update + (before[0] * (num_passes - 1) if before else Traffic())


def reckoned(size: ModelSize, layout: Layout, num_passes: int) -> Traffic:
    """Traffic of an update by arithmetic, without sums of a few numbers.

        passes (2 * 2 + 4) P (s - 1) / s  within a copy,    2 * 4 (P / s) (r - 1) / r  over copies, once

    P parameters, s shards, r copies: forward and backward gather parameters, each backward sums gradients.
    """
    shards, copies = layout.shards, layout.ranks // layout.shards
    of_pass = (2 * PARAMETER_BYTES + GRADIENT_BYTES) * size.parameters * (shards - 1) / shards
    once = 2 * GRADIENT_BYTES * size.parameters / shards * (copies - 1) / copies
    copy, others = tuple(range(shards)), tuple(range(0, layout.ranks, shards))
    sent = [Sent("within a copy", num_passes * of_pass, copy), Sent("over copies", once, others)]
    return traffic(sent, layout.per_host)


def needed_bits_per_s(between: float, compute_s: float) -> float:
    """Bits per second of a GPU's network card that sends `between` bytes in SHARE of the arithmetic's time."""
    return 8 * between / (SHARE * compute_s)
