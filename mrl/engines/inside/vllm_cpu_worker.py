"""What makes vLLM on a CPU take new weights in place; imported by vLLM's worker before it makes the model.

On a CPU vLLM packs the weight of each linear layer for its kernels and empties the parameter, so a later load has
nothing to write into: `reload_weights` answers OK and the packed copies of the old weights are served on. Here nothing
is packed; layers compute with their parameters as they are, and so there is one copy of the weights to be right.

This replaces a private function of vLLM (seen in 0.32) and is for CPU only. If vLLM moves that function, the import
fails and the server does not start; if it no longer calls it, parameters are empty and `mrl_load` refuses.
"""

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from broadcast_member import digest, receive  # type: ignore[import-not-found]
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers import utils as layers
from vllm_adapters import held_adapters  # type: ignore[import-not-found]


def _compute_with_parameters(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


assert callable(layers.dispatch_cpu_unquantized_gemm)
layers.dispatch_cpu_unquantized_gemm = _compute_with_parameters


class WeightsExtension:
    """Methods added to vLLM's worker, called by name through /collective_rpc with strings."""

    model_runner: Any
    mrl_arriving: Future[dict[str, torch.Tensor]]

    def mrl_load(self, folder: str) -> dict[str, str]:
        """Serve the tensors of a Hugging Face folder; {"refused": why} when they do not fit, and nothing has changed.

        They are loaded beside those that are served, and take their place when every element has been written.
        """
        return self._serve(_tensors(Path(folder)))

    def mrl_join(self, seat: str) -> None:
        """Begin to receive a broadcast, beside what is served, while the worker goes on with its steps."""
        self.mrl_arriving = ThreadPoolExecutor(1).submit(receive, json.loads(seat))

    def mrl_arrival(self) -> dict[str, str]:
        """{} when all of it is here, as it was published; else {"awaited": ""}, {"lost": why} or {"refused": why}."""
        if not self.mrl_arriving.done():
            return {"awaited": ""}
        error = self.mrl_arriving.exception()
        if error is None:
            return {}
        return {"lost" if isinstance(error, ConnectionError) else "refused": f"{type(error).__name__}: {error}"}

    def mrl_serve_arrived(self) -> dict[str, str]:
        """As `mrl_load`, of what has arrived."""
        return self._serve(self.mrl_arriving.result().items())

    def _serve(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
        model = self.model_runner.get_model()
        parameters = dict(model.named_parameters())
        served = {name: parameter.data for name, parameter in parameters.items()}
        watch = _Watch()
        try:
            for parameter in parameters.values():
                parameter.data = torch.full_like(parameter.data, float("nan"))
            with watch:
                model.load_weights(watch.named(tensors))
            _check_written(parameters)
            watch.check_placed()
            places = watch.settled()
        except Exception as error:  # noqa: BLE001 - whatever a model's own loader raises for what it does not know
            for name, parameter in parameters.items():
                parameter.data = served[name]
            return {"refused": f"{type(error).__name__}: {error}"}
        self.mrl_places = places
        return {}

    def mrl_adapter_checksums(self, folder: str) -> dict[str, str]:
        """Name -> XXH3-128 of the adapters in `folder` where layers compute with them; else of what they have."""
        return held_adapters(self.model_runner.lora_manager._adapter_manager, Path(folder))

    def mrl_checksums(self) -> dict[str, str]:
        """Name that was published -> XXH3-128 of the bytes of that tensor, read back from what layers compute with.

        What was rounded to the engine's number format counts as what was published as long as it is that rounding.
        Empty before the first load.
        """
        places = getattr(self, "mrl_places", {})
        living = {_storage(parameter) for parameter in self.model_runner.get_model().parameters()}
        if not all(place.is_whole(living) for place in places.values()):
            return {}
        return {name: place.held_digest() for name, place in places.items()}


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

    def is_whole(self, living: set[int]) -> bool:
        """Whether all of it lies in parameters that layers still compute with."""
        held = sum(target.numel() for _, target in self._pieces if _storage(target) in living)
        return held == self._shape.numel()

    def settle(self, tensor: torch.Tensor) -> None:
        """Learn what the engine has to hold of `tensor`, where that is of another type."""
        self._dtype = self._pieces[0][1].dtype
        if self._dtype != tensor.dtype:
            self._rounded, self._published = digest(tensor.to(self._dtype)), digest(tensor)

    def held_digest(self) -> str:
        whole: Any = torch.empty(self._shape, dtype=self._dtype)
        for geometry, target in self._pieces:
            whole.as_strided(*geometry).copy_(target)
        held = digest(whole)
        return self._published if held == self._rounded else held


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


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no *.safetensors")
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                yield name, file.get_tensor(name)


def _check_written(parameters: dict[str, torch.nn.Parameter]) -> None:
    unwritten = [name for name, parameter in parameters.items() if not parameter.numel() or parameter.isnan().any()]
    if unwritten:
        raise ValueError(f"not written, or not a number: {', '.join(unwritten[:5])}")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
