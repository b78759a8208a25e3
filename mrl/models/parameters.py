"""The weights of a model by name: listing them, gathering them from their shards, and their names in a folder.

In memory transformers holds the experts of a layer in one tensor. A released folder, and so a published version, has
one tensor per expert: views of the layer's tensor, by transformers' own conversion.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from mrl.models.lora import is_adapter, merged, name_in_file, name_without_adapter


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter once (tied weights under their first name) and every persistent buffer, by name."""
    weights: dict[str, Tensor] = dict(model.named_parameters())
    persistent = model.state_dict().keys()
    weights.update({name: buffer for name, buffer in model.named_buffers() if name in persistent})
    return weights


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the part of `named_weights` that training changes: the adapters alone where there are some, else all of
    it.
    """
    weights = named_weights(model)
    return {name: tensor for name, tensor in weights.items() if is_adapter(name)} or weights


class ReleasedTensor(NamedTuple):
    """A tensor as a folder names it: a view into one contiguous tensor of the model."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, whole: Tensor) -> Tensor:
        """Return this tensor as a view of `whole`, whose memory it shares."""
        if self.shape == tuple(whole.shape):
            return whole.detach()
        assert whole.is_contiguous()
        return whole.detach().as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


_PARTS: WeakKeyDictionary[nn.Module, dict[str, list[ReleasedTensor]]] = WeakKeyDictionary()
"""Model -> name of a weight -> its tensors in a folder, which cost a millisecond per weight to find."""


def released(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights of a model by the names that they have in its folder, as views of the same memory."""
    for name, tensor in weights:
        yield from ((part.name, part.of(tensor)) for part in parts_of(model, name, tensor))


def in_dtypes(
    weights: Iterable[tuple[str, Tensor]], dtypes: Mapping[str, str], others: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights`, those of floating point in their dtype of `dtypes` (name -> "bfloat16"), else in `others`.

    With "" for a dtype a weight stays as it is.
    """
    for name, tensor in weights:
        dtype = dtypes.get(name, others)
        yield name, tensor.to(getattr(torch, dtype)) if dtype and tensor.is_floating_point() else tensor


def parts_of(model: nn.Module, name: str, tensor: Tensor) -> list[ReleasedTensor]:
    """Return the tensors that a folder has for the weight `name`, in the order of the memory; only the shape of
    `tensor` is used.

    A weight that a folder holds as other numbers, and not as views, keeps its own name.
    """
    known = _PARTS.setdefault(model, {})
    if name not in known:
        like = torch.empty(tensor.shape, device="meta")
        own = {name: like}
        with _WithoutCopies():
            found = revert_weight_conversion(model, own) if isinstance(model, PreTrainedModel) else own
        if any(one.untyped_storage()._cdata != like.untyped_storage()._cdata for one in found.values()):
            found = own
        parts = [
            ReleasedTensor(its, tuple(one.shape), one.stride(), int(one.storage_offset())) for its, one in found.items()
        ]
        known[name] = sorted(parts, key=lambda part: part.offset)
    return known[name]


class _WithoutCopies(TorchFunctionMode):
    """Inside, `Tensor.contiguous` copies nothing: transformers calls it before it saves a view."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


class TensorSource(NamedTuple):
    """A tensor of a model under the name by which it is published."""

    name: str
    like: Tensor
    """A tensor of its shape and type, which may be a shard or lack values."""
    whole: Callable[[], Tensor]
    """Gathers the tensor; where the model is sharded all ranks have to call it, in the same order."""


def weight_sources(model: nn.Module) -> list[TensorSource]:
    """Return the `named_weights` as a folder has them, adapters merged into the weights that they adapt."""
    weights = named_weights(model)

    def whole(name: str, tensor: Tensor) -> Tensor:
        return merged(model, name, weights, _whole(tensor), _whole)

    return [
        source
        for name, tensor in weights.items()
        if not is_adapter(name)
        for source in _sources(
            parts_of(model, name_without_adapter(name), tensor), tensor, partial(whole, name, tensor)
        )
    ]


def adapter_sources(model: nn.Module) -> list[TensorSource]:
    """Return the adapters alone, by the names of peft's files."""
    weights = named_weights(model)
    return [
        TensorSource(name_in_file(name), tensor, partial(_whole, tensor))
        for name, tensor in weights.items()
        if is_adapter(name)
    ]


def plain_sources(weights: Iterable[tuple[str, Tensor]]) -> list[TensorSource]:
    """Return sources of `weights` under the names that they have, without conversion or merging."""
    return [TensorSource(name, tensor, partial(_whole, tensor)) for name, tensor in weights]


@torch.no_grad()
def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of `weight_sources`, each gathered from its shards when its turn comes."""
    for source in weight_sources(model):
        yield source.name, source.whole()


def _sources(parts: list[ReleasedTensor], tensor: Tensor, whole: Callable[[], Tensor]) -> list[TensorSource]:
    if len(parts) == 1:
        return [TensorSource(parts[0].name, tensor, whole)]
    gathered = _Gathered(whole, len(parts))
    likes = (torch.empty(part.shape, dtype=tensor.dtype, device="meta") for part in parts)
    return [
        TensorSource(part.name, like, partial(gathered.part, part)) for part, like in zip(parts, likes, strict=True)
    ]


class _Gathered:
    """A weight whose parts are asked for one after the other: gathered for the first, kept until the last."""

    def __init__(self, whole: Callable[[], Tensor], num_parts: int) -> None:
        self._whole, self._num_parts = whole, num_parts
        self._kept: Tensor | None = None
        self._asked = 0

    def part(self, part: ReleasedTensor) -> Tensor:
        whole = self._whole() if self._kept is None else self._kept
        self._asked += 1
        self._kept = whole if self._asked % self._num_parts else None
        return part.of(whole)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
