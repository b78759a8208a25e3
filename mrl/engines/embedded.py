"""The embedded engine: transformers in the worker's own process, with continuous batching.

One thread submits and collects. Another thread may load weights, score with them and ask for digests meanwhile: it
reads weights beside sampling, and exchanges them between two forwards, before the sampling thread begins the next one.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mrl.engines.attached_adapters import AttachedAdapters
from mrl.engines.continuous import ContinuousBatch
from mrl.engines.engine import (
    EngineUsage,
    FinishedAnswer,
    GenerationRequest,
    PartialAnswer,
    Sampling,
    ScoredAnswer,
    ScoringRequest,
    TokenScore,
)
from mrl.errors import WeightsError
from mrl.models.device_memory import PLAN, OffDevice, enough_memory
from mrl.models.load_policy import load_policy
from mrl.models.memory_file import read_shared, shared_tensors
from mrl.models.parameters import named_weights, parts_of, released
from mrl.models.routing.router_record import RouterRecord
from mrl.models.scoring import score_answers, score_beside_likeliest, score_tokens, writes_in_forwards
from mrl.models.tensor_broadcast import BroadcastRanks, IncomingTensors, gpu_id, nccl_version, numbered, receive_tensors
from mrl.models.tensor_file import Place, digests, read_folder
from mrl.records.version import Version

FEWER_ANSWERS = f"lower rollout.answers_at_once of this policy; {PLAN}"
ELSEWHERE = f"use a smaller model, another device, or fewer processes on this device; {PLAN}"


log = structlog.get_logger()


class EmbeddedEngine:
    """One model in this process; see `Engine`.

    The tokens of an answer depend on its seed, and on the answers beside it through rounding alone. The same requests,
    handed in in the same order before the first `collect`, give the same bits.
    """

    def __init__(
        self, model_folder: Path, sampling: Sampling, *, device: str, max_running: int, dtype: str = "float32"
    ) -> None:
        """At most `max_running` answers are sampled at once. Raises ModelFolderError, DeviceError."""
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._model_folder, self._sampling, self._device = model_folder, sampling, device
        self._max_running = max_running
        # A thread that comes between two forwards holds `_turn` while it waits for `_in_use`, so that the sampling
        # loop has to wait for it. With one lock alone the loop would get the lock again and again.
        self._turn, self._in_use = threading.Lock(), threading.Lock()
        self._is_nudged = threading.Event()
        self._version: Version | None = None
        self.paused_s = 0.0
        """Seconds for which no forward could run because of the last load."""
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

    def collect(self, timeout_s: float) -> list[FinishedAnswer]:
        """Sample until an answer ends, at least one token and at most `timeout_s`; return the answers that ended.

        A `nudge`, or an answer that streams, ends the call after the token that is being sampled. Raises DeviceError
        when memory does not suffice.
        """
        deadline_s = time.monotonic() + timeout_s
        while self._batch.in_flight:
            with self._turn:
                self._in_use.acquire()
            try:
                with self._enough_memory("while sampling", FEWER_ANSWERS):
                    finished = self._batch.step()
            finally:
                self._in_use.release()
            is_told = self._is_nudged.is_set() or self._batch.streams
            if finished or is_told or time.monotonic() >= deadline_s:
                self._is_nudged.clear()
                return finished
        return []

    def grown(self) -> list[PartialAnswer]:
        """See Engine."""
        with self._between_forwards():
            return self._batch.grown()

    def nudge(self) -> None:
        """See Engine."""
        self._is_nudged.set()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests: none of their answers is collected any more."""
        with self._between_forwards():
            self._batch.abort(request_ids)

    def load(self, folder: Path, version: Version, digests: Mapping[str, str] | None = None) -> None:
        """Serve the weights of a Hugging Face folder as `version`; sampling pauses only while they are swapped in.

        Weights are read into the tensors that were served before the present ones: writing into memory that is there
        already is several times faster than into new memory. So the device holds the weights twice from the second
        load on. Weights come from the learner's GPU if they lie there and this process may see them, else from files.
        Raises WeightsError when they cannot be read, do not fit or have other `digests`, and DeviceError when there is
        no memory for them beside the old weights. The old weights are served on then.
        """
        device = numbered(self._device)
        if shared := shared_tensors(folder):
            try:
                reads = partial(read_shared, shared, wanted=digests or {}, device=device)
                self._take_over(str(folder), version, reads, arrive_on=device.type)
                return
            except OSError as error:
                log.warning("weights are read from files, not from the learner's GPU", reason=str(error))
        self._take_over(str(folder), version, lambda place: read_folder(folder, place, digests))

    def load_adapters(self, folder: Path, version: Version, digests: Mapping[str, str] | None = None) -> None:
        """Serve adapters beside the weights of the model folder; else as `load`."""
        with self._enough_memory("while reading adapters", ELSEWHERE):
            adapters = self._adapters.read(folder, digests)
        with self._between_forwards():
            began_s = time.monotonic()
            self._adapters.attach(adapters)
            self._serve(version)
            self.paused_s = time.monotonic() - began_s

    def broadcast_seats(self) -> BroadcastRanks:
        """Seats in a broadcast: one, for this process."""
        device = numbered(self._device)
        return BroadcastRanks(1, gpu_id(device), nccl_version(device))

    def receive(self, incoming: IncomingTensors, version: Version) -> None:
        """Serve weights that come by a broadcast; else as `load`. Raises PeerLost when its members do not meet, or it
        comes apart."""
        device = numbered(self._device)
        self._take_over(incoming.meeting.name, version, lambda place: receive_tensors(incoming, place, device=device))

    def _take_over(
        self, where: str, version: Version, read: Callable[[Place], dict[str, str]], *, arrive_on: str = "cpu"
    ) -> None:
        own = named_weights(self._model)
        with self._enough_memory("while reading new weights beside the old ones", ELSEWHERE):
            fresh = {
                name: self._spare[name] if name in self._spare else torch.empty_like(tensor)
                for name, tensor in own.items()
            }
            reading = _Reading(where, self._model, fresh, arrive_on)
            reading.take(read)
        with self._between_forwards():
            began_s = time.monotonic()
            for name, tensor in own.items():
                self._spare[name], tensor.data = tensor.data, fresh[name]
            self._adapters.detach()
            self._is_rounded = reading.is_rounded
            self._serve(version)
            self.paused_s = time.monotonic() - began_s

    def label(self, version: Version) -> None:
        """Declare that the weights which the engine started with are `version`."""
        with self._between_forwards():
            self._serve(version)

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities in nats of every token after the first under the loaded weights, at temperature 1.

        Sampling goes on meanwhile, unless forwards change the model. Call it from the thread that loads weights.
        """
        apart = self._between_forwards() if writes_in_forwards(self._model) else nullcontext()
        with apart, self._enough_memory("while scoring", FEWER_ANSWERS):
            return score_tokens(self._model, token_ids)

    def score_answers(self, request: ScoringRequest) -> list[ScoredAnswer]:
        """Score the tokens of each answer of a request. Raises WeightsError when there are no weights to serve."""
        if self._version is None:
            raise WeightsError("the engine has no verified weights to score with")
        with self._between_forwards(), self._enough_memory("while scoring", FEWER_ANSWERS):
            found = score_answers(
                self._model,
                request.prompt_token_ids,
                request.answers,
                temperature=self._sampling.temperature,
                num_likeliest=request.num_likeliest,
            )
        return [ScoredAnswer(*one) for one in found]

    def score_given(self, token_ids: Sequence[int]) -> list[TokenScore]:
        """Score all tokens after the first at temperature 1. Raises WeightsError when there are no weights to serve."""
        if self._version is None:
            raise WeightsError("the engine has no verified weights to score with")
        with self._between_forwards(), self._enough_memory("while scoring", FEWER_ANSWERS):
            found = score_beside_likeliest(self._model, token_ids)
        return [TokenScore(logprob, [(token_id, best)]) for logprob, token_id, best in found]

    def checksums(self) -> dict[str, str]:
        """Name, as in the published folder -> XXH3-128 of the bytes of the tensor.

        Empty where tensors were rounded to the engine's number format. Sampling goes on meanwhile, since only the
        calling thread changes weights.
        """
        if attached := self._adapters.checksums():
            return attached
        if self._is_rounded:
            return {}
        return digests(dict(released(self._model, named_weights(self._model).items())))

    def usage(self) -> EngineUsage:
        """Return how full the engine is; every answer that it samples has a row of the cache to its end."""
        batch = self._batch
        read = batch.prompt_tokens, batch.reused_prompt_tokens
        return EngineUsage(batch.running, batch.waiting, 0.0, batch.generated_tokens, *read)

    def sleep(self) -> None:
        """Free the cache and all tensors beside the weights; the weights stay, in main memory, to be written over."""
        self.close()
        with self._between_forwards():
            self._spare.clear()
            self._adapters.detach()
            torch.nn.Module.to(self._model, "cpu")
            if self._device != "cpu":
                torch.cuda.empty_cache()

    def wake(self) -> None:
        """Take the device's memory again."""
        with self._between_forwards():
            torch.nn.Module.to(self._model, self._device)
            self._batch = self._new_batch()

    def pause(self) -> None:
        """Move all tensors from the device to main memory until `resume`, those of answers in flight, too.

        Only methods that read counters may be called meanwhile. On a CPU all tensors stay where they are: the last
        bits of products depend on how weights are aligned in memory.
        """
        with self._between_forwards():
            if self._device != "cpu":
                self._spare.clear()
                self._off_device.leave(self.held())

    def held(self) -> list[Tensor]:
        """Tensors on the device between two forwards, without those kept to be written over by the next load."""
        own = [*self._model.parameters(), *self._model.buffers()]
        return [*own, *self._adapters.tensors(), *self._batch.tensors()]

    def resume(self) -> None:
        """Move the tensors back to the device and go on, with the same bits. Raises DeviceError."""
        with self._between_forwards(), self._enough_memory("while moving the engine back to the device", ELSEWHERE):
            self._off_device.come_back()

    def restart(self) -> None:
        """Start anew with the weights of the model folder, serving none. Raises ModelFolderError, DeviceError."""
        with self._between_forwards():
            self._version = None
            self._adapters.detach()
            self._spare.clear()
            self._model.to("meta")  # type: ignore[arg-type]  # no second set of weights while the first is still there
            self._start()

    def close(self) -> None:
        """Forget everything that was handed in and free the cache."""
        with self._between_forwards():
            self._version = None
            self._batch = self._new_batch()

    def _start(self) -> None:
        self._model: PreTrainedModel = load_policy(self._model_folder, self._device, dtype=self._dtype)
        self._adapters = AttachedAdapters(self._model, self._model_folder)
        self._record = RouterRecord(self._model) if self._sampling.tells_experts else None
        self._is_rounded = False
        """Whether weights were rounded, as the engine's number format differs from theirs."""
        self._spare: dict[str, Tensor] = {}
        """Tensors that were served before the last load, to be written over by the next load."""
        self._off_device = OffDevice()
        self._batch = self._new_batch()

    def _new_batch(self) -> ContinuousBatch:
        with self._enough_memory("while allocating the key-value cache", FEWER_ANSWERS):
            return ContinuousBatch(self._model, self._sampling, max_running=self._max_running, record=self._record)

    def _serve(self, version: Version) -> None:
        self._batch.relabel(version)
        self._version = version

    def _enough_memory(self, during: str, cure: str) -> AbstractContextManager[None]:
        return enough_memory(during, where=str(self._model_folder), cure=cure)

    @contextmanager
    def _between_forwards(self) -> Iterator[None]:
        with self._turn, self._in_use:
            yield


class _Reading:
    """Reading of new weights into `fresh`, tensors like those of a model."""

    def __init__(self, where: str, model: PreTrainedModel, fresh: dict[str, Tensor], arrive_on: str) -> None:
        """`arrive_on` is the type of the device in whose memory the new weights arrive."""
        listed = {tensor.data_ptr(): name for name, tensor in named_weights(model).items()}
        self._own_names: dict[str, str] = {}
        """Name of a tensor in a folder -> the name of the tensor that it is tied to, or the same name."""
        for name, tensor in model.state_dict().items():
            tied = parts_of(model, listed[tensor.data_ptr()], tensor)
            self._own_names |= {a.name: b.name for a, b in zip(parts_of(model, name, tensor), tied, strict=True)}
        self._where, self._fresh = where, dict(released(model, fresh.items()))
        self._staged: dict[str, Tensor] = {}
        self._arrive_on = arrive_on
        self.is_rounded = False

    def take(self, read: Callable[[Place], dict[str, str]]) -> None:
        """Read all weights by `read`, which writes tensors into their places and returns name -> digest.

        Raises what `read` raises, and WeightsError unless it has all tensors of the model, in the model's shapes.
        """
        found = read(self._place)
        if missing := self._fresh.keys() - {self._own_names[name] for name in found}:
            raise self._misfit(f"missing tensors {sorted(missing)[:5]}")
        for name, its_digest in found.items():
            if found.get(self._own_names[name], its_digest) != its_digest:
                raise self._misfit(f"{name} and {self._own_names[name]} are tied in the model, but their values differ")
        for name, tensor in self._staged.items():
            self._fresh[self._own_names[name]].copy_(tensor)

    def _place(self, name: str, dtype: torch.dtype, shape: list[int]) -> Tensor:
        """Tensor to write into: that of `fresh` if device, type and layout fit, else one that is copied there later."""
        if name not in self._own_names:
            raise self._misfit(f"unknown tensor {name}")
        tensor = self._fresh[self._own_names[name]]
        if list(tensor.shape) != shape:
            raise self._misfit(f"{name} has shape {tuple(shape)}, wanted {tuple(tensor.shape)}")
        if tensor.device.type == self._arrive_on and tensor.dtype == dtype and tensor.is_contiguous():
            return tensor
        self.is_rounded |= tensor.dtype != dtype
        self._staged[name] = torch.empty(shape, dtype=dtype, device=self._arrive_on)
        return self._staged[name]

    def _misfit(self, why: str) -> WeightsError:
        return WeightsError(f"{self._where}: weights do not fit the model: {why}")
