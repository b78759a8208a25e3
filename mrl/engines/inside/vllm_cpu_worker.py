"""What makes vLLM on a CPU take new weights in place; imported by vLLM's worker before it makes the model.

On a CPU vLLM packs the weight of each linear layer for its kernels and empties the parameter, so a later load has
nothing to write into: `reload_weights` answers OK and the packed copies of the old weights are served on. The experts
of a mixture it packs within their parameters, and a later load writes plain rows over them, which it computes with as
if they were packed. Here nothing is packed; layers compute with their parameters as they are, and so there is one copy
of the weights to be right.

This replaces private functions of vLLM (seen in 0.32) and is for CPU only. If vLLM moves one, the import fails and the
server does not start. If it no longer calls the one of linear layers, parameters are empty and the first weights are
refused; of experts the canary alone would be off, so contracts hold those (tests/support/vllm_contract.py).
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from arriving_weights import (  # type: ignore[import-not-found]
    ArrivingWeights,
    InFile,
    Tensors,
    check,
    in_threads,
)
from broadcast_member import digest  # type: ignore[import-not-found]
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers import utils as layers
from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, apply_moe_activation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


def _compute_with_parameters(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def _keep_experts(self: Any, layer: Any) -> None:
    """In the place of packing."""


def _compute_with_experts(
    self: Any,
    *,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    apply_router_weight_on_input: bool,
    **_: Any,
) -> None:
    """Into output [T, H]: of w1 [E, 2I, H] and w2 [E, H, I] the experts that a token chose, one after the other."""
    config = ApplyMoEActivationConfig.from_configs(self.moe_config, self.quant_config)
    summed = torch.zeros_like(output, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        rows, chosen = torch.where(topk_ids == expert)
        biases = [None if bias is None else bias[expert] for bias in (self.w1_bias, self.w2_bias)]
        inner = torch.nn.functional.linear(hidden_states[rows], w1[expert], biases[0])
        active = inner.new_empty(len(inner), w2.shape[2])
        apply_moe_activation(activation, active, inner, activation_config=config)
        outer = torch.nn.functional.linear(active, w2[expert], biases[1]).float()
        # with one expert a token vLLM may have weighed the input
        weights = 1.0 if apply_router_weight_on_input else topk_weights[rows, chosen, None]
        summed.index_add_(0, rows, outer * weights)
    output.copy_(summed)


assert callable(layers.dispatch_cpu_unquantized_gemm)
layers.dispatch_cpu_unquantized_gemm = _compute_with_parameters
assert callable(CPUUnquantizedExperts.process_weights_after_loading)
assert callable(CPUUnquantizedExperts.apply)
CPUUnquantizedExperts.process_weights_after_loading = _keep_experts
CPUUnquantizedExperts.apply = _compute_with_experts


class CpuWeightsExtension(ArrivingWeights):
    """Methods added to vLLM's worker.

    The first weights go through the model's own loader, which is watched: where it puts which elements holds for all
    that come later. These are written there beside the steps, into tensors that then take the place of the served ones.
    """

    mrl_places: dict[str, "_Place"]
    mrl_spare: Tensors
    """Name of a parameter -> a tensor like it that nobody computes with."""

    def mrl_serve_arrived(self) -> dict[str, str]:
        """Serve what has arrived; {"refused": why} when it does not fit, and nothing has changed."""
        arrived = self.mrl_arriving.result()
        if not isinstance(arrived, _Filled):
            return self._load(arrived)
        parameters = dict(self.model_runner.get_model().named_parameters())
        for name, fresh in arrived.parameters.items():
            self.mrl_spare[name], parameters[name].data = parameters[name].data, fresh
        self.mrl_places = arrived.places
        return {}

    def _taken(self, folder: Path, digests: dict[str, str]) -> "Tensors | _Filled":
        """Written where they belong, if that is known."""
        places = getattr(self, "mrl_places", {})
        parameters = {name: one.data for name, one in self.model_runner.get_model().named_parameters()}
        living = {_storage(parameter) for parameter in parameters.values()}
        with self.mrl_folders.open(folder) as files:
            fits = places.keys() == files.keys() and all(places[name].suits(file) for name, file in files.items())
            if not fits or not all(place.is_whole(living) for place in places.values()):
                return super()._taken(folder, digests)
            spare = {name: self._spare(name, parameter) for name, parameter in parameters.items()}
            owners = {_storage(parameter): spare[name] for name, parameter in parameters.items()}
            moved = {name: places[name].moved(owners) for name in files}
            found = in_threads(_Place.fill, moved.values(), files.values())
        check(dict(zip(moved, found, strict=True)), digests)
        return _Filled(moved, spare)

    def _spare(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """One that was served before has what no tensor fills, such as rows beyond the vocabulary."""
        spare = getattr(self, "mrl_spare", {}).get(name)
        return like.clone() if spare is None else spare

    def _load(self, tensors: Tensors) -> dict[str, str]:
        model = self.model_runner.get_model()
        parameters = dict(model.named_parameters())
        served = {name: parameter.data for name, parameter in parameters.items()}
        watch = _Watch()
        try:
            for parameter in parameters.values():
                parameter.data = torch.full_like(parameter.data, float("nan"))
            with watch:
                model.load_weights(watch.named(tensors.items()))
            _check_written(parameters)
            watch.check_placed()
            places = watch.settled()
        except Exception as error:  # noqa: BLE001 - whatever a model's own loader raises for what it does not know
            for name, parameter in parameters.items():
                parameter.data = served[name]
            return {"refused": f"{type(error).__name__}: {error}"}
        self.mrl_places, self.mrl_spare = places, {}
        return {}

    def _held(self) -> dict[str, str]:
        """What was rounded to the engine's number format counts as published as long as it is that rounding."""
        places = getattr(self, "mrl_places", {})
        living = {_storage(parameter) for parameter in self.model_runner.get_model().parameters()}
        if not all(place.is_whole(living) for place in places.values()):
            return {}
        return dict(zip(places, in_threads(_Place.held_digest, places.values()), strict=True))


class _Filled:
    """Parameters that are whole, and where in them the tensors are."""

    def __init__(self, places: dict[str, "_Place"], parameters: Tensors) -> None:
        self.places, self.parameters = places, parameters


class _Place:
    """Where the elements of one tensor went: pieces of it, and views of parameters."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._pieces: list[tuple[tuple[Any, ...], torch.Tensor]] = []
        self._rounded, self._published = "", ""

    def add(self, piece: torch.Tensor, target: torch.Tensor) -> None:
        self._pieces.append(((piece.shape, piece.stride(), piece.storage_offset()), target))

    @property
    def is_used(self) -> bool:
        return bool(self._pieces)

    def suits(self, file: InFile) -> bool:
        """Whether the elements of this tensor go where those of the former one went."""
        return list(self._shape) == file.shape

    def is_whole(self, living: set[int]) -> bool:
        """Whether all of it lies in parameters that layers still compute with: `living` storages."""
        held = sum(target.numel() for _, target in self._pieces if _storage(target) in living)
        return held == self._shape.numel()

    def moved(self, owners: dict[int, torch.Tensor]) -> "_Place":
        """The same place in other parameters: storage -> the one for it."""
        place = _Place(torch.empty(self._shape, dtype=self._dtype, device="meta"))
        for geometry, target in self._pieces:
            there = owners[_storage(target)]
            layout = target.shape, target.stride(), target.storage_offset()
            place._pieces.append((geometry, there.as_strided(*layout)))
        return place

    def fill(self, file: InFile) -> str:
        """Read a tensor into its place; returns its digest. Raises ValueError for what is not a number."""
        whole = self._contiguous()
        if whole is None or whole.dtype != file.dtype:
            read = torch.empty(file.shape, dtype=file.dtype)
            its_digest = file.read_into(read)
            for geometry, target in self._pieces:
                target.copy_(read.as_strided(*geometry))
            self.settle(read)
        else:
            read, its_digest = whole, file.read_into(whole)
        if read.numel() and not all(bound.isfinite() for bound in read.aminmax()):  # the quickest look for NaN
            raise ValueError("not a number")
        return its_digest

    def settle(self, tensor: torch.Tensor) -> None:
        """Learn what the engine has to hold of `tensor`, where that is of another type."""
        self._dtype = self._pieces[0][1].dtype
        if self._dtype != tensor.dtype:
            self._rounded, self._published = digest(tensor.to(self._dtype)), digest(tensor)

    def held_digest(self) -> str:
        whole: Any = self._contiguous()
        if whole is None:
            whole = torch.empty(self._shape, dtype=self._dtype)
            for geometry, target in self._pieces:
                whole.as_strided(*geometry).copy_(target)
        held = digest(whole)
        return self._published if held == self._rounded else held

    def _contiguous(self) -> torch.Tensor | None:
        """Where it lies in one piece, as rows of a fused parameter do; None where it was cut."""
        (shape, _, offset), target = self._pieces[0]
        return target if shape == self._shape and offset == 0 and target.is_contiguous() else None


class _Watch(TorchDispatchMode):
    """Sees what a model's own loader copies where, however it fuses and cuts tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, _Place] = {}
        self._names: dict[int, str] = {}
        self._kept: dict[str, torch.Tensor] = {}

    def named(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors, known by their storage from now on; all are kept until the end, so no storage is reused."""
        for name, tensor in tensors:
            self.places[name] = _Place(tensor)
            self._names[_storage(tensor)] = name
            self._kept[name] = tensor
            yield name, tensor

    def check_placed(self) -> None:
        """Raise ValueError for tensors that the model took and used nowhere."""
        unused = [name for name, place in self.places.items() if not place.is_used]
        if unused:
            raise ValueError(f"no place in this model for {', '.join(unused[:5])}")

    def settled(self) -> dict[str, _Place]:
        """Name of each tensor -> its place."""
        for name, tensor in self._kept.items():
            self.places[name].settle(tensor)
        return self.places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, piece = args[:2]
            name = self._names.get(_storage(piece))
            if name is not None:
                self.places[name].add(piece, target)
        return func(*args, **(kwargs or {}))


def _check_written(parameters: dict[str, torch.nn.Parameter]) -> None:
    unwritten = [name for name, parameter in parameters.items() if not parameter.numel() or parameter.isnan().any()]
    if unwritten:
        raise ValueError(f"not written, or not a number: {', '.join(unwritten[:5])}")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
