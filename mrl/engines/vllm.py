"""vLLM as a server (routes of 0.32 and 0.33): token ids in, token ids and log-probabilities out, weights from a folder.

Seen on vLLM 0.32 for CPU. Requests that are aborted, also by `/pause?mode=abort`, return the tokens that they have
sampled, with finish reason "abort". While paused, 0.32 lets new requests wait, and 0.33 refuses them with status 503.
An EOS that is given as a stop token is the last of `token_ids`.
`/health` answers for the HTTP process alone; `/is_paused` asks the process that samples.
vLLM's workers have an extension of mrl (`inside/`), which reads and checks new weights beside their steps. That for
GPUs gives the weights to vLLM's own reload; it was written from the sources of 0.33, as sleeping was, and has run on
CPUs alone. A broadcast reaches vLLM on a CPU only: vLLM's own transfers need NCCL as vLLM sets it up, and vLLM on the
learner's side. Adapters come by vLLM's own routes; requests name the adapters that they want. Only vLLM's second model
runner tells the experts of tokens; it needs Triton, so it runs on no CPU, and the code for it here was written from the
sources.
"""

import asyncio
import io
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mrl.engines import vllm_launch
from mrl.engines.engine import EngineUsage, Sampling, TokenScore
from mrl.engines.http import Http, HttpFailure
from mrl.engines.metrics_text import metrics_of
from mrl.engines.server_backend import PROBED_TEMPERATURES, Launch, Segment, hides_temperature, read_experts
from mrl.engines.tensor_folder import check_same_tensors, digests_held
from mrl.engines.vllm_calls import (
    ANSWER_S,
    GENERATE,
    answers,
    ask,
    ask_parts,
    call_workers,
    check_taken,
    count_workers,
    has_extension,
    lead_nats,
    seat_of,
)
from mrl.errors import EngineError, PeerLost
from mrl.models.tensor_broadcast import BroadcastRanks, IncomingTensors
from mrl.models.tensor_file import read_folder
from mrl.records.finish import FinishReason

FIRST_WEIGHTS = "default"
ARRIVAL_POLL_S = 0.01
AWAITED = {"awaited": ""}
ADAPTER_ROUTES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
BELOW = ".base_layer."
"""Part of the names of weights that have an adapter."""
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
PART_REASONS: dict[Any, FinishReason] = {None: FinishReason.ABORT, **REASONS}


class VLLM:
    """See ServerBackend."""

    name = "vllm"
    has_port = False
    less_memory = (
        "use a smaller model, lower server.context_tokens, or change the size of the cache: on a CPU "
        "VLLM_CPU_KVCACHE_SPACE in the environment (GiB, default 1), on a GPU "
        'the share in server.options, such as ["--gpu-memory-utilization", "0.8"]'
    )

    def __init__(self) -> None:
        """The server's routes and features are known after `probe`."""
        self._routes: frozenset[str] = frozenset()
        self._swaps_tensors = False
        self._num_workers = self._num_copies = 1
        self._launch: Launch | None = None
        self._folder: Path | None = None
        self._prepared: Path | None = None
        """Folder whose weights the workers hold beside the served ones."""
        self._adapters: tuple[str, Path] | None = None
        """Name and folder of the adapters that are served."""
        self._num_loads = 0
        """Number of loads of adapters."""
        self._below: dict[str, str] | None = None
        """Digests of the weights below the adapters; while the server lives, only a load changes these weights."""

    def command(self, launch: Launch) -> list[str]:
        """See ServerBackend. Raises EngineError for a model that vLLM does not serve on this device."""
        self._launch, self._folder, self._adapters = launch, launch.model_folder, None
        self._prepared = self._below = None
        return vllm_launch.command(launch)

    def environment(self, launch: Launch) -> dict[str, str]:
        """See ServerBackend."""
        return vllm_launch.environment(launch)

    def reach(self, launch: Launch) -> Http:
        """See ServerBackend."""
        if launch.private is None:
            return Http(f"http://{launch.host}:{launch.port}")
        return Http(f"http://{launch.host}", socket_file=launch.private / vllm_launch.SOCKET)

    async def ready(self, http: Http) -> bool:
        """See ServerBackend."""
        return await answers(http, "/health")

    async def alive(self, http: Http) -> bool:
        """See ServerBackend."""
        return await answers(http, "/is_paused" if "/is_paused" in self._routes else "/health")

    async def probe(self, http: Http) -> None:
        """See ServerBackend. Somebody else's server may lack control routes: methods that need them raise
        EngineError.
        """
        self._routes = frozenset((await http.get_json("/openapi.json"))["paths"])
        self._need(http, GENERATE, "/metrics", cure="start vLLM 0.32 or newer with --enable-scale-out --tokens-only")
        if "/resume" in self._routes:  # an earlier process of this worker may have left somebody else's server paused
            await http.post("/resume")
        if hides_temperature([await lead_nats(http, temperature=one) for one in PROBED_TEMPERATURES]):
            what = "the server's log-probabilities are not those of the sampling distribution"
            raise EngineError(
                what, where=f"vllm at {http.base_url}", cure="start the server with --logprobs-mode processed_logprobs"
            )
        self._swaps_tensors = "/collective_rpc" in self._routes and await has_extension(http)
        if "/get_world_size" in self._routes:
            self._num_workers, self._num_copies = await count_workers(http)

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
        """See ServerBackend."""
        asked = self._asked(sampling, experts_from) | {"max_tokens": max_new_tokens}
        answer = await ask(http, token_ids, seed=seed, request_id=request_id, **asked)
        return self._segment(answer, REASONS, num_places=len(token_ids) - 1 - experts_from)

    async def stream(
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
        """See ServerBackend."""
        asked = self._asked(sampling, experts_from) | {"max_tokens": max_new_tokens}
        num_places = len(token_ids) - 1 - experts_from
        async with aclosing(ask_parts(http, token_ids, seed=seed, request_id=request_id, **asked)) as parts:
            async for part in parts:
                segment = self._segment(part, PART_REASONS, num_places=num_places)
                num_places += len(segment.token_ids)
                yield segment

    def _asked(self, sampling: Sampling, experts_from: int) -> dict[str, Any]:
        return {
            "adapters": self._adapters[0] if self._adapters else "",
            "temperature": sampling.temperature,
            **({} if sampling.top_p == 1 else {"top_p": sampling.top_p}),
            **({"routed_experts_prompt_start": experts_from} if sampling.tells_experts else {}),
            "stop_token_ids": list(sampling.eos_ids),
            "logprobs": 0,
        }

    def _segment(self, answer: Any, reasons: Mapping[Any, FinishReason], *, num_places: int) -> Segment:
        """Read one answer. `num_places` is the number of places whose experts come before those of its own tokens."""
        choice = answer["choices"][0]
        if choice["finish_reason"] not in reasons:
            raise HttpFailure(GENERATE, 200, f"unknown finish reason {choice['finish_reason']!r}")
        logprobs = [sampled["logprob"] for sampled in choice["logprobs"]["content"]] if choice["logprobs"] else []
        reason, labels, token_ids = reasons[choice["finish_reason"]], self._labels(choice), choice["token_ids"] or []
        experts = read_experts(choice.get("routed_experts"), num_places + len(token_ids), _array_of)
        return Segment(token_ids, logprobs, reason, labels, experts)

    async def abort_all(self, http: Http) -> None:
        """See ServerBackend."""
        self._need(http, "/pause", "/abort_requests")
        await http.post("/pause", mode="abort")
        await http.post("/abort_requests", {})  # requests that have come since

    async def prepare_load(self, http: Http, folder: Path, digests: Mapping[str, str]) -> None:
        """See ServerBackend. Workers read the weights in a thread of their own, into memory beside the served
        weights.
        """
        if self._launch is not None and self._launch.device == "cuda":  # there a load that has begun cannot be undone
            await asyncio.to_thread(check_same_tensors, folder, self._launch.model_folder)
        if not self._swaps_tensors:
            await asyncio.to_thread(read_folder, folder, wanted=digests)
            return
        await call_workers(http, "mrl_take", [json.dumps({"folder": str(folder), "digests": dict(digests)})])
        check_taken(str(folder), await self._arrival(http), taken={}, num_workers=self._num_workers)
        self._prepared = folder

    async def load(self, http: Http, folder: Path, label: str) -> None:
        """See ServerBackend."""
        self._need(http, "/collective_rpc", "/reset_prefix_cache", "/get_world_size")
        if self._num_copies > 1:
            what = "with data parallelism vLLM confirms new weights only for its first copy of the model"
            cure = "use rollout.workers instead of data parallelism"
            raise EngineError(what, got=f"{self._num_copies} copies", cure=cure)
        if self._swaps_tensors:
            if self._prepared != folder:
                await self.prepare_load(http, folder, {})
            self._prepared = None
            said = await call_workers(http, "mrl_serve_arrived", [])
        else:
            if self._launch is not None:
                await asyncio.to_thread(check_same_tensors, folder, self._launch.model_folder)
            said = await call_workers(http, "reload_weights", [], weights_path=str(folder))
        check_taken(str(folder), said, taken={} if self._swaps_tensors else None, num_workers=self._num_workers)
        self._folder, self._adapters, self._below = folder, None, None
        await self._begin_version(http, label)

    async def load_adapters(self, http: Http, folder: Path, label: str) -> None:
        """See ServerBackend. Each load has a new name: with one name for all, vLLM would read the files in every
        step.
        """
        self._need(
            http,
            *ADAPTER_ROUTES,
            "/reset_prefix_cache",
            cure="start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and VLLM_SERVER_DEV_MODE=1",
        )
        before, self._num_loads = self._adapters, self._num_loads + 1
        name = f"{label}-{self._num_loads}"
        await http.post(ADAPTER_ROUTES[0], {"lora_name": name, "lora_path": str(folder)}, within_s=None)
        self._adapters = name, folder
        if before is not None:
            await http.post(ADAPTER_ROUTES[1], {"lora_name": before[0]})
        await self._begin_version(http, label)

    async def _begin_version(self, http: Http, label: str) -> None:
        if "/update_weight_version" in self._routes:
            await http.post("/update_weight_version", {"new_version": label})
        if not (await http.post_json("/reset_prefix_cache"))["success"]:
            raise HttpFailure("/reset_prefix_cache", 200, "the prefix cache still holds prefixes of the old weights")

    async def broadcast_seats(self, http: Http) -> BroadcastRanks:
        """See ServerBackend. One seat, for the worker, which checks all weights before it serves any of them."""
        if not self._swaps_tensors or self._num_workers * self._num_copies > 1:
            what = "this vLLM server accepts weights only as files"
            raise EngineError(what, where="rollout.weights", cure='set rollout.weights = "files"')
        return BroadcastRanks(1)

    async def prepare_broadcast(self, http: Http, incoming: IncomingTensors) -> None:
        """See ServerBackend. The worker receives the whole broadcast in a thread of its own, beside the served
        weights.
        """
        where = f"broadcast {incoming.meeting.name}"
        await call_workers(http, "mrl_join", [seat_of(incoming)])
        said = await self._arrival(http)
        if lost := [answer["lost"] for answer in said if "lost" in answer]:
            raise PeerLost(f"{where}: {lost[0]}")
        check_taken(where, said, taken={}, num_workers=1)

    async def receive(self, http: Http, incoming: IncomingTensors, label: str) -> None:
        """See ServerBackend. All weights have arrived in `prepare_broadcast`, and are served now."""
        said = await call_workers(http, "mrl_serve_arrived", [])
        check_taken(f"broadcast {incoming.meeting.name}", said, taken={}, num_workers=1)
        self._folder = self._adapters = self._below = None
        await self._begin_version(http, label)

    async def resume(self, http: Http) -> None:
        """See ServerBackend."""
        self._need(http, "/resume")
        await http.post("/resume")

    async def score(
        self, http: Http, token_ids: Sequence[int], temperature: float, num_likeliest: int
    ) -> list[TokenScore] | None:
        """See ServerBackend."""
        if temperature != 1.0:
            what = "vLLM scores given texts only at temperature 1"
            cure = "for a policy that scores for its peers, set rollout.temperature = 1.0 or use the embedded engine"
            raise EngineError(what, got=temperature, wanted="1.0", cure=cure)
        adapters = self._adapters[0] if self._adapters else ""
        answer = await ask(http, token_ids, adapters=adapters, max_tokens=1, prompt_logprobs=num_likeliest)
        if (scored := answer["prompt_logprobs"]) is None:
            return None
        found = []
        for token_id, row in zip(token_ids[1:], scored[1:], strict=True):
            told = sorted(((one["logprob"], int(name)) for name, one in row.items()), reverse=True)
            likeliest = [(name, logprob) for logprob, name in told[:num_likeliest]]  # the given token may be extra
            found.append(TokenScore(row[str(token_id)]["logprob"], likeliest))
        return found

    async def checksums(self, http: Http) -> dict[str, str] | None:
        """See ServerBackend. Known for a server that was started here, with one worker.

        The extension reads the engine's bytes as they are. Without the extension, and before the first load, vLLM's own
        hashes are compared with those of the folder's tensors in the engine's number format. vLLM's steps stand still
        while it hashes, about a second for each GB, so for weights below adapters that is done once.
        """
        if self._adapters is None or not self._swaps_tensors:
            return await self._weight_checksums(http)
        self._below = self._below or await self._weight_checksums(http)
        if self._below is None:
            return None
        held = await call_workers(http, "mrl_adapter_checksums", [str(self._adapters[1])])
        return self._below | held[0] if len(held) == 1 else self._below

    async def _arrival(self, http: Http, method: str = "mrl_arrival") -> list[Any]:
        """Ask the workers again and again, and return their answers once none of them is still at work."""
        while AWAITED in (said := await call_workers(http, method, [])):
            await asyncio.sleep(ARRIVAL_POLL_S)
        return said

    async def _weight_checksums(self, http: Http) -> dict[str, str] | None:
        if self._swaps_tensors:
            await call_workers(http, "mrl_look", [])
            held = await self._arrival(http, "mrl_checksums")
            if len(held) == 1 and held[0]:
                return held[0]
        if "/weight_checker" not in self._routes or self._launch is None or self._folder is None:
            return None
        if self._num_workers * self._num_copies > 1:  # each has parts, and steps would stand still for seconds
            return None
        sums = (await http.post_json("/weight_checker", {"action": "checksum"}, within_s=None))["checksums"]
        plain = {name.rpartition(":")[2].replace(BELOW, "."): sha256[:16] for name, sha256 in sums.items()}
        return await asyncio.to_thread(digests_held, self._folder, plain, self._launch.dtype)

    async def usage(self, http: Http) -> EngineUsage:
        """See ServerBackend."""
        metrics = metrics_of(await http.get("/metrics", within_s=ANSWER_S))
        return EngineUsage(
            running=int(metrics.get("vllm:num_requests_running", 0)),
            waiting=int(metrics.get("vllm:num_requests_waiting", 0)),
            cache_share=metrics.get("vllm:kv_cache_usage_perc", 0.0),
            generated_tokens=int(metrics.get("vllm:generation_tokens_total", 0)),
            prompt_tokens=int(metrics.get("vllm:prefix_cache_queries_total", 0)),
            reused_prompt_tokens=int(metrics.get("vllm:prefix_cache_hits_total", 0)),
        )

    async def sleep(self, http: Http) -> None:
        """See ServerBackend."""
        self._need(http, "/sleep", cure="start the server with --enable-sleep-mode")
        await http.post("/sleep", level="2", mode="abort")

    async def wake(self, http: Http) -> None:
        """See ServerBackend."""
        self._need(http, "/wake_up", cure="start the server with --enable-sleep-mode")
        await http.post("/wake_up")

    def _need(self, http: Http, *routes: str, cure: str = "start the server with VLLM_SERVER_DEV_MODE=1") -> None:
        for route in routes:
            if route not in self._routes:
                raise EngineError(f"the server has no route {route}", where=f"vllm at {http.base_url}", cure=cure)

    def _labels(self, choice: dict[str, Any]) -> tuple[str, ...]:
        if "/update_weight_version" not in self._routes:
            return ()
        versions = dict.fromkeys(span["version"] for span in choice.get("weight_versions") or ())
        return tuple("" if version == FIRST_WEIGHTS else version for version in versions)


def _array_of(data: bytes) -> npt.NDArray[Any]:
    """[R, layers, K] ids of experts from the file of numpy that vLLM sends at an answer's end. Raises ValueError."""
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
