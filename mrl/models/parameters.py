"""The weights of a model by name: listing them, and gathering them from their shards."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mrl.models.lora import is_adapter, merged, name_in_file, name_without_adapter


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter once (tied weights under their first name) and every persistent buffer."""
    weights: dict[str, Tensor] = dict(model.named_parameters())
    persistent = model.state_dict().keys()
    weights.update({name: buffer for name, buffer in model.named_buffers() if name in persistent})
    return weights


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """The part of `named_weights` that training changes: all of it, or the adapters alone where there are some."""
    weights = named_weights(model)
    return {name: tensor for name, tensor in weights.items() if is_adapter(name)} or weights


class TensorSource(NamedTuple):
    """A tensor of a model, by the name under which it is published."""

    name: str
    like: Tensor
    """Has its shape and type, and may be a shard."""
    whole: Callable[[], Tensor]
    """Gathers it; where the model is sharded all ranks have to call it, in the same order."""


def weight_sources(model: nn.Module) -> list[TensorSource]:
    """`named_weights`, adapters merged into theirs."""
    weights = named_weights(model)

    def whole(name: str, tensor: Tensor) -> Tensor:
        return merged(model, name, weights, _whole(tensor), _whole)

    return [
        TensorSource(name_without_adapter(name), tensor, partial(whole, name, tensor))
        for name, tensor in weights.items()
        if not is_adapter(name)
    ]


def adapter_sources(model: nn.Module) -> list[TensorSource]:
    """The adapters alone, by the names of peft's files."""
    weights = named_weights(model)
    return [
        TensorSource(name_in_file(name), tensor, partial(_whole, tensor))
        for name, tensor in weights.items()
        if is_adapter(name)
    ]


def plain_sources(weights: Iterable[tuple[str, Tensor]]) -> list[TensorSource]:
    """Of tensors that are whole."""
    return [TensorSource(name, tensor, partial(_whole, tensor)) for name, tensor in weights]


@torch.no_grad()
def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`weight_sources` one by one, each gathered from its shards when its turn comes."""
    for source in weight_sources(model):
        yield source.name, source.whole()


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
