"""Forwards in a number format other than that of the parameters, operation by operation: the model is never copied.

The results of an engine that computes in 16 bits differ from the exact ones by rounding; a forward in its format shows
by how much.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

NumberFormat = Literal["float32", "tf32", "float16", "bfloat16"]
"""Number formats, from fine to coarse. In tf32, factors of float32 are multiplied with ten bits after the point, as
tensor cores do."""
COARSENESS: tuple[NumberFormat, ...] = ("float32", "tf32", "float16", "bfloat16")
TF32_DROPPED_BITS = 13

_PRODUCTS: set[Callable[..., Any]] = {
    functional.linear,
    functional.scaled_dot_product_attention,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    torch.einsum,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.mm,
    Tensor.bmm,
    *(
        getattr(room, name)
        for room, name in ((functional, "grouped_mm"), (torch, "_grouped_mm"))
        if hasattr(room, name)
    ),
}
_LOOK_UPS_AND_NORMS: set[Callable[..., Any]] = {functional.embedding, functional.layer_norm, functional.rms_norm}
_SCALES: set[Callable[..., Any]] = {Tensor.mul, Tensor.__mul__, torch.mul, Tensor.add, Tensor.__add__, torch.add}
"""Operations of a family's own norm; only those with a parameter among their operands are rounded."""


def coarser(first: NumberFormat, second: NumberFormat) -> NumberFormat:
    """Return the format with fewer bits after the point."""
    return max(first, second, key=COARSENESS.index)


def rounded(values: Tensor, number_format: NumberFormat) -> Tensor:
    """Return the nearest values that the format has, in its type; tf32 values lie in float32."""
    if number_format != "tf32":
        return values.to(getattr(torch, number_format))
    bits = values.to(torch.float32).view(torch.int32)
    half = (1 << (TF32_DROPPED_BITS - 1)) - 1
    even = (bits >> TF32_DROPPED_BITS) & 1
    return ((bits + half + even) >> TF32_DROPPED_BITS << TF32_DROPPED_BITS).view(torch.float32)


class EmulatedPrecision(TorchFunctionMode):
    """Inside, models compute in the format `values`, with weights that are first rounded to the format `weights`.

    The operands of the running operation are in memory twice. Under FSDP each rank rounds the weights that it has
    gathered.
    """

    def __init__(self, values: NumberFormat, *, weights: NumberFormat) -> None:
        super().__init__()
        self._values, self._weights = values, weights

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every operation."""
        named = kwargs or {}
        is_product = func in _PRODUCTS
        if not (is_product or func in _LOOK_UPS_AND_NORMS or (func in _SCALES and _has_parameter(args))):
            return func(*args, **named)
        values = self._values if is_product or self._values != "tf32" else "float32"
        operands = [
            self._operand(arg, values, is_weight=place > 0 and func is functional.linear)
            for place, arg in enumerate(args)
        ]
        return func(*operands, **{name: self._operand(value, values) for name, value in named.items()})

    def _operand(self, value: Any, values: NumberFormat, *, is_weight: bool = False) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if is_weight or isinstance(value, nn.Parameter):
            value = rounded(value, self._weights)
        return rounded(value, values)


def _has_parameter(args: Iterable[Any]) -> bool:
    return any(isinstance(arg, nn.Parameter) for arg in args)
