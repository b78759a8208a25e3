"""Extension of vLLM's worker on a GPU: new weights are read and hashed beside its steps (read in 0.33, run on CPUs).

Weights are read and checked beside the steps, into pinned memory from which the GPU copies by itself; where the learner
shares its GPU's memory, they are checked there. vLLM's own reload then puts them in place, whatever layout its kernels
have made, so that captured graphs stay valid. Afterwards, beside the steps again, the tensors that layers compute with
are compared on the GPU with the weights that were read: a tensor with equal bytes gets their XXH3.
"""

import logging
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

import torch
import xxhash
from arriving_weights import ArrivingWeights, InFile, Tensors, check, in_threads  # type: ignore[import-not-found]
from broadcast_member import digest  # type: ignore[import-not-found]
from shared_memory import OpenVersion, SharedTensor  # type: ignore[import-not-found]

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EXPERTS = {"gate_proj": ("w13_weight", 0), "up_proj": ("w13_weight", 1), "down_proj": ("w2_weight", 0)}
EXPERTS |= {"w1": ("w13_weight", 0), "w3": ("w13_weight", 1), "w2": ("w2_weight", 0)}
"""Module of an expert -> parameter of all experts of its layer, and number of the block of rows that it is there."""
COMPARED_BYTES = 64 * 1024**2
"""Bytes that a comparison takes at a time, on the GPU beside vLLM's own memory, and in the host's memory."""


class GpuWeightsExtension(ArrivingWeights):
    """Methods added to vLLM's worker."""

    device: torch.device
    reload_weights: Callable[..., None]
    mrl_host: Tensors
    """Weights that last came in files, in the host's memory; the next ones are written over them."""
    mrl_shared: OpenVersion
    """Weights that last came on the learner's GPU; closed once they were compared."""
    mrl_came: "Tensors | dict[str, SharedTensor]"
    """Weights that came last, either way."""
    mrl_found: dict[str, str]
    """Digests of `mrl_came`."""
    mrl_is_served: bool

    def mrl_serve_arrived(self) -> dict[str, str]:
        """Serve the weights that have arrived. Raises whatever vLLM raises; it is not known then what vLLM serves."""
        arrived = self.mrl_arriving.result().items()
        self.reload_weights(weights_iterator=((name, _here(one)) for name, one in arrived), is_checkpoint_format=True)
        self.mrl_is_served = True
        return {}

    def _taken(self, folder: Path, digests: dict[str, str]) -> "Tensors | dict[str, SharedTensor]":
        self.mrl_is_served = False
        try:
            self._close_shared()
            self.mrl_shared = OpenVersion(folder, self.device)
            found = {name: one.digest(self.mrl_room) for name, one in self.mrl_shared.tensors.items()}
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            logging.getLogger("vllm").warning("weights are read from files, not from the learner's GPU: %s", error)
            self._close_shared()
            found = {}
        if not found:
            self.mrl_came = self._read(folder, digests)
            return self.mrl_came
        self.mrl_came, self.mrl_found = self.mrl_shared.tensors, found
        try:
            check(found, digests)
        except ValueError:
            self._close_shared()
            raise
        return self.mrl_came

    @cached_property
    def mrl_room(self) -> torch.Tensor:
        """Host memory through which a tensor on the learner's GPU passes to be hashed."""
        return torch.empty(COMPARED_BYTES, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def _close_shared(self) -> None:
        if hasattr(self, "mrl_shared"):
            self.mrl_shared.close()

    def _read(self, folder: Path, digests: dict[str, str]) -> Tensors:
        with self.mrl_folders.open(folder) as files:
            kept = getattr(self, "mrl_host", {})
            is_like = {name: (one.dtype, one.shape) for name, one in files.items()}
            if {name: (one.dtype, list(one.shape)) for name, one in kept.items()} != is_like:
                pinned = self.device.type == "cuda"
                kept = {name: torch.empty(one.shape, dtype=one.dtype, pin_memory=pinned) for name, one in files.items()}
            found = in_threads(InFile.read_into, files.values(), (kept[name] for name in files))
        self.mrl_host, self.mrl_found = kept, dict(zip(files, found, strict=True))
        check(self.mrl_found, digests)
        return kept

    def _held(self) -> dict[str, str]:
        if not getattr(self, "mrl_is_served", False):
            return {}
        if self.device.type == "cuda":  # set for this thread, which would else take memory of the first GPU
            torch.cuda.set_device(self.device)
        parameters = self.model_runner.get_model().named_parameters()
        held = {name.replace(".base_layer.", "."): one.data for name, one in parameters}
        rows: dict[str, int] = {}
        found = {}
        for name in sorted(self.mrl_came, key=_order):
            shape = torch.Size(self.mrl_came[name].shape)
            expert = _expert(name, shape[0], held) if len(shape) == 2 else None
            if expert is not None:  # a kernel may have moved it, so unequal bytes are not wrong: the canary decides
                if expert.shape == shape and (its_digest := self._compared(name, expert)):
                    found[name] = its_digest
                continue
            served = _served(name, held)
            first = rows.get(served, 0)
            rows[served] = first + (shape[0] if shape else 0)
            there = held.get(served)
            if there is not None and there.ndim == len(shape) and there.shape[1:] == shape[1:]:
                part = there[first : rows[served]] if shape else there
                if part.shape == shape:  # else it is split over several GPUs
                    found[name] = self._compared(name, part) or digest(part.cpu())
        self._close_shared()  # the learner may write over this memory from here on
        return found

    def _compared(self, name: str, part: torch.Tensor) -> str:
        """Return the XXH3 of the tensor `name` that came, if `part` of a parameter is its rounding; else "".

        The learner's memory is hashed once more here, so that the digest is that of the bytes that were compared.
        """
        came, flat, start = self.mrl_came[name], part.reshape(-1), 0
        is_here = isinstance(came, torch.Tensor)
        hashing = xxhash.xxh3_128()
        with torch.cuda.stream(torch.cuda.Stream(part.device) if part.is_cuda else None):
            for piece in _pieces(came) if is_here else came.pieces(self.mrl_room):
                wanted = piece.view(came.dtype).to(flat.device).to(flat.dtype)
                if not torch.equal(flat[start : start + len(wanted)], wanted):
                    return ""
                start += len(wanted)
                if not is_here:
                    hashing.update(piece.numpy().data)
        return self.mrl_found[name] if is_here else hashing.hexdigest()


def _here(came: "torch.Tensor | SharedTensor") -> torch.Tensor:
    return came if isinstance(came, torch.Tensor) else came.here()


def _served(name: str, held: Tensors) -> str:
    """Name of the parameter that holds this tensor's rows, alone or fused with others."""
    fused = (name.replace(f".{part}.", f".{into}.") for into, parts in FUSED.items() for part in parts)
    return name if name in held else next((one for one in fused if one != name and one in held), name)


def _expert(name: str, rows: int, held: Tensors) -> torch.Tensor | None:
    """View of one matrix of one expert, where it lies unless a kernel has moved it; None for another tensor."""
    layer, _, its = name.partition(".experts.")
    number, _, module = its.removesuffix(".weight").partition(".")
    if module not in EXPERTS:
        return None
    parameter, place = EXPERTS[module]
    there = held.get(f"{layer}.experts.routed_experts.{parameter}")
    return None if there is None else there[int(number)][place * rows : (place + 1) * rows]


def _order(name: str) -> int:
    """Sort key of tensors: the order of their rows within a fused parameter."""
    parts = [part for into in FUSED.values() for part in into]
    return next((parts.index(part) for part in parts if f".{part}." in name), -1)


def _pieces(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    return tensor.reshape(-1).split(COMPARED_BYTES // tensor.element_size())
