"""The weights of a model by name: listing them, and gathering them from their shards."""

from collections.abc import Iterator

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


@torch.no_grad()
def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`named_weights` one by one, each gathered from its shards when its turn comes, adapters merged into theirs.

    Where the model is sharded, all ranks have to take all of them.
    """
    weights = named_weights(model)
    for name, tensor in weights.items():
        if not is_adapter(name):
            yield name_without_adapter(name), merged(model, name, weights, _whole(tensor), _whole)


@torch.no_grad()
def whole_adapters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The adapters alone, by the names of peft's files, one by one as `whole_weights`."""
    for name, tensor in named_weights(model).items():
        if is_adapter(name):
            yield name_in_file(name), _whole(tensor)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
