"""Experts that engines tell with their answers: of which places, by which versions, in which form."""

import asyncio
import base64
import dataclasses
import io
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from mrl.engines import sglang_launch, vllm_launch
from mrl.engines.continuous import ContinuousBatch
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Decoding, GenerationRequest, Sampling, StopStrings
from mrl.engines.segments import Segments
from mrl.engines.server_backend import Launch, Segment
from mrl.engines.server_start import check_answers
from mrl.engines.sglang import SGLang
from mrl.engines.vllm import VLLM
from mrl.errors import EngineError, ModelFolderError
from mrl.models.routing.router_record import RouterRecord
from mrl.records.finish import FinishReason
from mrl.records.version import Version
from tests.support.mixtures import VOCAB_SIZE, make_mixture

SAMPLING = Sampling(1.0, 12, (1,), tells_experts=True)
OLD, NEW = Version(0, 1), Version(0, 2)


def plain_experts(model, ids: np.ndarray, cache: DynamicCache | None = None) -> np.ndarray:
    """[places, X] of all tokens but the last, by one forward, behind what is cached."""
    record = RouterRecord(model)
    with torch.no_grad():
        model(torch.from_numpy(ids[None, :-1].astype(np.int64)), use_cache=cache is not None, past_key_values=cache)
    return record.last()


def requests(*, tells_prompt: bool = True, decoding: Decoding | None = None) -> list[GenerationRequest]:
    """Prompts of 1 to 9 tokens, three answers each."""
    rng = np.random.default_rng(0)
    return [
        GenerationRequest(
            f"r{size}",
            rng.integers(2, VOCAB_SIZE, size).astype(np.int32),
            rng.integers(0, 2**63, 3, dtype=np.uint64),
            decoding=decoding,
            tells_prompt=tells_prompt,
        )
        for size in (1, 4, 9, 2)
    ]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("max_running", [2, 64])
def test_the_embedded_engine_tells_what_its_routers_chose(family, max_running):
    """Of each token, and with the first answer of the prompt; whatever rows ended and moved meanwhile."""
    model = make_mixture(family)
    batch = ContinuousBatch(model, SAMPLING, max_running=max_running, record=RouterRecord(model))
    batch.relabel(OLD)
    asked = {request.request_id: request for request in requests()}
    batch.submit([*asked.values()])

    num_seen = 0
    while batch.in_flight:
        for one in batch.step():
            prompt, answer = asked[one.request_id].prompt_token_ids, one.generation
            expected = plain_experts(make_mixture(family), np.concatenate([prompt, answer.token_ids]))
            start = 0 if one.index == 0 else prompt.size - 1
            np.testing.assert_array_equal(answer.experts, expected[start:])
            assert answer.experts.dtype == np.uint8
            num_seen += 1
    assert num_seen == 12


def test_an_answer_with_a_decoding_of_its_own_tells_none():
    """Nobody trains on it; nor does an engine that is not asked."""
    model = make_mixture()
    for sampling, decoding in ((SAMPLING, Decoding(0.5)), (dataclasses.replace(SAMPLING, tells_experts=False), None)):
        record = RouterRecord(model) if sampling.tells_experts else None
        batch = ContinuousBatch(model, sampling, max_running=8, record=record)
        batch.relabel(OLD)
        batch.submit(requests(decoding=decoding))
        while batch.in_flight:
            assert all(one.generation.experts is None for one in batch.step())


def test_tokens_of_two_versions_have_the_experts_of_each(tmp_path):
    """The embedded engine goes on with what it has cached."""
    first, second = make_mixture(seed=1), make_mixture(seed=2)
    for name, model in (("first", first), ("second", second)):
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text("{}")
    engine = EmbeddedEngine(tmp_path / "first", Sampling(1.0, 12, (), tells_experts=True), device="cpu", max_running=8)
    engine.label(OLD)
    request = requests(tells_prompt=False)[1]
    engine.submit([request])
    for _ in range(5):
        assert not engine.collect(0.0)
    engine.load(tmp_path / "second", NEW)
    answers = []
    while len(answers) < 3:
        answers += engine.collect(0.0)

    for one in answers:
        prompt, answer = request.prompt_token_ids, one.generation
        assert [(span.num_tokens, span.version) for span in answer.versions] == [(5, OLD), (7, NEW)]
        cache = DynamicCache()
        by_old = plain_experts(first, np.concatenate([prompt, answer.token_ids[:5]]), cache)[prompt.size - 1 :]
        by_new = plain_experts(second, answer.token_ids[4:], cache)
        np.testing.assert_array_equal(answer.experts, np.concatenate([by_old, by_new]))
        assert (plain_experts(first, np.concatenate([prompt, answer.token_ids]))[-7:] != by_new).any()


def test_an_engine_without_known_routers_is_refused_where_it_is_to_tell(tiny_model, tmp_path):
    """At its start, and in one line."""
    tiny_model("qwen3").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFolderError, match="router_replay: this model type is not supported"):
        EmbeddedEngine(tmp_path, SAMPLING, device="cpu", max_running=8)


class Telling:
    """A server that samples 2, 3, 4, ... and says of each place that its expert is the place itself."""

    name = "toy"
    base_url = "toy"

    def __init__(self, *, gives_up_after: int | None = None, tells: bool = True) -> None:
        self.asked: list[tuple[int, int | None]] = []
        self._gives_up_after, self._tells = gives_up_after, tells

    def _told(self, num_before: int, num_tokens: int, first: int) -> np.ndarray | None:
        places = np.arange(first, num_before + num_tokens - 1, dtype=np.uint8)[:, None]
        return places if self._tells and num_tokens else None

    async def probe(self, http) -> None: ...

    async def generate(self, http, token_ids, sampling, *, max_new_tokens, seed, request_id, experts_from=0) -> Segment:
        self.asked.append((len(token_ids), experts_from if sampling.tells_experts else None))
        wanted, reason = max_new_tokens, FinishReason.LENGTH
        if self._gives_up_after is not None and len(self.asked) <= 2:
            wanted, reason = min(wanted, self._gives_up_after * (len(self.asked) - 1)), FinishReason.ABORT
        told = self._told(len(token_ids), wanted, experts_from)
        return Segment([2] * wanted, [-1.0] * wanted, reason, experts=told)

    async def stream(self, http, token_ids, sampling, *, max_new_tokens, seed, request_id, experts_from):
        self.asked.append((len(token_ids), experts_from))
        for number in range(max_new_tokens):
            is_last = number + 1 == max_new_tokens
            told = self._told(len(token_ids), max_new_tokens, experts_from) if is_last else None
            yield Segment([2], [-1.0], FinishReason.LENGTH if is_last else FinishReason.ABORT, experts=told)


def answered(server: Telling, index: int = 0, *, streams: bool = False, sampling: Sampling = SAMPLING) -> Any:
    """Of a prompt of four tokens."""
    seeds = np.array([7, 8], dtype=np.uint64)
    request = GenerationRequest("r", np.array([3, 4, 5, 6], np.int32), seeds, streams=streams, tells_prompt=True)

    async def script() -> Any:
        serving = Segments(server, None, sampling, drain_s=5.0)  # type: ignore[arg-type]
        serving._http = server  # type: ignore[assignment]
        serving.label(OLD, "")
        return (await serving.answer(request, index)).generation

    return asyncio.run(script())


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("index", "first"), [(0, 0), (1, 3)])
def test_a_server_is_asked_from_the_prompt_on_or_from_its_last_place(index, first, streams):
    """The first answer of a request brings the prompt's; a stream brings them all with its last part."""
    server = Telling()

    answer = answered(server, index, streams=streams)

    assert server.asked == [(4, first)]
    assert answer.experts[:, 0].tolist() == [*range(first, 4 + 12 - 1)]


def test_segments_of_an_answer_are_joined():
    """One that was given up before its first token leaves the prompt to the next; nothing is asked for again."""
    server = Telling(gives_up_after=5)

    answer = answered(server)

    assert server.asked == [(4, 0), (4, 0), (9, 8)]
    assert answer.token_ids.size == 12
    assert answer.experts[:, 0].tolist() == [*range(15)]


def spelled(ids: Sequence[int]) -> bytes:
    return b"a" * len(ids)


@pytest.mark.parametrize("stop", [None, StopStrings((b"zz",), spelled, spelled)])
def test_what_was_not_told_of_a_call_is_not_told_by_another(monkeypatch, stop):
    """It would be of other weights, or, where an answer is cut at a stop string, of other tokens; so nobody asks."""
    monkeypatch.setattr("mrl.engines.segments.TOKENS_BETWEEN_STOPS", 8)

    class Mute(Telling):
        async def generate(self, http, token_ids, sampling, **asked: Any) -> Segment:
            said = await super().generate(http, token_ids, sampling, **asked)
            return dataclasses.replace(said, experts=None) if len(self.asked) == 2 else said

    server = Mute(gives_up_after=5)

    answer = answered(server, sampling=dataclasses.replace(SAMPLING, stop=stop))

    assert server.asked == [(4, 0), (4, 0), (9, None)]
    assert answer.token_ids.size == 12
    assert answer.experts is None


def test_what_nobody_asked_for_is_not_taken():
    """A server may tell it all the same, from its first place on."""
    assert answered(Telling(), 1, sampling=dataclasses.replace(SAMPLING, tells_experts=False)).experts is None


def test_a_server_that_tells_nothing_is_named_at_its_start():
    """Somebody else's, that was started without; it may be that none of its answers is asked for as it has to be."""
    server = Telling(tells=False)
    with pytest.raises(EngineError, match=r"toy at toy: .*does not report the experts.*--enable-return-routed-experts"):
        asyncio.run(check_answers(server, server, SAMPLING))  # type: ignore[arg-type]
    asyncio.run(check_answers(Telling(), server, SAMPLING))  # type: ignore[arg-type]


def test_a_server_that_is_to_tell_nothing_is_not_asked():
    """Not even at its start."""
    server = Telling(tells=False)
    silent = dataclasses.replace(SAMPLING, tells_experts=False)
    asyncio.run(check_answers(server, server, silent))  # type: ignore[arg-type]
    assert not server.asked


class Recorded:
    """An HTTP client whose server answers with this, and which keeps what it was asked."""

    base_url = "http://127.0.0.1:1"

    def __init__(self, *answers: Any) -> None:
        self._answers = answers
        self.body: dict[str, Any] = {}

    async def post_json(self, route: str, body: Any, *, within_s: float | None) -> Any:
        self.body = body
        return self._answers[0]

    async def post_events(self, route: str, body: Any) -> AsyncGenerator[Any, None]:
        self.body = body
        for answer in self._answers:
            yield answer


def ask(backend: SGLang | VLLM, http: Recorded, *, sampling: Sampling = SAMPLING, experts_from: int = 2) -> Segment:
    asked = {"max_new_tokens": 9, "seed": 1, "request_id": "r", "experts_from": experts_from}
    return asyncio.run(backend.generate(http, [7, 8, 9], sampling, **asked))  # type: ignore[arg-type]


def ask_parts(backend: SGLang | VLLM, http: Recorded) -> list[Segment]:
    asked = {"max_new_tokens": 9, "seed": 1, "request_id": "r", "experts_from": 2}

    async def script() -> list[Segment]:
        async with aclosing(backend.stream(http, [7, 8, 9], SAMPLING, **asked)) as parts:  # type: ignore[arg-type]
            return [part async for part in parts]

    return asyncio.run(script())


def of_sglang(ids: list[int], num_so_far: int, reason: str = "", told: np.ndarray | None = None) -> dict[str, Any]:
    """As SGLang 0.5.23 gave it."""
    meta: dict[str, Any] = {"prompt_tokens": 3, "completion_tokens": num_so_far}
    meta |= {"finish_reason": {"type": reason} if reason else None}
    meta["output_token_logprobs"] = [(-0.1, one, None) for one in ids]
    if told is not None:
        meta["routed_experts"] = base64.b64encode(told.astype("<i4").tobytes()).decode()
    return {"output_ids": ids, "meta_info": meta}


def of_vllm(ids: list[int], reason: str | None, told: np.ndarray | None = None) -> dict[str, Any]:
    """As vLLM 0.32 and 0.33 say that they give it: a file of numpy."""
    file = io.BytesIO()
    if told is not None:
        np.save(file, told)
    choice = {"finish_reason": reason, "token_ids": ids, "weight_versions": []}
    choice["logprobs"] = {"content": [{"logprob": -0.1} for _ in ids]}
    choice["routed_experts"] = None if told is None else base64.b64encode(file.getvalue()).decode()
    return {"choices": [choice]}


TOLD = np.arange(24).reshape(2, 3, 4)


@pytest.mark.parametrize("largest", [23, 300])
def test_sglang_tells_them_flat_in_thirty_two_bits(largest):
    """Kept in as few as they need; asked from a place on, for two tokens behind three."""
    told = np.where(TOLD == 23, largest, TOLD)
    http = Recorded(of_sglang([5, 6], 2, "length", told))

    segment = ask(SGLang(), http)

    assert (http.body["return_routed_experts"], http.body["routed_experts_start_len"]) == (True, 2)
    np.testing.assert_array_equal(segment.experts, told.reshape(2, 12))
    assert segment.experts.itemsize == (1 if largest < 256 else 2)


@pytest.mark.parametrize("dtype", ["u1", "<u2"])
def test_vllm_tells_them_as_a_file_of_numpy(dtype):
    """In the same place of the answer for all kinds of them."""
    http = Recorded(of_vllm([5, 6], "length", TOLD.astype(dtype)))

    segment = ask(VLLM(), http)

    assert http.body["sampling_params"]["routed_experts_prompt_start"] == 2
    np.testing.assert_array_equal(segment.experts, TOLD.reshape(2, 12))


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def saved(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, np.array(array), allow_pickle=True)
    return in_base64(file.getvalue())


class Trap:
    """Whoever unpickles it fails."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise RuntimeError('unpickled')",)


FLAT = np.zeros((2, 12), "<i4")
NO_EXPERTS = ["%%%", "€", 7, [1, 2], {}, "", in_base64(b"12345"), in_base64(b"\x93NUMPY")]
NO_EXPERTS_OF_SGLANG = [in_base64(ids.tobytes()) for ids in (FLAT - 1, FLAT + 65_536, FLAT[:, :0], FLAT.ravel()[:23])]
NO_EXPERTS_OF_VLLM = [
    *(saved([[[one, 3]]] * 2) for one in (-1, 65_536, np.nan, 1.5, "a", Trap())),
    *(saved(np.zeros(shape, int)) for shape in ((), (3, 3, 4), (1, 3, 4), (2, 0, 4))),
    saved(np.ones((2, 3, 4), bool)),
]


@pytest.mark.parametrize("told", NO_EXPERTS + NO_EXPERTS_OF_SGLANG)
def test_what_sglang_tells_in_another_form_is_not_taken(told):
    """The answer is as good as ever."""
    answer = of_sglang([5, 6], 2, "length")
    answer["meta_info"]["routed_experts"] = told
    segment = ask(SGLang(), Recorded(answer))
    assert (segment.token_ids, segment.experts) == ([5, 6], None)


@pytest.mark.parametrize("told", NO_EXPERTS + NO_EXPERTS_OF_VLLM)
def test_what_vllm_tells_in_another_form_is_not_taken(told):
    """Nor is anything unpickled that a server says."""
    answer = of_vllm([5, 6], "length")
    answer["choices"][0]["routed_experts"] = told
    segment = ask(VLLM(), Recorded(answer))
    assert (segment.token_ids, segment.experts) == ([5, 6], None)


@pytest.mark.parametrize(
    ("backend", "answer"),
    [(SGLang(), of_sglang([], 0, "abort")), (VLLM(), of_vllm([], "abort")), (VLLM(), of_vllm([5], "length"))],
)
def test_where_nothing_is_told_nothing_is_known(backend, answer):
    """As of one that was given up before its first token."""
    assert ask(backend, Recorded(answer)).experts is None


def test_a_policy_that_replays_nothing_asks_for_nothing():
    """And pays not a byte."""
    silent = dataclasses.replace(SAMPLING, tells_experts=False)
    for backend, answer in ((SGLang(), of_sglang([5], 1, "length")), (VLLM(), of_vllm([5], "length"))):
        http = Recorded(answer)
        ask(backend, http, sampling=silent, experts_from=0)
        assert "routed" not in json.dumps(http.body)


def test_streams_tell_them_at_their_end():
    """Of all tokens of the call."""
    sglang, vllm = SGLang(), VLLM()
    sglang._sends_parts = True
    parts = ask_parts(sglang, Recorded(of_sglang([5], 1), of_sglang([6], 2, "length", TOLD)))
    parts += ask_parts(vllm, Recorded(of_vllm([5], None), of_vllm([6], "length", TOLD.astype("u1"))))

    assert [part.experts is None for part in parts] == [True, False, True, False]
    for part in (parts[1], parts[3]):
        np.testing.assert_array_equal(part.experts, TOLD.reshape(2, 12))


def launch(folder: Path, device: str) -> Launch:
    make_mixture(head_dim=32).save_pretrained(folder)
    return Launch(Path("/python"), folder, "127.0.0.1", 1, device, "float32", 1, 8, 256, 0, tells_experts=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sglang_is_started_able_to_tell(tmp_path, device):
    """On a CPU by an entry of ours; one that is not asked to tell is started as ever."""
    started = launch(tmp_path, device)
    words = sglang_launch.command(started)

    assert "--enable-return-routed-experts" in words
    assert (words[1:3] == ["-P", str(sglang_launch.EXPERTS_ON_CPU)]) == (device == "cpu")
    assert sglang_launch.EXPERTS_ON_CPU.is_file()
    silent = sglang_launch.command(dataclasses.replace(started, tells_experts=False))
    assert silent[1:3] == ["-m", "sglang.launch_server"]
    assert "--enable-return-routed-experts" not in silent


def test_vllm_tells_on_a_gpu_alone(tmp_path):
    """On a CPU it would end at its start, with words about model runners."""
    started = launch(tmp_path, "cuda")

    assert "--enable-return-routed-experts" in vllm_launch.command(started)
    assert "--enable-return-routed-experts" not in vllm_launch.command(
        dataclasses.replace(started, tells_experts=False)
    )
    with pytest.raises(EngineError, match=r"learner\.router_replay: vLLM on a CPU does not report"):
        vllm_launch.command(dataclasses.replace(started, device="cpu"))
