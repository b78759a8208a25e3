"""SGLang as a server (routes of 0.5.23): token ids in, token ids and log-probabilities out, weights from a folder.

Seen on SGLang 0.5.23 on a CPU. `/abort_request {"abort_all": true}` makes every call return the tokens that it has
sampled, with finish reason "abort" and a log-probability for each token. `ignore_eos` switches `stop_token_ids` off,
too, so EOS ids are given as stop tokens, and the model's own EOS stays on. A load that fails half-way ends the server,
whose rollback reads the new folder again; hence tensors are compared by name and shape before. Output log-probabilities
are those of the sampling distribution, input log-probabilities those of temperature 1. `sampling_seed` counts only with
--enable-deterministic-inference, which has no CPU backend: elsewhere answers differ by the server's own random numbers.
The experts of tokens come with the end of an answer, also of one that is given up; for a cached prefix they are those
of the request that wrote the prefix.
The code for GPUs (sleeping, their backends) is written from the sources and has not run.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np

from mrl.engines import sglang_broadcast, sglang_launch
from mrl.engines.engine import EngineUsage, Sampling, TokenScore
from mrl.engines.http import Http, HttpFailure
from mrl.engines.metrics_text import metrics_of
from mrl.engines.server_backend import (
    PROBED_TEMPERATURES,
    HalfUpdated,
    Launch,
    Segment,
    hides_temperature,
    read_experts,
)
from mrl.engines.sglang_broadcast import witness_broadcast
from mrl.engines.tensor_folder import TensorSums, check_same_tensors, digests_held
from mrl.errors import EngineError, PeerLost, WeightsError
from mrl.models.tensor_broadcast import BroadcastRanks, IncomingTensors
from mrl.models.tensor_file import read_folder
from mrl.records.chosen_experts import Experts
from mrl.records.finish import FinishReason

ANSWER_S = 5.0
FIRST_WEIGHTS = "default"
DTYPES = ("float32", "bfloat16", "float16")
WHOLE_DISTRIBUTION = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
NOT_BEGUN = "Failed to get weights iterator"
NOT_FLUSHED = "cache was not flushed"
"""Text of an answer when SGLang has loaded the weights while a step still ran."""
IDLE_S = 20.0
"""Seconds that SGLang may take to end its last step."""
MAX_LOADS = 3
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
NEEDED = ("/generate", "/server_info")
CONTROLS = ("/abort_request", "/flush_cache", "/update_weights_from_disk")
BROADCASTS = ("/init_weights_update_group", "/begin_weight_update", "/update_weights_from_distributed")


class SGLang:
    """See ServerBackend."""

    name = "sglang"
    has_port = True
    less_memory = (
        "use a smaller model, or a smaller cache: on a CPU lower rollout.answers_at_once or server.context_tokens, "
        'on a GPU set another share in server.options, such as ["--mem-fraction-static", "0.8"]'
    )

    def __init__(self) -> None:
        """The server's routes and features are known after `probe`."""
        self._routes: frozenset[str] = frozenset()
        self._hashes_bytes = self._sends_parts = False
        self._dtype = ""
        self._first_folder = Path()
        self._num_processes = 1
        self._sums: TensorSums | None = None
        """Hashes that the server has to report of the last update, where that was a broadcast."""

    def command(self, launch: Launch) -> list[str]:
        """See ServerBackend."""
        return sglang_launch.command(launch)

    def environment(self, launch: Launch) -> dict[str, str]:
        """See ServerBackend."""
        return sglang_launch.environment(launch)

    def reach(self, launch: Launch) -> Http:
        """See ServerBackend."""
        return Http(f"http://{launch.host}:{launch.port}", key=launch.key)

    async def ready(self, http: Http) -> bool:
        """See ServerBackend. A server without this route takes requests as soon as it answers; `probe` checks its
        routes.
        """
        try:
            await http.get("/ready", within_s=ANSWER_S)
        except HttpFailure as failure:
            return failure.status == 404
        return True

    async def alive(self, http: Http) -> bool:
        """See ServerBackend. /server_info asks the process that samples; /health would sample a token and take a
        second.
        """
        await http.get("/server_info", within_s=ANSWER_S)
        return True

    async def probe(self, http: Http) -> None:
        """See ServerBackend. Somebody else's server may lack control routes: methods that need them raise
        EngineError.
        """
        self._routes = frozenset((await http.get_json("/openapi.json"))["paths"])
        self._need(http, *NEEDED)
        info = await http.get_json("/server_info")
        self._first_folder, self._dtype = Path(info["model_path"]), str(info["dtype"])
        self._num_processes = int(info["tp_size"]) * int(info["pp_size"])
        self._sends_parts = bool(info.get("incremental_streaming_output"))
        can_hash = info["device"] == "cpu" and info["tp_size"] == 1 and self._dtype in DTYPES
        self._hashes_bytes = can_hash and "/weights_checker" in self._routes
        if hides_temperature([await _lead_nats(http, one) for one in PROBED_TEMPERATURES]):
            what = "the server's log-probabilities are not those of the sampling distribution"
            raise EngineError(what, where=http.base_url, cure="start the server without SGLANG_RETURN_ORIGINAL_LOGPROB")

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
        """See ServerBackend. `request_id` is not passed on: a server may know it from an earlier process of this
        worker.

        An answer that ended at the model's own EOS, which is none of the policy's, counts as aborted, and is continued.
        """
        body = _body_of_answer(token_ids, sampling, max_new_tokens, seed=seed, experts_from=experts_from)
        answer = _checked(await http.post_json("/generate", body, within_s=None))
        return _segment(answer, sampling.eos_ids, experts_from=experts_from)

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
        """See ServerBackend. An event has the whole answer so far, or the new part if the server was started to send
        parts.

        The last token comes again when an answer is given up while it waits for its next step.
        """
        body = _body_of_answer(token_ids, sampling, max_new_tokens, seed=seed, experts_from=experts_from)
        num_told = 0
        async with aclosing(http.post_events("/generate", body | {"stream": True})) as answers:
            async for answer in answers:
                if error := answer.get("error"):
                    raise HttpFailure("/generate", int(error.get("code") or 500), str(error))
                num_tokens = _checked(answer)["meta_info"]["completion_tokens"]
                start = 0 if self._sends_parts else num_told
                here = slice(start, start + num_tokens - num_told)
                yield _segment(answer, sampling.eos_ids, here, experts_from=experts_from)
                num_told = num_tokens

    async def abort_all(self, http: Http) -> None:
        """See ServerBackend. SGLang is not paused, which would take a second: the caller begins nothing until `resume`,
        and a load waits for calls that still run.
        """
        self._need(http, *CONTROLS)
        await http.post("/abort_request", {"abort_all": True})

    async def prepare_load(self, http: Http, folder: Path, digests: Mapping[str, str]) -> None:
        """See ServerBackend. SGLang itself would find wrong weights only after the load, when the old weights are
        gone.
        """
        await asyncio.to_thread(read_folder, folder, wanted=digests)

    async def load(self, http: Http, folder: Path, label: str) -> None:
        """See ServerBackend."""
        self._need(http, *CONTROLS)
        await asyncio.to_thread(check_same_tensors, folder, self._first_folder)
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
        self._sums = None
        try:
            await _load_when_idle(http, body)
        except HttpFailure as failure:
            if NOT_BEGUN in failure.text:
                raise WeightsError(f"{folder}: SGLang cannot load these weights: {failure}") from failure
            raise

    async def load_adapters(self, http: Http, folder: Path, label: str) -> None:
        """See ServerBackend. Raises EngineError: without an accelerator SGLang 0.5.23 does not start with adapters."""
        what, cure = "SGLang accepts full weights only", 'set rollout.weights = "files"'
        raise EngineError(what, where="rollout.weights", got="adapters", cure=cure)

    async def broadcast_seats(self, http: Http) -> BroadcastRanks:
        """See ServerBackend. One seat for each process of the server, and one for this process, which checks the
        bytes.
        """
        self._need(http, *CONTROLS, *BROADCASTS)
        return BroadcastRanks(1 + self._num_processes)

    async def prepare_broadcast(self, http: Http, incoming: IncomingTensors) -> None:
        """See ServerBackend. Does nothing: SGLang has no place for weights beside those that it serves."""

    async def receive(self, http: Http, incoming: IncomingTensors, label: str) -> None:
        """See ServerBackend. SGLang loads each bucket as it comes, so the weights are whole only after the last
        bucket.
        """
        watching = asyncio.to_thread(witness_broadcast, incoming, self._dtype)
        witness = asyncio.ensure_future(asyncio.gather(watching, return_exceptions=True))
        name = incoming.meeting.name
        try:
            await sglang_broadcast.meet(http, incoming.meeting)
            await sglang_broadcast.load(http, incoming, label)
        except PeerLost:
            await sglang_broadcast.give_up(http, name)
            await witness
            raise
        await sglang_broadcast.leave(http, name)
        (seen,) = await witness
        if isinstance(seen, PeerLost | WeightsError):
            raise HalfUpdated(f"broadcast {name}: {seen}") from seen
        if isinstance(seen, BaseException):
            raise seen
        self._sums = seen

    async def resume(self, http: Http) -> None:
        """See ServerBackend. Does nothing: SGLang was never paused."""

    async def score(
        self, http: Http, token_ids: Sequence[int], temperature: float, num_likeliest: int
    ) -> list[TokenScore] | None:
        """See ServerBackend. SGLang scores prompts at temperature 1 alone."""
        if temperature != 1.0:
            what, cure = "SGLang scores given texts only at temperature 1", "set it to 1.0, or use the embedded engine"
            raise EngineError(what, where="rollout.temperature", got=temperature, wanted="1.0", cure=cure)
        told = {"top_logprobs_num": num_likeliest} if num_likeliest else {}
        meta = (await _ask(http, token_ids, {"max_new_tokens": 0}, logprob_start_len=0, **told))["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            return None
        own = meta["input_token_logprobs"][1:]
        likeliest = meta["input_top_logprobs"][1:] if num_likeliest else [()] * len(own)
        return [
            TokenScore(one[0], [(int(other[1]), other[0]) for other in others])
            for one, others in zip(own, likeliest, strict=True)
        ]

    async def checksums(self, http: Http) -> dict[str, str] | None:
        """See ServerBackend. SGLang hashes the bytes that it computes with, under its own names. None on a GPU, where
        it hashes otherwise."""
        if not self._hashes_bytes:
            return None
        held = (await http.post_json("/weights_checker", {"action": "checksum"}, within_s=None))["ranks"]
        if self._sums is not None:
            return self._sums.held(held[0]["checksums"])
        folder = Path((await http.get_json("/model_info"))["model_path"])
        if not folder.is_dir():  # somebody else's server, which sees other folders than this process
            return None
        return await asyncio.to_thread(digests_held, folder, held[0]["checksums"], self._dtype)

    async def usage(self, http: Http) -> EngineUsage:
        """See ServerBackend. Gauges are at most ten decoding steps old."""
        text = await http.get("/metrics", within_s=ANSWER_S)
        metrics, decoding = metrics_of(text), metrics_of("\n".join(re.findall(r'.*mode="decode".*', text)))
        in_ended = metrics.get("sglang:generation_tokens_total", 0.0)
        without_firsts = decoding.get("sglang:realtime_tokens_total", 0.0)
        return EngineUsage(
            running=int(metrics.get("sglang:num_running_reqs", 0)),
            waiting=int(metrics.get("sglang:num_queue_reqs", 0)),
            cache_share=min(1.0, metrics.get("sglang:token_usage", 0.0)),
            generated_tokens=int(max(in_ended, without_firsts)),
            prompt_tokens=int(metrics.get("sglang:prompt_tokens_total", 0)),
            reused_prompt_tokens=int(metrics.get("sglang:cached_tokens_total", 0)),
        )

    async def sleep(self, http: Http) -> None:
        """See ServerBackend. Waits for the end of the last step: a server that sleeps before that would end itself."""
        await _await_idle(http)
        await http.post("/release_memory_occupation", {})

    async def wake(self, http: Http) -> None:
        """See ServerBackend."""
        await http.post("/resume_memory_occupation", {})

    def _need(self, http: Http, *routes: str) -> None:
        for route in routes:
            if route not in self._routes:
                where, cure = f"sglang at {http.base_url}", "use SGLang 0.5.23 or newer"
                raise EngineError(f"the server has no route {route}", where=where, cure=cure)


async def _ask(http: Http, token_ids: Sequence[int], sampling_params: dict[str, Any], **options: Any) -> Any:
    """Call /generate. Raises HttpFailure, also when the server gave the request up for a fault of its own."""
    return _checked(await http.post_json("/generate", _body(token_ids, sampling_params, **options), within_s=None))


def _body(token_ids: Sequence[int], sampling_params: dict[str, Any], **options: Any) -> dict[str, Any]:
    sampling_params = WHOLE_DISTRIBUTION | sampling_params
    return {"input_ids": list(token_ids), "sampling_params": sampling_params, "return_logprob": True, **options}


def _body_of_answer(
    token_ids: Sequence[int], sampling: Sampling, max_new_tokens: int, *, seed: int, experts_from: int
) -> dict[str, Any]:
    params: dict[str, Any] = {"temperature": sampling.temperature, "stop_token_ids": list(sampling.eos_ids)}
    params |= {"max_new_tokens": max_new_tokens, "sampling_seed": seed}
    params |= {} if sampling.top_p == 1 else {"top_p": sampling.top_p}
    told = {"return_routed_experts": True, "routed_experts_start_len": experts_from} if sampling.tells_experts else {}
    return _body(token_ids, params, **told)


def _experts(meta: dict[str, Any], num_rows: int) -> Experts | None:
    """[R, X] experts as SGLang tells them at an answer's end: int32 in base64, flat, so that R has to be known."""
    told = meta.get("routed_experts")
    return read_experts(told, num_rows, lambda data: np.frombuffer(data, "<i4").reshape(num_rows, -1))


def _checked(answer: Any) -> Any:
    reason = answer["meta_info"]["finish_reason"]
    if reason and reason.get("status_code"):
        raise HttpFailure("/generate", int(reason["status_code"]), str(reason))
    return answer


def _segment(answer: Any, eos_ids: Collection[int], here: slice = slice(None), *, experts_from: int = 0) -> Segment:
    """Read the tokens `here` of an answer; the segment of an answer that goes on ends by ABORT.

    While an answer goes on, SGLang adds to the list of its ids, which may be longer than that of log-probabilities.
    """
    sampled, meta = answer["output_ids"], answer["meta_info"]
    reason = REASONS[meta["finish_reason"]["type"]] if meta["finish_reason"] else FinishReason.ABORT
    if reason is FinishReason.STOP and sampled[-1] not in eos_ids:
        reason = FinishReason.ABORT
    versions = dict.fromkeys(span["version"] for span in meta.get("weight_versions") or () if span["end"])
    labels = tuple("" if version == FIRST_WEIGHTS else version for version in versions)
    logprobs = [entry[0] for entry in meta["output_token_logprobs"][here]]
    num_rows = int(meta.get("prompt_tokens", 0)) + int(meta.get("completion_tokens", 0)) - 1 - experts_from
    return Segment(sampled[here], logprobs, reason, labels, _experts(meta, num_rows))


async def _await_idle(http: Http) -> None:
    """Wait until the step is over in which the last answers were given up; on a GPU the answers come before its end."""
    await http.post("/flush_cache", timeout=f"{IDLE_S:g}", within_s=IDLE_S + ANSWER_S)


async def _load_when_idle(http: Http, body: dict[str, Any]) -> None:
    """Load the weights of a folder. Repeat it where a step still ran meanwhile, so that the old cache was kept."""
    for number in range(MAX_LOADS):
        await _await_idle(http)
        try:
            await http.post("/update_weights_from_disk", body, within_s=None)
            return
        except HttpFailure as failure:
            if NOT_FLUSHED not in failure.text or number + 1 == MAX_LOADS:
                raise


async def _lead_nats(http: Http, temperature: float) -> float:
    """Return by how many nats the likeliest token after a short text is likelier than the next."""
    answer = await _ask(http, [1, 2, 3, 4], {"max_new_tokens": 1, "temperature": temperature}, top_logprobs_num=2)
    (first, second), *_ = answer["meta_info"]["output_top_logprobs"]
    return float(first[0] - second[0])
