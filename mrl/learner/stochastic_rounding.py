"""Stochastic rounding of float32 to bfloat16: up or down at random, so that the mean of the results is the value.

AdamW's second moment needs it. An update moves that moment a part 1 - beta2 of the way to the new square, a thousandth
by default, and neighbouring bfloat16 numbers are up to a 128th apart: rounded to the nearest, the moment would stay
what it was for good (arXiv 2010.06192, section 3). The random bits follow from the element, its tensor and the step
alone, so that every layout of ranks and every resume rounds alike.
"""

import torch
from torch import Tensor

LOW_BITS = 0xFFFF
"""Bits of a float32 that bfloat16 has no room for."""


def rounding_bits(count: int, *, first: int, key: int, device: torch.device) -> Tensor:
    """Return random bits, [E] int32 with E = `count`.

    They are a hash (MurmurHash3's last rounds) of `key` and of the elements' numbers, from `first` on.
    """
    bits_E = torch.arange(count, dtype=torch.int32, device=device).add_(_signed(first)).bitwise_xor_(_signed(key))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        bits_E.bitwise_xor_((bits_E >> shift).bitwise_and_((1 << 32 - shift) - 1))
        if factor != 1:
            bits_E.mul_(_signed(factor))
    return bits_E


def rounding_key(*numbers: int) -> int:
    """Return one number below 2^32 that is made of several."""
    key = 0
    for number in numbers:
        key = (key ^ number) * 0x9E3779B1 & 0xFFFFFFFF
        key ^= key >> 15
    return key


def to_bfloat16(values_E: Tensor, bits_E: Tensor) -> Tensor:
    """Round [E] float32 to [E] bfloat16, by the low 16 of [E] random bits.

    A value is rounded away from zero where these, added to the 16 bits that are cut off, overflow. Infinities stay what
    they are.
    """
    raised_E = (bits_E & LOW_BITS).add_(values_E.view(torch.int32))
    return raised_E.bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


def _signed(number: int) -> int:
    """Return the 32 low bits, read as int32."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
