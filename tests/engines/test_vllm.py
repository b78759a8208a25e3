"""vLLM's routes, with answers as vLLM 0.32 gave them; test_conformance.py asks the real server."""

import asyncio
import hashlib
import json
import math
import struct
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from aiohttp import web
from safetensors.torch import save_file

from mrl.engines.engine import EngineUsage, Sampling
from mrl.engines.http import Http, HttpFailure
from mrl.engines.server_backend import Launch, Paused, Segment
from mrl.engines.vllm import VLLM
from mrl.errors import EngineError, EngineLost, PeerLost, WeightsError
from mrl.models.tensor_broadcast import BroadcastRanks, IncomingTensors
from mrl.models.tensor_file import TensorShape
from mrl.records.finish import FinishReason
from mrl.records.rollouts import BroadcastRendezvous

SAMPLING = Sampling(0.7, 9, (1, 2))
ROUTES = ["/inference/v1/generate", "/metrics", "/pause", "/resume", "/abort_requests", "/is_paused",
          "/reset_prefix_cache", "/collective_rpc", "/update_weight_version", "/get_world_size"]  # fmt: skip


def sampled(token_ids: list[int], reason: str, version: str = "default") -> dict[str, Any]:
    """A generation, as `/inference/v1/generate` answers; the log-probability of token n is -n/100."""
    content = [
        {"token_id": n, "logprob": -n / 100, "top_logprobs": [{"token_id": n, "logprob": -n / 100}]} for n in token_ids
    ]
    spans = [{"version": version, "start": 0, "end": len(token_ids)}] if token_ids else []
    choice = {"finish_reason": reason, "token_ids": token_ids, "logprobs": {"content": content}}
    return {"prompt_logprobs": None, "choices": [{**choice, "weight_versions": spans}]}


class Recorded:
    """A server that answers what it was told to, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {
            "/openapi.json": {"paths": {route: {} for route in ROUTES}},
            "/inference/v1/generate": self._generate,
            "/collective_rpc": {"results": [{}]},
            "/reset_prefix_cache": {"success": True},
            "/get_world_size": {"world_size": 1},
        }
        self.asked: list[tuple[str, Any]] = []
        self.lead_nats = 0.7

    def _generate(self, body: Any) -> dict[str, Any]:
        """Token 4; the lower the temperature, the further it leads."""
        answer, lead_nats = sampled([4], "length"), self.lead_nats / body["sampling_params"]["temperature"]
        logprobs = [round(-math.log1p(math.exp(sign * lead_nats)), 7) for sign in (-1, 1)]  # of 32 bits
        answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = [
            {"token_id": 4 + place, "logprob": logprob} for place, logprob in enumerate(logprobs)
        ]
        return answer

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else dict(request.query)
        self.asked.append((request.path, body))
        answer = self.answers.get(request.path, {})
        answer = answer(body) if callable(answer) else answer
        return answer if isinstance(answer, web.Response) else web.json_response(answer)


@pytest.fixture
def server() -> Recorded:
    """With all routes that mrl uses."""
    return Recorded()


@pytest.fixture
def ask(server) -> Callable[..., Any]:
    """Runs calls of a backend that has probed the server."""

    def run(*calls: Callable[[VLLM, Http], Coroutine[Any, Any, Any]]) -> Any:
        async def inside() -> Any:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", server.handle)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            http, backend = Http(f"http://127.0.0.1:{runner.addresses[0][1]}"), VLLM()
            try:
                await backend.probe(http)
                server.asked.clear()
                return [await call(backend, http) for call in calls][-1]
            finally:
                await http.close()
                await runner.cleanup()

        return asyncio.run(inside())

    return run


def generate(backend: VLLM, http: Http, tokens: int = 5) -> Coroutine[Any, Any, Segment]:
    return backend.generate(http, [7, 8], SAMPLING, max_new_tokens=tokens, seed=3, request_id="r/0/0")


@pytest.mark.parametrize(("reason", "meant"), [("stop", "STOP"), ("length", "LENGTH"), ("abort", "ABORT")])
def test_a_generation_is_ids_logprobs_reason_and_versions(server, ask, reason, meant):
    """What it was asked holds ids and the sampling of the policy."""
    server.answers["/inference/v1/generate"] = lambda body: (
        sampled([5, 1], reason, "0.3") if "seed" in body["sampling_params"] else server._generate(body)
    )

    segment = ask(lambda backend, http: generate(backend, http, 2))

    assert segment == Segment([5, 1], [-0.05, -0.01], FinishReason[meant], ("0.3",))
    ((_, body),) = server.asked
    wanted = {"max_tokens": 2, "temperature": 0.7, "seed": 3, "stop_token_ids": [1, 2], "ignore_eos": True}
    assert body["token_ids"] == [7, 8]
    assert wanted.items() <= body["sampling_params"].items()


def test_a_nucleus_is_asked_for_where_there_is_one(server, ask):
    """vLLM's own value is neutral, and so nothing is said of it else."""
    for top_p in (0.9, 1.0):
        narrow = replace(SAMPLING, temperature=0.5, top_p=top_p)
        ask(lambda backend, http, at=narrow: backend.generate(
            http, [7], at, max_new_tokens=1, seed=3, request_id="r/0/0"
        ))  # fmt: skip
        asked = server.asked[-1][1]["sampling_params"]
        assert (asked["temperature"], asked.get("top_p", 1.0)) == (0.5, top_p)


def test_the_weights_of_the_start_have_no_label(ask):
    """vLLM calls them "default"."""
    assert ask(lambda backend, http: generate(backend, http, 1)).labels == ("",)


def test_an_unknown_finish_reason_is_a_failure(server, ask):
    """Such as that of a request that went wrong inside."""
    server.answers["/inference/v1/generate"] = lambda body: (
        sampled([], "error") if "seed" in body["sampling_params"] else server._generate(body)
    )

    with pytest.raises(HttpFailure, match="finish reason 'error'"):
        ask(generate)


def test_a_server_without_generation_from_ids_is_refused(server, ask):
    """The missing route is named."""
    del server.answers["/openapi.json"]["paths"]["/inference/v1/generate"]

    with pytest.raises(EngineError, match=r"no route /inference/v1/generate.*--enable-scale-out"):
        ask(generate)


def test_a_server_that_reports_raw_logprobs_is_refused(server, ask):
    """They are the same at every temperature."""
    raw = {"sampling_params": {"temperature": 1.0}}
    server.answers["/inference/v1/generate"] = lambda _: server._generate(raw)

    with pytest.raises(EngineError, match=r"not those of the sampling distribution.*processed_logprobs"):
        ask(generate)


@pytest.mark.parametrize("lead_nats", [0.0, 30.0])
def test_a_model_that_is_sure_or_undecided_is_served(server, ask, lead_nats):
    """The likeliest token has the same log-probability at every temperature then: 0, or minus the log of 2."""
    server.lead_nats = lead_nats

    assert ask(generate).token_ids == [4]


@pytest.mark.parametrize(
    ("route", "call"),
    [
        ("/collective_rpc", lambda backend, http: backend.load(http, Path("/w"), "0.1")),
        ("/pause", lambda backend, http: backend.abort_all(http)),
        ("/resume", lambda backend, http: backend.resume(http)),
        ("/sleep", lambda backend, http: backend.sleep(http)),
        ("/wake_up", lambda backend, http: backend.wake(http)),
    ],
)
def test_a_control_route_is_missed_when_it_is_needed(server, ask, route, call):
    """Somebody else's server may generate without it."""
    server.answers["/openapi.json"]["paths"].pop(route, None)

    assert ask(lambda backend, http: generate(backend, http, 1)).token_ids == [4]
    with pytest.raises(EngineError, match=f"no route {route}"):
        ask(call)


def test_new_weights_are_loaded_named_and_cached_prefixes_forgotten(server, ask):
    """In this order; the server samples on until all of them are there, and has them read once."""
    server.answers["/collective_rpc"] = workers_say({"awaited": ""}, {})
    ask(
        lambda backend, http: backend.prepare_load(http, Path("/w"), {"w": "d"}),
        lambda backend, http: backend.load(http, Path("/w"), "0.1"),
    )

    assert json.loads(server.asked[0][1]["args"][0]) == {"folder": "/w", "digests": {"w": "d"}}
    assert [(path, body.get("method")) for path, body in server.asked] == [
        ("/collective_rpc", "mrl_take"),
        *[("/collective_rpc", "mrl_arrival")] * 2,
        ("/collective_rpc", "mrl_serve_arrived"),
        ("/update_weight_version", None),
        ("/reset_prefix_cache", None),
    ]
    assert server.asked[-2][1] == {"new_version": "0.1"}


def test_without_the_extension_vllm_reloads_itself_and_tells_no_checksums(server, ask):
    """As on a GPU."""
    server.answers["/collective_rpc"] = lambda body: (
        web.Response(status=500) if body["method"].startswith("mrl") else {"results": [None]}
    )

    held = ask(lambda backend, http: backend.load(http, Path("/w"), "0.1"), lambda d, http: d.checksums(http))

    assert held is None
    assert server.asked[0] == (
        "/collective_rpc",
        {"method": "reload_weights", "args": [], "kwargs": {"weights_path": "/w"}},
    )


def test_digests_of_several_ranks_are_no_ones(server, ask, tmp_path):
    """vLLM's own names begin with the rank; each rank has a part of a tensor, of which the folder knows no digest.

    They are not even asked for: a worker hashes between its steps.
    """
    server.answers["/openapi.json"]["paths"]["/weight_checker"] = {}
    server.answers["/collective_rpc"] = lambda body: (
        web.Response(status=500) if body["method"].startswith("mrl") else {"results": [None]}
    )
    config = {"model_type": "llama", "num_attention_heads": 2, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    sha256 = hashlib.sha256(struct.pack("2f", 1, 1)).hexdigest()
    launched = Launch(Path("py"), tmp_path, "127.0.0.1", 0, "cuda", "float32", 1, 8, 64, 0)

    def held(*ranks: int):
        async def call(backend, http):
            backend.command(launched)
            return await backend.checksums(http)

        server.answers["/get_world_size"] = {"world_size": len(ranks)}
        server.answers["/weight_checker"] = {"checksums": {f"0:0:0:{rank}:a": sha256 for rank in ranks}}
        return ask(call)

    assert held(0) == {"a": xxhash.xxh3_128_hexdigest(struct.pack("2f", 1, 1))}
    assert held(0, 1) is None
    assert "/weight_checker" not in [path for path, _ in server.asked]


def test_what_lies_below_adapters_is_hashed_once_until_it_is_loaded_anew(server, ask, tmp_path):
    """A worker's steps stand still for it; the adapters themselves are looked at each time."""
    for route in ("/weight_checker", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        server.answers["/openapi.json"]["paths"][route] = {}
    server.answers["/collective_rpc"] = lambda body: {
        "results": [{"factor": "f"} if body["method"] == "mrl_adapter_checksums" else {}]
    }
    config = {"model_type": "llama", "num_attention_heads": 2, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    sha256 = hashlib.sha256(struct.pack("2f", 1, 1)).hexdigest()
    server.answers["/weight_checker"] = {"checksums": {"0:0:0:0:a": sha256}}
    launched = Launch(Path("py"), tmp_path, "127.0.0.1", 0, "cuda", "float32", 1, 8, 64, 0)

    async def times_hashed(backend: VLLM, http: Http, change: Coroutine[Any, Any, None] | None = None) -> int:
        if change is not None:
            await change
        await backend.load_adapters(http, Path("/adapters"), "0.1")
        before = [path for path, _ in server.asked].count("/weight_checker")
        found = [await backend.checksums(http) for _ in range(2)]
        assert found == [{"a": xxhash.xxh3_128_hexdigest(struct.pack("2f", 1, 1)), "factor": "f"}] * 2
        return [path for path, _ in server.asked].count("/weight_checker") - before

    async def call(backend: VLLM, http: Http) -> list[int]:
        backend.command(launched)
        told = [await times_hashed(backend, http), await times_hashed(backend, http)]
        told.append(await times_hashed(backend, http, backend.load(http, tmp_path, "0.2")))
        backend.command(launched)
        return [*told, await times_hashed(backend, http)]

    assert ask(call) == [1, 0, 1, 1]


def test_weights_that_a_worker_refuses_are_refused(server, ask):
    """With its reason; the version keeps its name."""
    server.answers["/collective_rpc"] = lambda body: {
        "results": [{"refused": "ValueError: not written"} if body["method"] == "mrl_serve_arrived" else {}]
    }

    with pytest.raises(WeightsError, match="/w: vLLM cannot serve these weights: ValueError: not written"):
        ask(lambda backend, http: backend.load(http, Path("/w"), "0.1"))
    assert {route for route, _ in server.asked} == {"/collective_rpc"}


REFUSED = {"refused": "ValueError: not written"}


@pytest.mark.parametrize(
    ("said", "error", "told"),
    [
        ([{}, {}], None, ""),
        ([REFUSED, REFUSED], WeightsError, r"/w: vLLM cannot serve these weights: ValueError: not written"),
        ([{}, REFUSED], EngineLost, r"1 of 2 workers loaded the weights, 1 refused them: ValueError: not written"),
        ([REFUSED, {}], EngineLost, r"1 of 2 workers loaded the weights, 1 refused"),
        ([{}], EngineLost, r"1 of 2 workers loaded the weights, 0 refused"),
        ([REFUSED], EngineLost, r"0 of 2 workers loaded the weights, 1 refused"),
        ([{}, None], EngineLost, r"1 of 2 workers loaded the weights, 0 refused"),
        ([{}, {}, {}], EngineLost, r"3 of 2 workers loaded the weights"),
        ([], EngineLost, r"0 of 2 workers loaded the weights"),
    ],
)
def test_an_update_of_several_workers_is_one_when_all_say_the_same(server, ask, said, error, told):
    """Where they disagree, the model is a mixture of old and new."""
    server.answers["/get_world_size"] = {"world_size": 2}
    server.answers["/collective_rpc"] = lambda body: {
        "results": said if body["method"] == "mrl_serve_arrived" else [{}, {}]
    }

    def load(backend: VLLM, http: Http) -> Coroutine[Any, Any, None]:
        return backend.load(http, Path("/w"), "0.1")

    if error is None:
        ask(load)
        assert ("/update_weight_version", {"new_version": "0.1"}) in server.asked
    else:
        with pytest.raises(error, match=told):
            ask(load)
        assert {route for route, _ in server.asked} == {"/collective_rpc"}


def test_vllms_own_reload_has_to_come_to_all_workers_as_well(server, ask):
    """They return nothing, or the call fails."""
    server.answers["/get_world_size"] = {"world_size": 2}
    server.answers["/collective_rpc"] = lambda body: (
        web.Response(status=500) if body["method"].startswith("mrl") else {"results": [None]}
    )

    with pytest.raises(EngineLost, match="1 of 2 workers loaded the weights"):
        ask(lambda backend, http: backend.load(http, Path("/w"), "0.1"))


def test_copies_of_the_model_whose_answers_vllm_keeps_to_itself_take_no_weights(server, ask):
    """With data parallelism it returns what the first copy says, and nothing is touched before that is known."""
    server.answers["/get_world_size"] = lambda query: {"world_size": 4 if query["include_dp"] == "true" else 2}

    with pytest.raises(EngineError, match=r"first copy.*got '2 copies'; cure: use rollout\.workers"):
        ask(lambda backend, http: backend.load(http, Path("/w"), "0.1"))
    assert server.asked == []


INCOMING = IncomingTensors(
    BroadcastRendezvous(host="127.0.0.1", port=7, name="a-0.1-1", backend="gloo", first_rank=3, world_size=5),
    [TensorShape("w", "BF16", [2, 3])],
    {"w": "d"},
)


def workers_say(*answers: Any) -> Callable[[Any], Any]:
    """What one worker answers to each look at what has arrived; {} to anything else."""
    left = iter(answers)
    return lambda body: {"results": [next(left) if body["method"] == "mrl_arrival" else {}]}


def test_a_broadcast_is_served_when_all_of_it_has_arrived(server, ask):
    """It is joined, looked at until it is here, and loaded as a version of its own, whose cache is empty."""
    server.answers["/collective_rpc"] = workers_say({"awaited": ""}, {"awaited": ""}, {})

    def prepare(vllm, http):
        return vllm.prepare_broadcast(http, INCOMING)

    ask(prepare, lambda vllm, http: vllm.receive(http, INCOMING, "0.2"))

    assert [(path, body.get("method")) for path, body in server.asked] == [
        ("/collective_rpc", "mrl_join"),
        *[("/collective_rpc", "mrl_arrival")] * 3,
        ("/collective_rpc", "mrl_serve_arrived"),
        ("/update_weight_version", None),
        ("/reset_prefix_cache", None),
    ]
    seat = json.loads(server.asked[0][1]["args"][0])
    assert (seat["rank"], seat["world_size"]) == (3, 5)
    assert seat["buckets"] == [[["w", "bfloat16", [2, 3]]]]


def test_a_server_whose_answer_for_all_copies_is_not_known_takes_no_broadcast(server, ask):
    """One worker has one seat; without the extension, as on a GPU, there is none."""
    assert ask(VLLM.broadcast_seats) == BroadcastRanks(1)
    server.answers["/get_world_size"] = {"world_size": 2}
    with pytest.raises(EngineError, match="only as files"):
        ask(VLLM.broadcast_seats)
    server.answers |= {"/get_world_size": {"world_size": 1}, "/collective_rpc": web.Response(status=500)}
    with pytest.raises(EngineError, match="only as files"):
        ask(VLLM.broadcast_seats)


@pytest.mark.parametrize(
    ("said", "error"),
    [({"lost": "gone"}, PeerLost), ({"refused": "other"}, WeightsError), ({"?": ""}, EngineLost)],
)
def test_a_broadcast_that_does_not_arrive_is_told_before_anything_stops(server, ask, said, error):
    """A member that is lost costs its files; what is not what was published is refused."""
    server.answers["/collective_rpc"] = workers_say({"awaited": ""}, said)

    with pytest.raises(error, match=r"broadcast a-0\.1-1"):
        ask(lambda vllm, http: vllm.prepare_broadcast(http, INCOMING))


def test_prefixes_that_stay_in_the_cache_are_a_failure(server, ask):
    """They were computed with old weights."""
    server.answers["/reset_prefix_cache"] = {"success": False}

    with pytest.raises(HttpFailure, match="prefixes of the old weights"):
        ask(lambda backend, http: backend.load(http, Path("/w"), "0.1"))


def test_a_score_that_an_update_gave_up_is_none(server, ask):
    """Others are at temperature 1, which is all that vLLM scores at."""
    scored = sampled([4], "length") | {"prompt_logprobs": [None, {"8": {"logprob": -0.5}}, {"9": {"logprob": -2.0}}]}
    answers = iter([sampled([], "abort"), scored])
    server.answers["/inference/v1/generate"] = lambda body: (
        next(answers) if "prompt_logprobs" in body["sampling_params"] else server._generate(body)
    )

    assert ask(lambda backend, http: backend.score(http, [7, 8, 9], 1.0, 0)) is None
    assert ask(lambda backend, http: backend.score(http, [7, 8, 9], 1.0, 0)) == [(-0.5, []), (-2.0, [])]
    with pytest.raises(EngineError, match=r"only at temperature 1; got 0.7"):
        ask(lambda backend, http: backend.score(http, [7, 8, 9], 0.7, 0))


def test_given_tokens_come_beside_the_likeliest(server, ask):
    """As many as were asked for: the token itself is among them, or vLLM adds it."""
    rows = [None, {"8": {"logprob": -0.5}, "3": {"logprob": -1.5}}]
    rows += [{"9": {"logprob": -2.0}, "5": {"logprob": -1.0}, "4": {"logprob": -0.25}}]
    server.answers["/inference/v1/generate"] = lambda body: (
        sampled([4], "length") | {"prompt_logprobs": rows}
        if body["sampling_params"].get("prompt_logprobs") == 2
        else server._generate(body)
    )

    found = ask(lambda backend, http: backend.score(http, [7, 8, 9], 1.0, 2))

    assert found == [(-0.5, [(8, -0.5), (3, -1.5)]), (-2.0, [(4, -0.25), (5, -1.0)])]


PAUSED = {"message": "Generation is paused.", "type": "ServiceUnavailableError", "param": None, "code": 503}


@pytest.mark.parametrize(
    ("status", "text", "is_pause"),
    [
        (503, json.dumps({"error": PAUSED}), True),
        (503, json.dumps({"error": {**PAUSED, "type": "Service Unavailable"}}), False),
        (503, json.dumps({"error": "paused"}), False),
        (503, json.dumps(["paused"]), False),
        (503, "<html>no upstream</html>", False),
        (500, json.dumps({"error": PAUSED}), False),
    ],
)
def test_a_refusal_is_a_pause_when_vllm_calls_it_retryable(server, ask, status, text, is_pause):
    """A full queue, a proxy, and a failing engine are not; all keep their status and words."""
    asked = {"seed", "prompt_logprobs"}  # not by the probe
    server.answers["/inference/v1/generate"] = lambda body: (
        web.Response(status=status, text=text) if asked & set(body["sampling_params"]) else server._generate(body)
    )

    for call in (generate, lambda backend, http: backend.score(http, [7, 8], 1.0, 0)):
        with pytest.raises(HttpFailure) as caught:
            ask(call)
        assert isinstance(caught.value, Paused) == is_pause
        assert (caught.value.status, caught.value.text) == (status, text)


def test_usage_is_read_from_its_metrics(server, ask):
    """Summed over what it labels apart."""
    text = "vllm:num_requests_running 3.0\nvllm:num_requests_waiting 2.0\nvllm:kv_cache_usage_perc 0.25\n"
    text += "vllm:generation_tokens_total 42.0\n"
    text += "vllm:prefix_cache_queries_total 30.0\nvllm:prefix_cache_hits_total 16.0\n"
    server.answers["/metrics"] = lambda body: web.Response(text=text)

    assert ask(lambda backend, http: backend.usage(http)) == EngineUsage(3, 2, 0.25, 42, 30, 16)


def test_all_are_given_up_those_too_that_came_after_the_pause(server, ask):
    """vLLM 0.32 keeps them waiting while it is paused."""
    ask(lambda backend, http: backend.abort_all(http))

    assert server.asked == [("/pause", {"mode": "abort"}), ("/abort_requests", {})]
