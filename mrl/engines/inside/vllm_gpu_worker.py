"""What lets vLLM on a GPU take new weights without reading a disk or hashing in its steps (read in 0.33, run on CPUs).

They are read and checked beside the steps into memory that the GPU copies from by itself, or where their learner shares
its GPU looked at there; vLLM's own reload then puts them in place, whatever its kernels have made of the layout, so
that captured graphs stay. Afterwards, beside the steps
again, what layers compute with is compared on the GPU with what was read: bytes that are equal have its XXH3.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from arriving_weights import ArrivingWeights, InFile, Tensors, check, in_threads  # type: ignore[import-not-found]
from broadcast_member import digest  # type: ignore[import-not-found]
from shared_memory import ROOM_BYTES, OpenVersion, SharedTensor  # type: ignore[import-not-found]

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EXPERTS = {"gate_proj": ("w13_weight", 0), "up_proj": ("w13_weight", 1), "down_proj": ("w2_weight", 0)}
EXPERTS |= {"w1": ("w13_weight", 0), "w3": ("w13_weight", 1), "w2": ("w2_weight", 0)}
"""Module of an expert -> the parameter of all experts of its layer, and which rows of its expert it is there."""
COMPARED_BYTES = 64 * 1024**2
"""On the GPU beside what vLLM has there."""


class GpuWeightsExtension(ArrivingWeights):
    """Methods added to vLLM's worker."""

    model_runner: Any
    device: torch.device
    reload_weights: Callable[..., None]
    mrl_host: Tensors
    """What came last in files, on the host; written over by what comes next."""
    mrl_shared: OpenVersion
    """What came last on the learner's GPU, until it was looked at."""
    mrl_came: "Tensors | dict[str, SharedTensor]"
    """What came last, either way."""
    mrl_found: dict[str, str]
    """Its digests."""
    mrl_is_served: bool

    def mrl_serve_arrived(self) -> dict[str, str]:
        """Serve what has arrived. Raises whatever vLLM raises: nobody knows what it serves then."""
        arrived = self.mrl_arriving.result().items()
        self.reload_weights(weights_iterator=((name, _here(one)) for name, one in arrived), is_checkpoint_format=True)
        self.mrl_is_served = True
        return {}

    def _taken(self, folder: Path, digests: dict[str, str]) -> "Tensors | dict[str, SharedTensor]":
        self.mrl_is_served = False
        self._close_shared()
        try:
            self.mrl_shared = OpenVersion(folder, self.device)
            found = self._looked_at(self.mrl_shared.tensors)
        except (OSError, ValueError, KeyError) as error:
            logging.getLogger("vllm").warning("weights taken from files, not from the learner's GPU: %s", error)
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

    def _looked_at(self, tensors: "dict[str, SharedTensor]") -> dict[str, str]:
        room = torch.empty(ROOM_BYTES if tensors else 0, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        return {name: one.digest(room) for name, one in tensors.items()}

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
        parameters = self.model_runner.get_model().named_parameters()
        held = {name.replace(".base_layer.", "."): one.data for name, one in parameters}
        rows: dict[str, int] = {}
        found = {}
        for name in sorted(self.mrl_came, key=_order):
            tensor = _here(self.mrl_came[name])
            expert = _expert(name, len(tensor), held) if tensor.ndim == 2 else None
            if expert is not None:  # the kernel may have moved it: what is not equal is not wrong, the canary decides
                if expert.shape == tensor.shape and _is_equal(expert, tensor):
                    found[name] = self.mrl_found[name]
                continue
            served = _served(name, held)
            first = rows.get(served, 0)
            rows[served] = first + (len(tensor) if tensor.ndim else 0)
            there = held.get(served)
            if there is not None and there.ndim == tensor.ndim and there.shape[1:] == tensor.shape[1:]:
                part = there[first : rows[served]] if tensor.ndim else there
                if part.shape == tensor.shape:  # else it is split over several GPUs
                    found[name] = self.mrl_found[name] if _is_equal(part, tensor) else digest(part.cpu())
        self._close_shared()  # the learner may write over it: nothing is known of it from here on
        return found


def _here(came: "torch.Tensor | SharedTensor") -> torch.Tensor:
    return came if isinstance(came, torch.Tensor) else came.here()


def _served(name: str, held: Tensors) -> str:
    """The parameter whose rows are those of this tensor, and of others."""
    fused = (name.replace(f".{part}.", f".{into}.") for into, parts in FUSED.items() for part in parts)
    return name if name in held else next((one for one in fused if one != name and one in held), name)


def _expert(name: str, rows: int, held: Tensors) -> torch.Tensor | None:
    """Where one matrix of one expert lies as long as no kernel has moved it; None for what is none."""
    layer, _, its = name.partition(".experts.")
    number, _, module = its.removesuffix(".weight").partition(".")
    if module not in EXPERTS:
        return None
    parameter, place = EXPERTS[module]
    there = held.get(f"{layer}.experts.routed_experts.{parameter}")
    return None if there is None else there[int(number)][place * rows : (place + 1) * rows]


def _order(name: str) -> int:
    """Of rows within one parameter."""
    parts = [part for into in FUSED.values() for part in into]
    return next((parts.index(part) for part in parts if f".{part}." in name), -1)


def _is_equal(part: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a parameter on the device is the rounding of a tensor, on the host or there; in a stream of its own."""
    stream = torch.cuda.Stream(part.device) if part.is_cuda else None
    with torch.cuda.stream(stream):
        flat, wanted = part.reshape(-1), tensor.reshape(-1)
        size = COMPARED_BYTES // part.element_size()
        return all(
            torch.equal(flat[start : start + size], wanted[start : start + size].to(flat.device).to(flat.dtype))
            for start in range(0, len(flat), size)
        )
