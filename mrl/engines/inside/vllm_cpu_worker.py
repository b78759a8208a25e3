"""Extension of vLLM's worker on a CPU, which takes new weights in place; imported before the worker makes the model.

On a CPU vLLM packs the weight of each linear layer for its kernels and empties the parameter, so a later load has
nothing to write into: `reload_weights` answers OK, and the packed copies of the old weights are served on. vLLM packs
the experts of a mixture within their parameters; a later load writes plain rows over them, with which vLLM computes as
if they were packed. With this module nothing is packed: layers compute with their parameters as they are, so there is
one copy of the weights.

The module replaces private functions of vLLM (seen in 0.32) and is for CPU only. If vLLM moves such a function, the
import fails and the server does not start. If vLLM no longer calls the function of linear layers, parameters are empty
and the first weights are refused. If it no longer calls those of experts, only the canary would show it, so contract
tests check that it does (tests/support/vllm_contract.py).
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
    """Leave the experts' parameters as they are, in place of vLLM's packing."""


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
    """Compute the experts that tokens chose, one after the other, from w1 [E, 2I, H] and w2 [E, H, I] into output
    [T, H]."""
    config = ApplyMoEActivationConfig.from_configs(self.moe_config, self.quant_config)
    summed = torch.zeros_like(output, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        rows, chosen = torch.where(topk_ids == expert)
        biases = [None if bias is None else bias[expert] for bias in (self.w1_bias, self.w2_bias)]
        inner = torch.nn.functional.linear(hidden_states[rows], w1[expert], biases[0])
        active = inner.new_empty(len(inner), w2.shape[2])
        apply_moe_activation(activation, active, inner, activation_config=config)
        outer = torch.nn.functional.linear(active, w2[expert], biases[1]).float()
        # with one expert for each token, vLLM may have applied the router's weight to the input
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

    The first weights go through the model's own loader, which is watched: the places to which it copies elements are
    those for all later weights, too. Later weights are written to these places of spare tensors, beside the steps; the
    spare tensors then replace the served ones.
    """

    mrl_places: dict[str, "_Place"]
    mrl_spare: Tensors
    """Name of a parameter -> a tensor like it, which no layer computes with."""

    def mrl_serve_arrived(self) -> dict[str, str]:
        """Serve the weights that have arrived; {"refused": why} when they do not fit, and nothing has changed."""
        arrived = self.mrl_arriving.result()
        if not isinstance(arrived, _Filled):
            return self._load(arrived)
        parameters = dict(self.model_runner.get_model().named_parameters())
        for name, fresh in arrived.parameters.items():
            self.mrl_spare[name], parameters[name].data = parameters[name].data, fresh
        self.mrl_places = arrived.places
        return {}

    def _taken(self, folder: Path, digests: dict[str, str]) -> "Tensors | _Filled":
        """Read a folder's tensors and check their bytes; into their places in spare parameters, if these are known."""
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
        """Tensor to fill in place of a parameter: one that was served before, or a copy of the parameter. Both have the
        elements that no tensor fills, such as rows beyond the vocabulary."""
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
        except Exception as error:  # noqa: BLE001 - a model's own loader raises anything for tensors it does not know
            for name, parameter in parameters.items():
                parameter.data = served[name]
            return {"refused": f"{type(error).__name__}: {error}"}
        self.mrl_places, self.mrl_spare = places, {}
        return {}

    def _held(self) -> dict[str, str]:
        """Digests of the served tensors. A tensor that is the published one, rounded to the engine's number format, has
        the published digest."""
        places = getattr(self, "mrl_places", {})
        living = {_storage(parameter) for parameter in self.model_runner.get_model().parameters()}
        if not all(place.is_whole(living) for place in places.values()):
            return {}
        return dict(zip(places, in_threads(_Place.held_digest, places.values()), strict=True))


class _Filled:
    """Parameters that are filled with new weights, and the places of the tensors in them."""

    def __init__(self, places: dict[str, "_Place"], parameters: Tensors) -> None:
        self.places, self.parameters = places, parameters


class _Place:
    """The places to which the elements of one tensor were copied: pieces of the tensor, and views of parameters."""

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
        """Whether a tensor of a file has the same shape, so that its elements go to the same places."""
        return list(self._shape) == file.shape

    def is_whole(self, living: set[int]) -> bool:
        """Whether the whole tensor lies in `living` storages, those of parameters that layers still compute with."""
        held = sum(target.numel() for _, target in self._pieces if _storage(target) in living)
        return held == self._shape.numel()

    def moved(self, owners: dict[int, torch.Tensor]) -> "_Place":
        """Return the same places in other parameters; `owners`: storage of a parameter -> the tensor to use instead."""
        place = _Place(torch.empty(self._shape, dtype=self._dtype, device="meta"))
        for geometry, target in self._pieces:
            there = owners[_storage(target)]
            layout = target.shape, target.stride(), target.storage_offset()
            place._pieces.append((geometry, there.as_strided(*layout)))
        return place

    def fill(self, file: InFile) -> str:
        """Read a tensor into its places; return its digest. Raises ValueError for elements that are not finite."""
        whole = self._contiguous()
        if whole is None or whole.dtype != file.dtype:
            read = torch.empty(file.shape, dtype=file.dtype)
            its_digest = file.read_into(read)
            for geometry, target in self._pieces:
                target.copy_(read.as_strided(*geometry))
            self.settle(read)
        else:
            read, its_digest = whole, file.read_into(whole)
        if read.numel() and not all(bound.isfinite() for bound in read.aminmax()):  # the quickest check for NaN
            raise ValueError("the weights contain NaN or infinite values")
        return its_digest

    def settle(self, tensor: torch.Tensor) -> None:
        """Note the digests of `tensor`, as it is and rounded, where the engine's number format is another."""
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
        """View of the whole tensor in a parameter, where it lies in one piece, as rows of a fused parameter do.

        None where it was cut into pieces.
        """
        (shape, _, offset), target = self._pieces[0]
        return target if shape == self._shape and offset == 0 and target.is_contiguous() else None


class _Watch(TorchDispatchMode):
    """Records to which places a model's own loader copies tensors, however it fuses and cuts them."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, _Place] = {}
        self._names: dict[int, str] = {}
        self._kept: dict[str, torch.Tensor] = {}

    def named(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, known by their storage from now on; all are kept, so that no storage is used again."""
        for name, tensor in tensors:
            self.places[name] = _Place(tensor)
            self._names[_storage(tensor)] = name
            self._kept[name] = tensor
            yield name, tensor

    def check_placed(self) -> None:
        """Raise ValueError for tensors that the model took and copied nowhere."""
        unused = [name for name, place in self.places.items() if not place.is_used]
        if unused:
            raise ValueError(f"this model does not use these tensors: {', '.join(unused[:5])}")

    def settled(self) -> dict[str, _Place]:
        """Name of each tensor -> its places, with the digests that it has to have there."""
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
        raise ValueError(f"parameters were not written, or contain NaN: {', '.join(unwritten[:5])}")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
