"""Rounding to bfloat16 without a drift, against the same in plain Python."""

import struct

import numpy as np
import torch

from mrl.learner.stochastic_rounding import rounding_bits, rounding_key, to_bfloat16

CPU = torch.device("cpu")
DECAY = 0.999
"""Of the second moment, by default."""


def hashed(number: int) -> int:
    """MurmurHash3's last rounds, one number at a time."""
    number ^= number >> 16
    number = number * 0x85EBCA6B % 2**32
    number ^= number >> 13
    number = number * 0xC2B2AE35 % 2**32
    return number ^ number >> 16


def rounded(value: float, bits: int) -> float:
    """To one of the two neighbours among bfloat16, by the bits of a float32."""
    (raw,) = struct.unpack("<I", struct.pack("<f", value))
    kept = raw >> 16
    if bits % 2**16 + raw % 2**16 >= 2**16:
        kept += 1
    return struct.unpack("<f", struct.pack("<I", kept << 16))[0]


def test_bits_and_rounding_are_those_of_plain_python() -> None:
    """Of numbers of both signs and all sizes, also beyond the 2^31st element."""
    values = torch.randn(400, generator=torch.Generator().manual_seed(0)) * torch.logspace(-44, 37, 400)
    for first in (0, 2**31 - 200, 2**32 - 7):
        bits = rounding_bits(len(values), first=first, key=12345, device=CPU)
        wanted = [hashed((first + index) % 2**32 ^ 12345) for index in range(len(values))]
        assert [bit % 2**32 for bit in bits.tolist()] == wanted
        found = to_bfloat16(values, bits).tolist()
        assert found == [rounded(value, bit) for value, bit in zip(values.tolist(), wanted, strict=True)]


def test_what_bfloat16_has_stays_as_it_is() -> None:
    """Whatever the bits are; infinities too, and more than the largest number becomes one."""
    values = torch.tensor([0.0, -0.0, 1.5, -3.0e-39, torch.inf, -torch.inf]).bfloat16()
    for bits in (0, 0x8000, 0xFFFF, -1):
        found = to_bfloat16(values.float(), torch.full((6,), bits, dtype=torch.int32))
        assert torch.equal(found.view(torch.int16), values.view(torch.int16))
    largest = torch.tensor([torch.finfo(torch.float32).max])
    assert to_bfloat16(largest, torch.tensor([0xFFFF], dtype=torch.int32)).isposinf().all()


def test_small_steps_are_not_lost_on_average() -> None:
    """A second moment of 1 on its way to 0.25, by a thousandth of the way in each update: 4,096 of them.

    Rounded to the nearest, none of them moves at all: neighbours of 1 are a 256th below it.
    """
    exact, nearest = 1.0, torch.ones(4096).bfloat16()
    kept = nearest.clone()
    for step in range(700):
        exact = DECAY * exact + (1 - DECAY) * 0.25
        bits = rounding_bits(4096, first=0, key=rounding_key(3, step), device=CPU)
        kept = to_bfloat16(DECAY * kept.float() + (1 - DECAY) * 0.25, bits)
        nearest = (DECAY * nearest.float() + (1 - DECAY) * 0.25).bfloat16()
    assert (nearest == 1).all()
    assert 0.6 < exact < 0.63
    deviation = float(kept.float().std())
    assert abs(float(kept.float().mean()) - exact) < 4 * deviation / 64
    assert deviation < 0.05 * exact


def test_bits_of_elements_steps_and_parameters_have_nothing_in_common() -> None:
    """Each of the 32 bits is set half of the time, and agrees half of the time with that of the next of each kind."""
    count = 1 << 16
    base = rounding_bits(count, first=0, key=rounding_key(0, 0), device=CPU)
    others = [
        rounding_bits(count, first=1, key=rounding_key(0, 0), device=CPU),
        rounding_bits(count, first=0, key=rounding_key(0, 1), device=CPU),
        rounding_bits(count, first=0, key=rounding_key(1, 0), device=CPU),
        base >> 16,
    ]
    for found in (base, *(base ^ other for other in others)):
        shares = [float((found >> bit & 1).float().mean()) for bit in range(16)]
        assert np.abs(np.array(shares) - 0.5).max() < 5 * 0.5 / count**0.5
