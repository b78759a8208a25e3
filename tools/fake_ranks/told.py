"""Answers to operations that depend on values, where tensors have no data: every value is 1, and every mask is full."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def told(func: Any, args: Any) -> Any:
    """Answer an operation that depends on values; return NotImplemented for one that does not."""
    first: Any = args[0] if args else None
    match func:
        case torch.ops.aten._local_scalar_dense.default:
            return 1.0 if first.dtype.is_floating_point else 1
        case torch.ops.aten.allclose.default:
            assert first.device == args[1].device
            return True
        case torch.ops.aten.nonzero.default:
            return first.new_zeros(first.numel(), first.ndim, dtype=torch.int64)
        case torch.ops.aten._unique2.default:
            counts = first.new_zeros(first.numel(), dtype=torch.int64)
            return first.new_zeros(first.numel()), counts, counts.clone()
        case torch.ops.aten.index.Tensor if any(one is not None and one.dtype is torch.bool for one in args[1]):
            (mask,) = args[1]
            assert mask.device == first.device
            return first.reshape(-1, *first.shape[mask.ndim :]).clone()
    return NotImplemented


class Told(TorchDispatchMode):
    """Dispatch mode that answers operations that depend on values, by `told`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer an operation that depends on values, or run it."""
        answer = told(func, args)
        return func(*args, **(kwargs or {})) if answer is NotImplemented else answer
