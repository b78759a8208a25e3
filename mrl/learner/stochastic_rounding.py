"""Float32 in 16 bits without a drift: rounded up or down at random, so that the mean of what is kept is what was given.

The second moment needs it. An update changes it by a part 1 - beta2 of the way to the new square, a thousandth by
default, and neighbours among bfloat16 are up to a 128th apart: rounded to the nearest, it would stay what it was for
good (arXiv 2010.06192, section 3). What is random follows from the element, its tensor and the step alone, so that
every layout of ranks and every resume rounds alike.
"""

import torch
from torch import Tensor

LOW_BITS = 0xFFFF
"""Of a float32, those that bfloat16 has no room for."""


def rounding_bits(count: int, *, first: int, key: int, device: torch.device) -> Tensor:
    """[E] int32, all 32 bits random: a hash (MurmurHash3's last rounds) of the elements from `first` on, and of `key`.

    E = `count`.
    """
    bits_E = torch.arange(count, dtype=torch.int32, device=device).add_(_signed(first)).bitwise_xor_(_signed(key))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        bits_E.bitwise_xor_((bits_E >> shift).bitwise_and_((1 << 32 - shift) - 1))
        if factor != 1:
            bits_E.mul_(_signed(factor))
    return bits_E


def rounding_key(*numbers: int) -> int:
    """One number below 2^32 of several."""
    key = 0
    for number in numbers:
        key = (key ^ number) * 0x9E3779B1 & 0xFFFFFFFF
        key ^= key >> 15
    return key


def to_bfloat16(values_E: Tensor, bits_E: Tensor) -> Tensor:
    """[E] bfloat16 of [E] float32: away from zero where the low 16 of [E] random bits are fewer than what is cut off.

    Infinities stay what they are.
    """
    raised_E = (bits_E & LOW_BITS).add_(values_E.view(torch.int32))
    return raised_E.bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


def _signed(number: int) -> int:
    """The 32 low bits, as int32 has them."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
