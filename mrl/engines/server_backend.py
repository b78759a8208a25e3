"""Contract of one kind of inference server: how it is started, and what its routes take and give."""

import base64
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from mrl.engines.engine import EngineUsage, Sampling, TokenScore
from mrl.engines.http import Http, HttpFailure
from mrl.errors import PeerLost
from mrl.models.tensor_broadcast import BroadcastRanks, IncomingTensors
from mrl.records.chosen_experts import Experts, narrow
from mrl.records.finish import FinishReason

PROBED_TEMPERATURES = (1.0, 0.5)
"""Temperatures at which `hides_temperature` compares log-probabilities."""


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Size of the adapters for which a server has to make room."""

    rank: int
    layers: tuple[str, ...]
    """Last parts of the names of the linear layers that have an adapter."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Settings with which a server is started."""

    python: Path
    """Interpreter of the engine's own environment."""
    model_folder: Path
    """Hugging Face folder: configuration, tokenizer files, weights to start with."""
    host: str
    port: int
    """TCP port, for a server that listens at one."""
    device: str
    """"cpu" or "cuda"."""
    dtype: str
    """Name of a torch dtype, "float32" or "bfloat16"."""
    threads: int
    """CPU threads of the server's kernels."""
    max_running: int
    """Answers that the server samples at once, at most."""
    max_context_tokens: int
    """Tokens of prompt and answer together, at most."""
    seed: int
    options: tuple[str, ...] = ()
    """Further command-line words, passed on unchanged."""
    adapters: AdapterShape | None = None
    """Size of the adapters that the server will be given; None where it is given whole weights."""
    gpus: int = 1
    """GPUs over which the server splits the model; they are all the GPUs that its environment shows."""
    may_sleep: bool = False
    """Whether the server has to be able to free a GPU's memory and take it again."""
    private: Path | None = None
    """Folder of this user alone, for the server's socket file, or the file with its key."""
    key: str = field(default="", repr=False)
    """Key that callers have to show, where the server listens at a port."""
    tells_experts: bool = False
    """Whether the server has to be able to say which experts tokens went to."""
    scores: bool = False
    """Whether peers ask the server for log-probabilities of whole texts."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one answer, sampled by one call under one version."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    """ABORT when the server gave the answer up before its end; the tokens sampled by then are here."""
    labels: tuple[str, ...] = ()
    """The distinct weight versions that the server itself reports for these tokens; empty where it reports none."""
    experts: Experts | None = None
    """[R, X] experts of all places from `experts_from` to the place that predicts the last token; in a stream they come
    with the last part. None where the call did not ask for them, or no token was sampled."""


class Paused(HttpFailure):
    """The server refuses requests until it is told to resume; nothing of the refused request has been computed."""


class HalfUpdated(PeerLost):
    """An update of weights failed half-way: the server holds no whole version until it loads one."""


class ServerBackend(Protocol):
    """One kind of server. Every coroutine raises HttpFailure, which the caller turns into EngineLost.

    The caller bounds the time of calls that last longer for larger models. `label` is the text of a Version, or ""
    while the server has the weights that it started with.
    """

    name: str
    has_port: bool
    """Whether a server of this kind, started here, listens at a TCP port, to which every user of the host can connect;
    otherwise it listens on a socket file."""
    less_memory: str
    """Settings that a person changes when a server of this kind lacks memory, in words."""

    def command(self, launch: Launch) -> list[str]:
        """Command line of a server in the foreground."""

    def environment(self, launch: Launch) -> dict[str, str]:
        """Environment variables of the server, beside those of this process."""

    def reach(self, launch: Launch) -> Http:
        """Client of the server that was started by `launch`. Call it inside a running event loop."""

    async def ready(self, http: Http) -> bool:
        """Whether the server takes requests; False while it still loads, or does not answer yet."""

    async def alive(self, http: Http) -> bool:
        """Whether the server's parts answer; called about once a second with a short limit."""

    async def probe(self, http: Http) -> None:
        """Look at the server's routes and features. Raises EngineError naming the first that it lacks."""

    async def generate(
        self,
        http: Http,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        seed: int,
        request_id: str,
        experts_from: int = 0,
    ) -> Segment:
        """Sample the tokens that follow `token_ids`, up to and with an EOS, up to the limit, or until aborted.

        `experts_from` is the first place whose experts are told, where `sampling` tells any.

        The server gives the answer up when the call is cancelled, which closes its connection. Raises Paused.
        """

    def stream(
        self,
        http: Http,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        seed: int,
        request_id: str,
        experts_from: int = 0,
    ) -> AsyncGenerator[Segment, None]:
        """Sample the same answer as `generate`, in parts as it is sampled; all parts but the last end by ABORT.

        `labels` may come with the last part alone. A caller that wants no more closes the generator, which closes the
        connection.
        """

    async def abort_all(self, http: Http) -> None:
        """Give up all calls, which return the tokens that they have; nothing new is begun until `resume`."""

    async def prepare_load(self, http: Http, folder: Path, digests: Mapping[str, str]) -> None:
        """Check the weights of a folder, and load as much of them as the server can while it samples on.

        Raises WeightsError when the weights are not what was published, or the server says that they do not fit.
        """

    async def load(self, http: Http, folder: Path, label: str) -> None:
        """Serve the weights of this Hugging Face folder, called `label`, and forget every cached prefix.

        Called between `abort_all` and `resume`. Raises WeightsError when the server says that the weights do not fit.
        """

    async def load_adapters(self, http: Http, folder: Path, label: str) -> None:
        """Serve adapters in peft's format, on the weights that the server started with; else as `load`.

        Raises EngineError where the server cannot.
        """

    async def broadcast_seats(self, http: Http) -> BroadcastRanks:
        """Ranks of a broadcast that the server and this process take. Raises EngineError where there are none."""

    async def prepare_broadcast(self, http: Http, incoming: IncomingTensors) -> None:
        """Take as much of a broadcast as the server can while it samples on. Raises PeerLost, WeightsError."""

    async def receive(self, http: Http, incoming: IncomingTensors, label: str) -> None:
        """Take the rest of a broadcast, and serve its weights; else as `load`.

        Raises PeerLost when the old weights are unchanged, HalfUpdated when some of them have changed.
        """

    async def resume(self, http: Http) -> None:
        """Let the server take requests again."""

    async def score(
        self, http: Http, token_ids: Sequence[int], temperature: float, num_likeliest: int
    ) -> list[TokenScore] | None:
        """Score every token after the first, beside the `num_likeliest` likeliest in its place; None when aborted.

        Raises Paused, and EngineError for a temperature that the server does not score at.
        """

    async def checksums(self, http: Http) -> dict[str, str] | None:
        """Name -> `xxhash.xxh3_128_hexdigest` of the bytes of each served tensor; None where the server cannot tell."""

    async def usage(self, http: Http) -> EngineUsage:
        """Return how full the server is, from its own metrics."""

    async def sleep(self, http: Http) -> None:
        """Free the accelerator's memory; weights have to be loaded anew after `wake`."""

    async def wake(self, http: Http) -> None:
        """Take the accelerator's memory again."""


def hides_temperature(leads_nats: Sequence[float]) -> bool:
    """Whether a server reports log-probabilities from before the temperature is applied.

    `leads_nats` is the difference between the two largest log-probabilities at each of `PROBED_TEMPERATURES`. A
    difference of 0 proves nothing. The largest alone would not do: a model that is sure has it at 0 at both.
    """
    at_one, at_half = leads_nats
    return at_one == at_half != 0.0


def read_experts(told: Any, num_rows: int, read: Callable[[bytes], npt.NDArray[Any]]) -> Experts | None:
    """[R, X] experts from base64 that a server told; `read` turns its bytes into an array [R, ...] of ids.

    None where the server told nothing, or something else than `num_rows` rows of ids that 16 bits hold.
    """
    try:
        ids = read(base64.b64decode(told))
        if ids.dtype.kind not in "iu" or len(ids) != num_rows or ids.min() < 0 or ids.max() >= 1 << 16:
            return None
        return narrow(ids.reshape(num_rows, -1))
    except (TypeError, ValueError):
        return None
