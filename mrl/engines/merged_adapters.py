"""Adapters merged into the model of this process, W + alpha / rank * B A, with every W kept beside (arXiv 2106.09685).

Nothing but W, B and A decides what is computed with. So three things prove it: W is that of the policy's folder, B and
A are those that were published, and what the model has is what they give.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from mrl.errors import WeightsError
from mrl.models.lora import WRAPPED, merge, read_scale
from mrl.models.parameters import named_weights
from mrl.models.tensor_file import digest, read_folder, read_tensors

FIRST, SECOND = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class Adapters:
    """Those of one version: name of an adapted weight -> A [R, I] and B [O, R]."""

    factors: Mapping[str, tuple[Tensor, Tensor]]
    scale: float


class MergedAdapters:
    """The adapters of a model which was loaded from `folder`."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._merged: Adapters | None = None
        self._base: dict[str, Tensor] = {}
        """Name of an adapted weight -> W."""
        self._of_folder: dict[str, tuple[str, str]] = {}
        """Name in the folder -> digest of the tensor as this model has to hold it, and as it lies there."""

    def read(self, folder: Path, digests: Mapping[str, str] | None) -> Adapters:
        """What a folder holds, beside what is served.

        Raises WeightsError when it cannot be read, does not fit or has other `digests`.
        """
        tensors: dict[str, Tensor] = {}

        def place(name: str, dtype: torch.dtype, shape: list[int]) -> Tensor:
            return tensors.setdefault(name, torch.empty(shape, dtype=dtype))

        read_folder(folder, place, digests)
        weights = named_weights(self._model)
        factors = {}
        for name in [name for name in tensors if name.endswith(FIRST)]:
            module = name.removesuffix(FIRST)
            weight = f"{module.removeprefix(WRAPPED)}.weight"
            first, second = tensors.pop(name), tensors.pop(module + SECOND, None)
            factors[weight] = self._fitting(str(folder), weight, weights.get(weight), first, second)
        if tensors or (self._merged is not None and factors.keys() != self._merged.factors.keys()):
            odd = sorted(tensors) or sorted(factors.keys() ^ self._base.keys())
            raise WeightsError(f"{folder}: not the adapters of this model: {odd[:5]}")
        return Adapters(factors, read_scale(folder))

    @torch.no_grad()
    def merge(self, adapters: Adapters) -> None:
        """Compute with these from now on. No forward may run meanwhile."""
        weights = named_weights(self._model)
        if self._merged is None:
            self._base = {name: weights[name].detach().clone() for name in adapters.factors}
        self._merged = adapters
        for name, (first_RI, second_OR) in adapters.factors.items():
            merge(self._base[name], second_OR, first_RI, adapters.scale, out=weights[name].data)

    @torch.no_grad()
    def checksums(self) -> dict[str, str]:
        """Name -> digest of adapters as held, and of the folder's tensors where what is served follows from them.

        Empty where nothing is merged.
        """
        if self._merged is None:
            return {}
        if not self._of_folder:
            self._of_folder = self._read_folder()
        held = self._model.state_dict()
        found = {name: self._checksum(name, held[name]) for name in self._of_folder}
        for weight, (first, second) in self._merged.factors.items():
            module = WRAPPED + weight.removesuffix(".weight")
            found |= {module + FIRST: digest(first), module + SECOND: digest(second)}
        return found

    @torch.no_grad()
    def undo(self) -> None:
        """Compute with the weights of the folder again, and keep nothing beside them. No forward may run meanwhile."""
        weights = named_weights(self._model)
        for name, base in self._base.items():
            weights[name].copy_(base)
        self._base, self._merged = {}, None

    def _checksum(self, name: str, held: Tensor) -> str:
        """That of the folder's tensor, or another one where something else is held."""
        assert self._merged is not None
        wanted, in_folder = self._of_folder[name]
        base = self._base.get(name, held)
        if (its_digest := digest(base)) != wanted:
            return its_digest
        if name in self._base:
            first_RI, second_OR = self._merged.factors[name]
            if not torch.equal(held, merge(base, second_OR, first_RI, self._merged.scale)):
                return digest(held)
        return in_folder

    def _read_folder(self) -> dict[str, tuple[str, str]]:
        """One tensor in memory at a time; those that the model holds by other names are left out."""
        held, found = self._model.state_dict(), {}
        staged: dict[str, Tensor] = {}

        def place(name: str, dtype: torch.dtype, shape: list[int]) -> Tensor:
            staged[name] = torch.empty(shape, dtype=dtype)
            return staged[name]

        for path in sorted(self._folder.glob("*.safetensors")):
            for name, in_folder in read_tensors(path, place):
                tensor = staged.pop(name)
                if name in held:
                    found[name] = digest(tensor.to(held[name].dtype)), in_folder
        return found

    @staticmethod
    def _fitting(
        where: str, name: str, weight_OI: Tensor | None, first_RI: Tensor, second_OR: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if weight_OI is None or second_OR is None or first_RI.ndim != 2 or second_OR.ndim != 2:
            raise WeightsError(f"{where}: no adapter for {name}")
        wanted = (second_OR.shape[0], first_RI.shape[1])
        if first_RI.shape[0] != second_OR.shape[1] or tuple(weight_OI.shape) != wanted:
            got = f"{tuple(second_OR.shape)} and {tuple(first_RI.shape)}"
            raise WeightsError(f"{where}: an adapter of {got} does not fit {name}, which is {tuple(weight_OI.shape)}")
        return first_RI.to(weight_OI), second_OR.to(weight_OI)
