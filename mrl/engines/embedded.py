"""The embedded engine: transformers in the worker's own process, with continuous batching.

One thread submits and collects. Another may load weights, score and ask for digests meanwhile: it goes in between two
forwards, ahead of the next one.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from mrl.engines.continuous import ContinuousBatch
from mrl.engines.engine import EngineUsage, Finished, GenerationRequest, Sampling, ScoringRequest
from mrl.errors import EngineError, WeightsError
from mrl.models.load import load_policy
from mrl.models.parameters import named_weights
from mrl.models.scoring import score_answers, score_tokens
from mrl.records.version import Version

LESS_MEMORY = "set answers_at_once of the policy's [rollout] table to fewer answers"


class EmbeddedEngine:
    """One model in this process; see `Engine`.

    What is sampled for an answer depends on its seed, and on the answers beside it through rounding alone. The same
    requests handed in in the same order before the first `collect` give the same bits.
    """

    def __init__(self, model_folder: Path, sampling: Sampling, *, device: str, max_running: int) -> None:
        """At most `max_running` answers are sampled at once. Raises ModelFolderError, EngineError."""
        self._model_folder, self._sampling, self._device = model_folder, sampling, device
        self._max_running = max_running
        # Whoever comes between two forwards holds the turn while it waits for the model, which the loop then lacks:
        # a lock alone would go to the loop again and again.
        self._turn, self._in_use = threading.Lock(), threading.Lock()
        self._version: Version | None = None
        self._start()

    @property
    def version(self) -> Version | None:
        """The version that tokens are labelled with from now on; None when there are no weights to serve."""
        return self._version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Hand in requests; never waits. Raises WeightsError when there are no weights to serve."""
        if self._version is None:
            raise WeightsError("the engine has no verified weights to sample from")
        self._batch.submit(requests)

    def collect(self, timeout_s: float) -> list[Finished]:
        """Sample until an answer ends, at least one token and at most `timeout_s`; returns the answers that ended.

        Raises EngineError when the device's memory does not suffice.
        """
        deadline_s = time.monotonic() + timeout_s
        while self._batch.in_flight:
            with self._turn:
                self._in_use.acquire()
            try:
                finished = self._batch.step()
            except torch.OutOfMemoryError as error:
                raise EngineError("out of memory", where=str(self._model_folder), cure=LESS_MEMORY) from error
            finally:
                self._in_use.release()
            if finished or time.monotonic() >= deadline_s:
                return finished
        return []

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests: none of their answers is collected any more."""
        with self._between_forwards():
            self._batch.abort(request_ids)

    def load(self, folder: Path, version: Version) -> None:
        """Serve the weights of a Hugging Face folder as `version`; sampling pauses only while they are swapped in.

        Raises WeightsError, changing nothing, when they cannot be read or do not fit.
        """
        own = named_weights(self._model)
        fresh = _fitting(own, _untied(self._model, _read_weights(folder), folder), folder)
        with self._between_forwards():
            for name, tensor in own.items():
                tensor.data = fresh[name]
            self._serve(version)

    def label(self, version: Version) -> None:
        """The weights that the engine started with are `version`."""
        with self._between_forwards():
            self._serve(version)

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities in nats of every token after the first under the loaded weights, at temperature 1."""
        with self._between_forwards():
            return score_tokens(self._model, token_ids)

    def score_answers(self, request: ScoringRequest) -> list[npt.NDArray[np.float32]]:
        """[T] log-probabilities in nats of the tokens of each answer, at the sampling temperature.

        Raises WeightsError when there are no weights to serve.
        """
        if self._version is None:
            raise WeightsError("the engine has no verified weights to score with")
        with self._between_forwards():
            return score_answers(
                self._model, request.prompt_token_ids, request.answers, temperature=self._sampling.temperature
            )

    def checksums(self) -> dict[str, str]:
        """Name -> XXH3-128 of the bytes of every tensor; loaded tensors are never written to, so sampling goes on."""
        return {name: _digest(tensor) for name, tensor in named_weights(self._model).items()}

    def usage(self) -> EngineUsage:
        """How full it is; the share of the cache is that of its rows."""
        running = self._batch.running
        share = running / self._max_running
        return EngineUsage(running, self._batch.waiting, share, self._batch.generated_tokens)

    def restart(self) -> None:
        """Start anew with the weights of the model folder, serving none. Raises ModelFolderError, EngineError."""
        with self._between_forwards():
            self._version = None
            self._start()

    def close(self) -> None:
        """Forget everything that was handed in and free the cache."""
        with self._between_forwards():
            self._version = None
            self._batch = self._new_batch()

    def _start(self) -> None:
        self._model: PreTrainedModel = load_policy(self._model_folder, self._device)
        self._batch = self._new_batch()

    def _new_batch(self) -> ContinuousBatch:
        return ContinuousBatch(self._model, self._sampling, max_running=self._max_running)

    def _serve(self, version: Version) -> None:
        self._batch.relabel(version)
        self._version = version

    @contextmanager
    def _between_forwards(self) -> Iterator[None]:
        with self._turn, self._in_use:
            yield


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder's safetensors files. Raises WeightsError."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder}: no *.safetensors to load")
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{file}: weights cannot be read: {error}") from error
    return found


def _untied(model: PreTrainedModel, found: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """`found` with every tied tensor once, under the name that the model lists it by. Raises WeightsError."""
    listed = {tensor.data_ptr(): name for name, tensor in named_weights(model).items()}
    names = {name: listed[tensor.data_ptr()] for name, tensor in model.state_dict().items() if name in found}
    untied = {names.get(name, name): tensor for name, tensor in found.items()}
    for name, tensor in found.items():
        if not torch.equal(tensor, untied[names.get(name, name)]):
            raise WeightsError(f"{folder}: {name} and {names[name]} differ, and the model ties them")
    return untied


def _fitting(own: dict[str, Tensor], found: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Copies of `found` that can take the place of `own`. Raises WeightsError unless names and shapes are the same."""
    if own.keys() != found.keys():
        raise WeightsError(f"{folder}: weights do not fit: differing names {sorted(own.keys() ^ found.keys())[:5]}")
    for name, tensor in own.items():
        if tensor.shape != found[name].shape:
            shapes = f"{tuple(found[name].shape)}, wanted {tuple(tensor.shape)}"
            raise WeightsError(f"{folder}: weights do not fit: {name} is {shapes}")
    # Tensors of a safetensors file may be the file's own pages, which somebody could still write to.
    return {name: found[name].to(tensor.device, tensor.dtype, copy=True) for name, tensor in own.items()}


def _digest(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(raw.numpy().data)
