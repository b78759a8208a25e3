"""Single calls to a vLLM server."""

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from mrl.engines.http import Http, HttpFailure
from mrl.engines.server_backend import Paused
from mrl.errors import EngineLost, WeightsError
from mrl.models.tensor_broadcast import MEET_S, STALL_S, IncomingTensors, buckets_of
from mrl.models.tensor_file import TYPES
from mrl.transport.endpoints import own_host

GENERATE = "/inference/v1/generate"
RETRYABLE = "ServiceUnavailableError"
"""Type that vLLM gives a refusal with status 503 while it is paused. For a full queue the type is another."""
ANSWER_S = 5.0
"""Seconds for a route that answers at once."""


async def ask(http: Http, token_ids: Sequence[int], **asked: Any) -> Any:
    """Ask for one answer or score; `asked` goes to `body_of`. Raises Paused, HttpFailure."""
    with _pauses():
        return await http.post_json(GENERATE, body_of(token_ids, **asked), within_s=None)


async def ask_parts(http: Http, token_ids: Sequence[int], **asked: Any) -> AsyncGenerator[Any, None]:
    """Ask for one answer, and yield its parts. Raises Paused, HttpFailure; a failure may come as an event, too."""
    with _pauses():
        async with aclosing(http.post_events(GENERATE, body_of(token_ids, **asked) | {"stream": True})) as parts:
            async for part in parts:
                if error := part.get("error"):
                    code = error.get("code")
                    raise HttpFailure(GENERATE, code if isinstance(code, int) else 503, json.dumps(part))
                yield part


def body_of(token_ids: Sequence[int], *, request_id: str = "", adapters: str = "", **sampling: Any) -> dict[str, Any]:
    """Body of a request to GENERATE; `adapters` is the name of the adapters to use, or "".

    Values that `sampling` does not give are vLLM's own, which are neutral: top_p 1, no penalties.
    """
    parameters = {"detokenize": False, "ignore_eos": True, **sampling}
    body: dict[str, Any] = {"token_ids": list(token_ids), "sampling_params": parameters}
    if adapters:
        body["model"] = adapters
    if request_id:
        body["request_id"] = request_id
    return body


@contextmanager
def _pauses() -> Iterator[None]:
    try:
        yield
    except HttpFailure as failure:
        if _is_pause(failure):
            raise Paused(failure.route, failure.status, failure.text) from failure
        raise


def _is_pause(failure: HttpFailure) -> bool:
    try:
        return failure.status == 503 and json.loads(failure.text)["error"]["type"] == RETRYABLE
    except (ValueError, KeyError, TypeError):
        return False


async def lead_nats(http: Http, *, temperature: float) -> float:
    """Return by how many nats the likeliest token after token 0 is likelier than the next."""
    answer = await ask(http, [0], max_tokens=1, temperature=temperature, logprobs=2)
    sampled = answer["choices"][0]["logprobs"]["content"][0]
    first, second, *_ = sorted((float(entry["logprob"]) for entry in sampled["top_logprobs"]), reverse=True)
    return first - second


async def call_workers(http: Http, method: str, arguments: list[str], **named: str) -> list[Any]:
    """Call a method of every worker process, and return what each returns. The caller bounds the time."""
    body = {"method": method, "args": arguments, "kwargs": named}
    text = await http.post("/collective_rpc", body, within_s=None)
    return json.loads(text)["results"] if text else []


def check_taken(where: str, answers: Sequence[Any], *, taken: object, num_workers: int) -> None:
    """Check that all workers took new weights; each answers `taken` or {"refused": why}.

    Raises WeightsError when all refused, so that nothing has changed, and EngineLost when their answers differ or are
    not all there, so that they may serve different weights.
    """
    refused = [answer["refused"] for answer in answers if isinstance(answer, dict) and "refused" in answer]
    num_taken = sum(answer == taken for answer in answers)
    if num_taken == len(answers) == num_workers:
        return
    if len(refused) == len(answers) == num_workers:
        raise WeightsError(f"{where}: vLLM cannot serve these weights: {refused[0]}")
    why = f": {refused[0]}" if refused else ""
    raise EngineLost(
        f"{where}: {num_taken} of {num_workers} workers loaded the weights, {len(refused)} refused them{why}"
    )


def seat_of(incoming: IncomingTensors) -> str:
    """JSON that `inside/broadcast_member.py` needs to be a member of this broadcast."""
    meeting = incoming.meeting
    seat = {
        "host": meeting.host,
        "port": meeting.port,
        "file": meeting.file,
        "own_host": own_host(meeting.host),
        "name": meeting.name,
        "rank": meeting.first_rank,
        "world_size": meeting.world_size,
        "meet_s": MEET_S,
        "stall_s": STALL_S,
        "buckets": [
            [(tensor.name, str(TYPES[tensor.dtype]).removeprefix("torch."), tensor.shape) for tensor in bucket]
            for bucket in buckets_of(incoming.tensors)
        ],
        "digests": dict(incoming.digests),
    }
    return json.dumps(seat)


async def count_workers(http: Http) -> tuple[int, int]:
    """Return (processes over which each copy of the model is split, copies of it).

    The first is tensor times pipeline parallelism, the second data parallelism.
    """
    size = int((await http.get_json("/get_world_size", include_dp="false"))["world_size"])
    return size, int((await http.get_json("/get_world_size", include_dp="true"))["world_size"]) // size


async def has_extension(http: Http) -> bool:
    """Whether the server's workers have mrl's extension, the methods of `inside/arriving_weights.py`."""
    try:
        await call_workers(http, "mrl_look", [])
    except HttpFailure as failure:
        if failure.status:
            return False
        raise
    return True


async def answers(http: Http, route: str) -> bool:
    """Whether a route answers within ANSWER_S, without an error."""
    try:
        await http.get(route, within_s=ANSWER_S)
    except HttpFailure:
        return False
    return True
