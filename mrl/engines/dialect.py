"""What one kind of inference server has to say for itself: how it is started, and what its routes take and give."""

import base64
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from mrl.engines.engine import EngineUsage, Sampling, TokenScore
from mrl.engines.http import Http, HttpFailure
from mrl.errors import PeerLost
from mrl.models.tensor_broadcast import IncomingTensors, Seats
from mrl.records.chosen_experts import Experts, narrow
from mrl.records.finish import FinishReason

PROBED_TEMPERATURES = (1.0, 0.5)


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """What a server has to make room for."""

    rank: int
    layers: tuple[str, ...]
    """Last names of the linear layers that have one."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a server is started with."""

    python: Path
    """Interpreter of the engine's own environment."""
    model_folder: Path
    """Hugging Face folder: configuration, tokenizer files, weights to start with."""
    host: str
    port: int
    """Of a server that listens at one."""
    device: str
    """"cpu" or "cuda"."""
    dtype: str
    """Name of a torch dtype, "float32" or "bfloat16"."""
    threads: int
    """CPU threads of its kernels."""
    max_running: int
    """Answers that it samples at once at most."""
    max_context_tokens: int
    """Prompt and answer together, at most."""
    seed: int
    options: tuple[str, ...] = ()
    """Further command-line words, passed on unchanged."""
    adapters: AdapterShape | None = None
    """Of those that it will be given; None where it is given whole weights."""
    gpus: int = 1
    """GPUs over which it shares out the model; they are all that its environment shows."""
    may_sleep: bool = False
    """Whether it has to be able to free a GPU's memory and take it again."""
    private: Path | None = None
    """A folder of this user alone: for its socket file, or the file with its key."""
    key: str = field(default="", repr=False)
    """What its callers have to know, where it listens at a port."""
    tells_experts: bool = False
    """Whether it has to be able to say which experts tokens went to."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one answer, sampled by one call under one version."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    """ABORT when the server gave it up before its end; what it had sampled is here."""
    labels: tuple[str, ...] = ()
    """The distinct weight versions that the server itself reports for these tokens; empty where it reports none."""
    experts: Experts | None = None
    """[R, X] of all places from the one that was asked for to that which predicts the last token; of a stream with
    its last part. None where nobody asked, and where nothing was sampled."""


class Paused(HttpFailure):
    """The server refuses what comes until it is told to go on; nothing of the request has been computed."""


class HalfUpdated(PeerLost):
    """An update failed half-way: the server holds weights of no version until it loads one."""


class Dialect(Protocol):
    """One kind of server. Every coroutine raises HttpFailure, which the caller turns into EngineLost.

    The caller bounds what lasts as long as the model is large. `label` is the text of a Version, or "" while the server
    has the weights that it started with.
    """

    name: str
    has_port: bool
    """Whether a server of its kind that is started here listens at a TCP port, where every user of the host may knock;
    otherwise on a socket file."""
    less_memory: str
    """What a person changes when a server of its kind lacks memory."""

    def command(self, launch: Launch) -> list[str]:
        """The command line of a server in the foreground."""

    def environment(self, launch: Launch) -> dict[str, str]:
        """Variables beside those of this process."""

    def reach(self, launch: Launch) -> Http:
        """The way to a server that was started so. Inside a running event loop."""

    async def ready(self, http: Http) -> bool:
        """Whether it takes requests; False while it still loads or nothing answers yet."""

    async def alive(self, http: Http) -> bool:
        """Whether its parts answer; asked about once a second with a short limit."""

    async def probe(self, http: Http) -> None:
        """Raises EngineError naming the first route or feature that this server lacks."""

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
        """Sample behind `token_ids`; ends at an EOS (its last token then), at the limit, or when it is aborted.

        `experts_from` is the place from which on experts are told, where `sampling` tells any.

        The server gives it up when the call is cancelled, which closes its connection. Raises Paused.
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
        """The same answer as that of `generate`, in parts as it is sampled; all but the last end by ABORT.

        `labels` may come with the last one alone. Whoever wants no more closes it, which closes its connection.
        """

    async def abort_all(self, http: Http) -> None:
        """Give up everything that runs; nothing new is begun until `resume`. The calls return what they have."""

    async def prepare_load(self, http: Http, folder: Path, digests: Mapping[str, str]) -> None:
        """Check the weights of a folder, and load as much of them as the server can while it samples on.

        Raises WeightsError when they are not what was published, or the server says that they do not fit.
        """

    async def load(self, http: Http, folder: Path, label: str) -> None:
        """Serve the weights of this Hugging Face folder, called `label`, and forget every cached prefix.

        Called between `abort_all` and `resume`. Raises WeightsError when the server says that they do not fit.
        """

    async def load_adapters(self, http: Http, folder: Path, label: str) -> None:
        """As `load`, of adapters in peft's format above the weights that the server started with.

        Raises EngineError where it cannot.
        """

    async def broadcast_seats(self, http: Http) -> Seats:
        """The ranks of a broadcast that the server and this process take. Raises EngineError where there are none."""

    async def prepare_broadcast(self, http: Http, incoming: IncomingTensors) -> None:
        """As much of a broadcast as the server can take while it samples on. Raises PeerLost, WeightsError."""

    async def receive(self, http: Http, incoming: IncomingTensors, label: str) -> None:
        """As `load`, the rest of it. Raises PeerLost when nothing has changed, HalfUpdated when something has."""

    async def resume(self, http: Http) -> None:
        """Take requests again."""

    async def score(
        self, http: Http, token_ids: Sequence[int], temperature: float, num_likeliest: int
    ) -> list[TokenScore] | None:
        """Every token after the first, each beside so many of the likeliest; None when it was aborted.

        Raises Paused, and EngineError for a temperature that the server does not score at.
        """

    async def checksums(self, http: Http) -> dict[str, str] | None:
        """Name -> `xxhash.xxh3_128_hexdigest` of the bytes of each tensor that it serves; None where it cannot tell."""

    async def usage(self, http: Http) -> EngineUsage:
        """From its own metrics."""

    async def sleep(self, http: Http) -> None:
        """Free the accelerator's memory; weights have to be loaded anew after `wake`."""

    async def wake(self, http: Http) -> None:
        """Take the memory back."""


def hides_temperature(leads_nats: Sequence[float]) -> bool:
    """Whether a server reports log-probabilities from before the temperature is applied.

    `leads_nats`: by how much the likeliest token leads at each of `PROBED_TEMPERATURES`. Two that are equally likely
    prove nothing, and of a model that is sure the first's own log-probability is 0 at both.
    """
    at_one, at_half = leads_nats
    return at_one == at_half != 0.0


def read_experts(told: Any, num_rows: int, read: Callable[[bytes], npt.NDArray[Any]]) -> Experts | None:
    """[R, X] of what a server told in base64, whose bytes `read` makes [R, ...].

    None where it told nothing, or anything but the ids of so many rows, as 16 bits hold them.
    """
    try:
        ids = read(base64.b64decode(told))
        if ids.dtype.kind not in "iu" or len(ids) != num_rows or ids.min() < 0 or ids.max() >= 1 << 16:
            return None
        return narrow(ids.reshape(num_rows, -1))
    except (TypeError, ValueError):
        return None
