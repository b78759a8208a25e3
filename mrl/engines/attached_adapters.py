"""Adapters beside the weights of the model in this process, y = W x + alpha / rank * B A x (arXiv 2106.09685).

W stays unchanged, and lies in memory once. In 16 bits the engine then rounds where the learner's forward rounds; merged
weights would be rounded instead, and lose every change smaller than half a unit in a weight's last place.

The result depends on W, B and A alone. So two comparisons prove the weights: W is that of the policy's folder, and B
and A are those that were published.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from mrl.errors import WeightsError
from mrl.models.lora import WRAPPED, read_scale
from mrl.models.parameters import named_weights, released
from mrl.models.tensor_file import digest, digests, read_folder, read_tensors
from mrl.models.tensor_header import files_of_weights

FIRST, SECOND = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor as the model holds it, and its digests."""

    tensor: Tensor
    as_read: str
    """Digest of the tensor in the model's number format, as it was read."""
    published: str
    """Digest of the published tensor, from which it was rounded."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of one version."""

    factors: Mapping[str, tuple[Held, Held]]
    """Name of an adapted layer -> A [R, I] and B [O, R]."""
    scale: float
    """alpha / rank."""


class AttachedAdapters:
    """The adapters that a model, loaded from `folder`, computes with; none at first."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._attached: Adapters | None = None
        self._hooks: list[RemovableHandle] = []
        self._of_folder: dict[str, tuple[str, str]] = {}
        """Name in the folder -> digests of the tensor: in the model's number format, and as it lies in the folder."""

    def read(self, folder: Path, wanted: Mapping[str, str] | None) -> Adapters:
        """Read the adapters of a folder, without a change to those that are served.

        Raises WeightsError when they cannot be read, do not fit or have other digests than are `wanted`.
        """
        tensors: dict[str, Tensor] = {}

        def place(name: str, dtype: torch.dtype, shape: list[int]) -> Tensor:
            return tensors.setdefault(name, torch.empty(shape, dtype=dtype))

        published = read_folder(folder, place, wanted)
        weights = named_weights(self._model)
        factors: dict[str, dict[str, Tensor]] = {}
        for name in [name for name in tensors if name.endswith(FIRST)]:
            wrapped = name.removesuffix(FIRST)
            layer = wrapped.removeprefix(WRAPPED)
            pair = tensors.pop(name), tensors.pop(wrapped + SECOND, None)
            weight_OI = weights.get(f"{layer}.weight")
            rounded = _fitting(str(folder), layer, weight_OI, *pair)
            factors[layer] = dict(zip((name, wrapped + SECOND), rounded, strict=True))
        known = factors.keys() if self._attached is None else self._attached.factors.keys()
        if tensors or factors.keys() != known:
            odd = sorted(tensors) or sorted(factors.keys() ^ known)
            raise WeightsError(f"{folder}: adapters do not match this model: {odd[:5]}")
        as_read = digests({name: one for pair in factors.values() for name, one in pair.items()})
        held = {
            layer: tuple(Held(one, as_read[name], published[name]) for name, one in pair.items())
            for layer, pair in factors.items()
        }
        return Adapters(held, read_scale(folder))  # type: ignore[arg-type]

    def attach(self, adapters: Adapters) -> None:
        """Compute with these adapters from now on. No forward may run meanwhile."""
        self._attached = adapters
        if not self._hooks:
            layers = ((name, self._model.get_submodule(name)) for name in adapters.factors)
            self._hooks = [layer.register_forward_hook(partial(self._add, name)) for name, layer in layers]

    def detach(self) -> None:
        """Compute with the weights alone again, and drop the adapters. No forward may run meanwhile."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._attached = [], None

    def tensors(self) -> list[Tensor]:
        """Tensors of the adapters that are attached."""
        factors = {} if self._attached is None else self._attached.factors
        return [factor.tensor for pair in factors.values() for factor in pair]

    @torch.no_grad()
    def checksums(self) -> dict[str, str]:
        """Name -> digest of each tensor of the adapters and of the folder; empty where nothing is attached.

        The digest is the published one where the model holds that tensor, rounded to its number format; else it is that
        of the tensor which the model holds.
        """
        if self._attached is None:
            return {}
        if not self._of_folder:
            self._of_folder = self._read_folder()
        own = self._held()
        held = {name: Held(own[name], *known) for name, known in self._of_folder.items()}
        for layer, factors in self._attached.factors.items():
            held |= {WRAPPED + layer + part: one for part, one in zip((FIRST, SECOND), factors, strict=True)}
        found = digests({name: one.tensor for name, one in held.items()})
        return {name: one.published if found[name] == one.as_read else found[name] for name, one in held.items()}

    def _add(self, layer: str, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Forward hook: add to a layer's output [..., O] the output of its adapter for the input [..., I]."""
        assert self._attached is not None
        first, second = self._attached.factors[layer]
        low = functional.linear(inputs[0], first.tensor).flatten(0, -2)
        added = torch.addmm(output.flatten(0, -2), low, second.tensor.T, alpha=self._attached.scale)
        return added.view_as(output)

    def _held(self) -> dict[str, Tensor]:
        return dict(released(self._model, self._model.state_dict().items()))

    def _read_folder(self) -> dict[str, tuple[str, str]]:
        """Hash the folder's tensors, one in memory at a time; without tensors that the model holds by other names."""
        held, found = self._held(), {}
        staged: dict[str, Tensor] = {}

        def place(name: str, dtype: torch.dtype, shape: list[int]) -> Tensor:
            staged[name] = torch.empty(shape, dtype=dtype)
            return staged[name]

        for path in files_of_weights(self._folder):
            for name, in_folder in read_tensors(path, place):
                tensor = staged.pop(name)
                if name in held:
                    found[name] = digest(tensor.to(held[name].dtype)), in_folder
        return found


def _fitting(
    where: str, layer: str, weight_OI: Tensor | None, first_RI: Tensor, second_OR: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return both factors on the device and in the number format of the weight. Raises WeightsError."""
    if weight_OI is None or second_OR is None or first_RI.ndim != 2 or second_OR.ndim != 2:
        raise WeightsError(f"{where}: incomplete adapter, or no such layer in this model: {layer}")
    wanted = (second_OR.shape[0], first_RI.shape[1])
    if first_RI.shape[0] != second_OR.shape[1] or tuple(weight_OI.shape) != wanted:
        got = f"{tuple(second_OR.shape)} and {tuple(first_RI.shape)}"
        raise WeightsError(
            f"{where}: adapter factors of shapes {got} do not fit {layer} of shape {tuple(weight_OI.shape)}"
        )
    return first_RI.to(weight_OI), second_OR.to(weight_OI)
