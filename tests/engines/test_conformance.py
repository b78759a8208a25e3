"""What every engine has to do, the same for all; vLLM and SGLang are the real servers.

Where an engine's environment is missing the tests fail with the command that makes it. They share one server, so what
ends it stands last, and what is said of its first weights first.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import (
    Decoding,
    Engine,
    EngineUsage,
    FinishedAnswer,
    GenerationRequest,
    PartialAnswer,
    Sampling,
    ScoringRequest,
    StopStrings,
)
from mrl.engines.environment import engine_python
from mrl.engines.http import Http
from mrl.engines.server_backend import Launch, ServerBackend
from mrl.engines.server_engine import ServerEngine
from mrl.engines.server_timeouts import ServerTimeouts
from mrl.engines.sglang import SGLang
from mrl.engines.vllm import VLLM
from mrl.errors import PeerLost, WeightsError, WeightsUnproved
from mrl.models import tensor_broadcast
from mrl.models.parameters import named_weights
from mrl.records.finish import FinishReason
from mrl.records.version import Version
from mrl.rollout.weight_updates import prove
from mrl.weights.canary import canary_sequences
from mrl.weights.frozen_manifest import describe_folder
from tests.support.engine_rig import EOS_IDS, VOCAB_SIZE, Rig, Sender, Weights, full_forward
from tests.support.worker_rig import WorkerRig

pytestmark = pytest.mark.timeout(600)
TOLERANCE_NATS = 1e-4
SILENCE_S = 12.0
ENDLESS_TOKENS = 500


@dataclass(frozen=True)
class Kind:
    """One kind of engine, and how much it is asked."""

    backend: type[ServerBackend] | None
    max_new_tokens: int
    """Long enough that an update can land in the middle."""
    keeps_cache: bool = False
    """Whether an answer goes on over an update with what older weights have left in the key-value cache."""
    heeds_seeds: bool = True
    """SGLang's backend for CPUs draws numbers of its own."""


KINDS = {
    "embedded": Kind(None, 160, keeps_cache=True),
    "vllm": Kind(VLLM, 160),
    "sglang": Kind(SGLang, 160, heeds_seeds=False),
}
SERVERS = [pytest.param(name, marks=pytest.mark.engines) for name, kind in KINDS.items() if kind.backend]


def sampling(kind: Kind, temperature: float) -> Sampling:
    return Sampling(temperature, kind.max_new_tokens, EOS_IDS)


@pytest.fixture(scope="module", params=["embedded", *SERVERS])
def kind(request) -> Kind:
    """The kind of engine under test."""
    return KINDS[request.param]


@pytest.fixture(scope="module")
def rig(kind, request, exported, tmp_path_factory) -> Iterator[Rig]:
    """An engine at temperature 0.7; started once, from the folder of an exported policy."""
    folder = exported.folder
    if kind.backend is None:
        engine: Engine = EmbeddedEngine(folder, sampling(kind, 0.7), device="cpu", max_running=64)
    else:
        backend = kind.backend()
        python = engine_python(backend.name, device="cpu")
        launch = Launch(python, folder, "127.0.0.1", 0, "cpu", "float32", 1, 64, 512, 0)
        log = tmp_path_factory.mktemp(backend.name) / "server.log"
        bounds = ServerTimeouts(start_s=400.0, silence_s=SILENCE_S, stall_s=60.0, load_s=60.0)
        engine = ServerEngine(backend, sampling(kind, 0.7), launch=launch, log=log, bounds=bounds)
    try:
        yield Rig(engine, 0.7)
    finally:
        engine.close()


@pytest.fixture
def another_on(kind, monkeypatch) -> Callable[[ServerEngine, Sampling], ServerEngine]:
    """Another engine on the server of the first, reached in the same way: by its socket file, or with its key."""

    def make(first: ServerEngine, sampling: Sampling) -> ServerEngine:
        session = first._link()._session
        path = getattr(session.connector, "path", "")
        key = session.headers.get("Authorization", "").removeprefix("Bearer ")
        as_the_first = partial(Http, socket_file=Path(path) if path else None, key=key)
        monkeypatch.setattr("mrl.engines.server_engine.Http", as_the_first)
        return ServerEngine(kind.backend(), sampling, launch=None, url=first._link().base_url)

    return make


@pytest.fixture
def at_temperature_1(kind, rig, weights, another_on) -> Iterator[Rig]:
    """The same server, which knows no temperature of its own, found at its URL; or another embedded engine."""
    version = rig.serve(weights("a"))
    if kind.backend is None:
        engine: Engine = EmbeddedEngine(weights("c").folder, sampling(kind, 1.0), device="cpu", max_running=64)
    else:
        engine = another_on(rig.engine, sampling(kind, 1.0))
    engine.load(weights("a").folder, version)
    other = Rig(engine, 1.0)
    other.served[version] = weights("a")
    yield other
    engine.close()


@pytest.fixture
def endless(kind, rig, weights, another_on) -> Iterator[Rig]:
    """The same server, asked for answers that nothing ends before they are long."""
    version, long = rig.serve(weights("a")), Sampling(1.0, ENDLESS_TOKENS, ())
    if kind.backend is None:
        engine: Engine = EmbeddedEngine(weights("a").folder, long, device="cpu", max_running=64)
    else:
        engine = another_on(rig.engine, long)
    engine.load(weights("a").folder, version)
    yield Rig(engine, 1.0)
    engine.close()


def server_usage(engine: Engine) -> EngineUsage:
    """What the server says now; `usage` may be a second old, and counts what has come."""
    if isinstance(engine, ServerEngine):
        return engine._run(engine._backend.usage(engine._link()), 10.0)
    return engine.usage()


def check_logprobs(rig: Rig, requests: list[GenerationRequest], *, keeps_cache: bool = False) -> list[FinishedAnswer]:
    """All answers, each token of which has the log-probability that a full forward gives it."""
    finished = rig.collect(sum(request.seeds.size for request in requests))
    check_answers(rig, requests, finished, keeps_cache=keeps_cache)
    return finished


def check_answers(
    rig: Rig, requests: list[GenerationRequest], finished: list[FinishedAnswer], *, keeps_cache: bool = False
) -> None:
    """Each token has the log-probability that a full forward gives it."""
    asked = {request.request_id: request for request in requests}
    for one in finished:
        expected = rig.expected(asked[one.request_id], one, keeps_cache=keeps_cache)
        np.testing.assert_allclose(one.generation.logprobs, expected, atol=TOLERANCE_NATS, rtol=0)


def test_an_exported_policy_answers_as_the_learner_would(rig, exported):
    """The engine is started on what `mrl export` wrote, and loads nothing else: so this test stands first."""
    version = Version(0, 0)
    rig.served[version] = exported
    rig.engine.label(version)
    requests = [rig.ask(answers=2, prompt_tokens=size) for size in (1, 7)]
    rig.engine.submit(requests)

    finished = check_logprobs(rig, requests)

    assert {span.version for one in finished for span in one.generation.versions} == {version}
    text = [7, 8, 9, 300]
    expected = full_forward([(exported, text)], 1.0)
    np.testing.assert_allclose(rig.engine.score([text])[0], expected, atol=TOLERANCE_NATS, rtol=0)


def test_ids_in_are_ids_out_with_the_logprobs_of_a_full_forward(rig, weights):
    """Under the weights that were loaded, given the very ids that were handed in, at temperature 0.7."""
    version = rig.serve(weights("a"))
    requests = [rig.ask(answers=2, prompt_tokens=size) for size in (1, 3, 9)]
    rig.engine.submit(requests)

    finished = check_logprobs(rig, requests)

    assert all(span.version == version for one in finished for span in one.generation.versions)
    answers = {tuple(one.generation.token_ids.tolist()) for one in finished}
    assert len(answers) == 6, "seeds differ, and so do answers"


def lags(weights: Weights, prompt: np.ndarray, answer: np.ndarray) -> np.ndarray:
    """[T] nats by which each token of an answer is less likely than the likeliest in its place."""
    ids = torch.tensor([[*prompt.tolist(), *answer.tolist()]])
    with torch.no_grad():
        logits = weights.model(input_ids=ids[:, :-1]).logits[0, prompt.size - 1 :].float()
    return (logits.max(-1).values - logits.gather(-1, ids[0, prompt.size :, None]).squeeze(-1)).numpy()


def test_an_answer_may_be_decoded_in_its_own_way(rig, weights):
    """Greedily, or from a nucleus so small that it holds one token; answers beside it are sampled as ever."""
    rig.serve(weights("a"))
    plain, asked = rig.ask(answers=2, prompt_tokens=3), rig.ask(answers=2, prompt_tokens=5)
    own = [Decoding(0.0), Decoding(0.7, top_p=1e-6), Decoding(2.0)]
    decoded = [replace(asked, request_id=f"d{place}", decoding=one) for place, one in enumerate(own)]
    rig.engine.submit([*decoded, plain])

    finished = rig.collect(8)

    check_answers(rig, [plain], [one for one in finished if one.request_id == plain.request_id])
    prompt = asked.prompt_token_ids
    lag = {
        request.request_id: max(
            float(lags(weights("a"), prompt, one.generation.token_ids).max())
            for one in finished
            if one.request_id == request.request_id
        )
        for request in decoded
    }
    assert lag["d0"] < TOLERANCE_NATS
    assert lag["d1"] < TOLERANCE_NATS
    assert lag["d2"] > 1.0, "at temperature 2, the highest that all engines take, other tokens come"


def test_an_answer_may_have_its_own_limit_and_its_own_stop_strings(rig, weights):
    """Answers beside it keep the policy's; a limit above the policy's is the policy's."""
    rig.serve(weights("a"))
    asked = rig.ask(answers=1, prompt_tokens=5)

    def spelled(token_ids):
        return b"".join(b"<%d>" % token_id for token_id in token_ids)

    def sampled(**own):
        request = replace(asked, request_id=f"{own}", decoding=Decoding(0.0, **own))
        rig.engine.submit([request])
        (found,) = rig.collect(1)
        return found.generation

    free, short = sampled(), sampled(max_new_tokens=3)
    assert (short.token_ids.tolist(), short.finish_reason) == (free.token_ids.tolist()[:3], FinishReason.LENGTH)
    assert sampled(max_new_tokens=100_000).token_ids.size == free.token_ids.size
    wanted = free.token_ids.tolist()[:4]
    ended = sampled(stop=StopStrings((spelled(wanted[-1:]),), spelled, spelled))
    assert ended.token_ids.tolist() == wanted[: wanted.index(wanted[-1]) + 1]
    assert ended.finish_reason is FinishReason.STOP


def test_given_tokens_are_scored_beside_the_likeliest(rig, weights):
    """At temperature 1, whatever the engine samples at."""
    rig.serve(weights("a"))
    text = [7, 8, 9, 300, 12]

    found = rig.engine.score_given(text)

    with torch.no_grad():
        rows = weights("a").model(input_ids=torch.tensor([text[:-1]])).logits[0].float().log_softmax(-1)
    expected = full_forward([(weights("a"), text)], 1.0)
    np.testing.assert_allclose([one.logprob for one in found], expected, atol=TOLERANCE_NATS, rtol=0)
    likeliest = [one.likeliest[0] for one in found]
    np.testing.assert_allclose([logprob for _, logprob in likeliest], rows.max(-1).values, atol=TOLERANCE_NATS)
    assert [token_id for token_id, _ in likeliest] == rows.argmax(-1).tolist()


def test_equal_seeds_give_equal_answers(rig, kind, weights):
    """Whatever the request is called."""
    rig.serve(weights("a"))
    first = rig.ask(answers=2)
    requests = [first, replace(first, request_id="again")]
    rig.engine.submit(requests)

    answers = {(one.request_id, one.index): one.generation.token_ids.tolist() for one in rig.collect(4)}

    pairs = [(answers[first.request_id, index], answers["again", index]) for index in range(2)]
    assert all((one == other) == kind.heeds_seeds for one, other in pairs)


def test_logprobs_at_temperature_1(at_temperature_1, weights):
    """And scores of given answers are those that they were sampled with."""
    rig = at_temperature_1
    request = rig.ask(answers=2)
    rig.engine.submit([request])

    finished = check_logprobs(rig, [request])

    answers = [one.generation.token_ids for one in finished]
    scored = rig.engine.score_answers(ScoringRequest(request.prompt_token_ids, answers, num_likeliest=3))
    for one, score in zip(finished, scored, strict=True):
        np.testing.assert_allclose(score.logprobs, one.generation.logprobs, atol=TOLERANCE_NATS, rtol=0)
        text = torch.tensor([[*request.prompt_token_ids.tolist(), *one.generation.token_ids.tolist()]])
        with torch.no_grad():
            rows = weights("a").model(input_ids=text[:, :-1]).logits[0].float().log_softmax(-1)
        likeliest = rows[-len(score.logprobs) :].topk(3)
        np.testing.assert_allclose(score.likeliest_logprobs, likeliest.values, atol=TOLERANCE_NATS, rtol=0)
        np.testing.assert_array_equal(score.likeliest_ids, likeliest.indices)


def test_weights_come_by_broadcast_in_mid_answer(rig, kind, weights, monkeypatch):
    """In many buckets; tokens before and after name their versions; the engine reports the bytes that were sent."""
    monkeypatch.setattr(tensor_broadcast, "BUCKET_BYTES", 64 * 1024)
    before, version = rig.serve(weights("b")), Version(1, 1)
    rig.served[version] = weights("a")
    sender = Sender(named_weights(weights("a").model), rig.engine.broadcast_seats().num_ranks, name="a-1.1-1")
    requests = [rig.ask(answers=4) for _ in range(4)]
    rig.engine.submit(requests)
    finished = rig.engine.collect(0.2)

    with ThreadPoolExecutor(2) as threads:
        sending = threads.submit(sender.send)
        receiving = threads.submit(rig.engine.receive, sender.incoming, version)
        finished += rig.collect(16 - len(finished))
        receiving.result(120)
        assert sending.result(120)

    check_answers(rig, requests, finished, keeps_cache=kind.keeps_cache)
    assert rig.engine.version == version
    assert rig.engine.checksums() == sender.incoming.digests
    assert {span.version for one in finished for span in one.generation.versions} <= {before, version}


def test_a_broadcast_that_comes_apart_leaves_no_mixture_behind(rig, kind, weights, monkeypatch):
    """The sender goes after two buckets: the old weights are served on or none, and files cure it."""
    monkeypatch.setattr(tensor_broadcast, "BUCKET_BYTES", 64 * 1024)
    monkeypatch.setattr(tensor_broadcast, "STALL_S", 2.0)
    before = rig.serve(weights("b"))
    sender = Sender(named_weights(weights("a").model), rig.engine.broadcast_seats().num_ranks, name="a-1.2-1")

    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(rig.engine.receive, sender.incoming, Version(1, 2))
        group = sender.send(buckets=2)
        del group
        with pytest.raises(PeerLost):
            receiving.result(120)

    if kind.backend is not SGLang:  # the others take it beside the tensors that they serve with
        assert rig.engine.version == before
        old = rig.ask(answers=2)
        rig.engine.submit([old])
        check_logprobs(rig, [old])
    else:
        assert rig.engine.version is None
        with pytest.raises(WeightsError):
            rig.engine.submit([rig.ask()])
    version = Version(1, 3)
    rig.served[version] = weights("a")
    rig.engine.load(weights("a").folder, version, weights("a").digests())
    request = rig.ask(answers=2)
    rig.engine.submit([request])
    check_logprobs(rig, [request])


def test_64_answers_at_once_end_at_an_eos_or_at_the_limit(rig, kind, weights):
    """Each comes once. An EOS is the last token and stands nowhere else; without one the answer has the full length."""
    rig.serve(weights("a"))
    requests = [rig.ask(answers=4) for _ in range(16)]
    rig.engine.submit(requests)

    finished = rig.collect(64)

    assert {(one.request_id, one.index) for one in finished} == {(r.request_id, i) for r in requests for i in range(4)}
    assert len(finished) == 64
    reasons = {one.generation.finish_reason for one in finished}
    assert FinishReason.STOP in reasons
    for one in finished:
        answer = one.generation
        assert not np.isin(answer.token_ids[:-1], EOS_IDS).any()
        assert (answer.token_ids[-1] in EOS_IDS) == (answer.finish_reason is FinishReason.STOP)
        assert answer.token_ids.size == answer.logprobs.size
        assert answer.token_ids.size <= kind.max_new_tokens
        assert answer.finished or answer.token_ids.size == kind.max_new_tokens
    assert rig.engine.collect(0.0) == []


def test_a_stop_string_ends_an_answer_and_what_was_sampled_is_kept(kind, rig, weights, another_on):
    """Across tokens, on engines that know no text; every log-probability is that of a full forward."""
    version, limit = rig.serve(weights("a")), 160
    stop = StopStrings((b"ab",), letters, letters)
    long = Sampling(0.7, limit, EOS_IDS, stop)
    if kind.backend is None:
        engine: Engine = EmbeddedEngine(weights("a").folder, long, device="cpu", max_running=16)
    else:
        engine = another_on(rig.engine, long)
    engine.load(weights("a").folder, version)
    asking = Rig(engine, 0.7)
    asking.served[version] = weights("a")
    requests = [asking.ask(answers=4) for _ in range(8)]
    try:
        engine.submit(requests)
        finished = check_logprobs(asking, requests)
    finally:
        engine.close()

    ends = [letters(one.generation.token_ids).find(b"ab") for one in finished]
    assert sum(end >= 0 for end in ends) > 8
    for one, end in zip(finished, ends, strict=True):
        size, last = one.generation.token_ids.size, one.generation.token_ids[-1]
        assert end in (-1, size - 2)
        assert one.generation.finished == (end >= 0 or last in EOS_IDS)
        assert one.generation.finished or size == limit


def letters(token_ids: Sequence[int]) -> bytes:
    """A text for ids of words that no engine reads."""
    return bytes(b"abcde"[token_id % 5] for token_id in token_ids)


def test_long_prompts_that_come_together_are_all_read(rig, weights):
    """More tokens at once than a server reads in one step: one that is read in parts has a seed like any other."""
    rig.serve(weights("a"))
    requests = [rig.ask(answers=1, prompt_tokens=150) for _ in range(64)]
    rig.engine.submit(requests)

    assert {one.request_id for one in rig.collect(64)} == {request.request_id for request in requests}


def test_what_is_aborted_is_not_collected(rig, weights):
    """And what is not aborted comes all the same."""
    rig.serve(weights("a"))
    dropped, kept = rig.ask(answers=4), rig.ask(answers=2)
    rig.engine.submit([dropped, kept])
    rig.engine.abort([dropped.request_id])

    assert {one.request_id for one in rig.collect(2)} == {kept.request_id}
    assert rig.engine.collect(1.0) == []


def test_an_answer_that_streams_is_told_as_it_grows(endless, weights):
    """Over an update, too: each time the beginning of what it is at its end, which comes later."""
    streamed, other = replace(endless.ask(answers=2), streams=True), endless.ask(answers=2)
    endless.served[endless.engine.version] = weights("a")
    endless.engine.submit([streamed, other])
    grown, ended, is_updated = list[PartialAnswer](), list[FinishedAnswer](), False
    while len(ended) < 4:
        ended += endless.engine.collect(1.0)
        grown += endless.engine.grown()
        if not is_updated and {one.index for one in grown} == {0, 1}:
            assert not ended
            assert endless.engine.grown() == [], "each is told once"
            endless.serve(weights("b"))
            is_updated = True

    assert {one.request_id for one in grown} == {streamed.request_id}
    assert all(len(one.generation.versions) == 2 for one in ended if one.request_id == streamed.request_id)
    for told in grown:
        (whole,) = [one.generation for one in ended if (one.request_id, one.index) == (told.request_id, told.index)]
        size = told.generation.token_ids.size
        assert (told.generation.finish_reason, 0 < size < ENDLESS_TOKENS) == (FinishReason.ABORT, True)
        assert told.generation.token_ids.tolist() == whole.token_ids[:size].tolist()
        assert told.generation.logprobs.tolist() == whole.logprobs[:size].tolist()
        assert [one.version for one in told.generation.versions] == [one.version for one in whole.versions][
            : len(told.generation.versions)
        ]
        assert sum(one.num_tokens for one in told.generation.versions) == size
    for index in (0, 1):
        sizes = [told.generation.token_ids.size for told in grown if told.index == index]
        assert sizes == sorted(set(sizes))
        assert len(sizes) > 1


@pytest.mark.parametrize("streams", [False, True])
def test_the_server_itself_gives_up_what_is_aborted(endless, weights, streams):
    """By its own metrics nothing runs any more, and most of what was asked was never sampled."""
    asked = replace(endless.ask(answers=32), streams=streams)
    before = server_usage(endless.engine)
    endless.engine.submit([asked])
    while (running := server_usage(endless.engine)).generated_tokens < before.generated_tokens + 100:
        assert endless.engine.collect(0.01) == []
    assert running.running > 0

    endless.engine.abort([asked.request_id])

    deadline_s = time.monotonic() + 120.0
    while (after := server_usage(endless.engine)).running or after.waiting:
        assert time.monotonic() < deadline_s, after
        assert endless.engine.collect(0.05) == []
    assert after.generated_tokens - before.generated_tokens < 32 * ENDLESS_TOKENS / 2
    assert endless.engine.collect(0.0) == []


def test_an_update_takes_effect_at_a_version_boundary(rig, weights):
    """Answers that are handed in behind it, scores and checksums are those of the new weights."""
    rig.serve(weights("a"))
    before = rig.ask()
    rig.engine.submit([before])
    check_logprobs(rig, [before])
    version = rig.serve(weights("b"))
    after = rig.ask()
    rig.engine.submit([after])

    finished = check_logprobs(rig, [after])

    assert {span.version for one in finished for span in one.generation.versions} == {version} == {rig.engine.version}
    texts = [[7, 8, 9, 300], [1, 2, 3, 4]]
    for text, row in zip(texts, rig.engine.score(texts), strict=True):
        np.testing.assert_allclose(row, full_forward([(weights("b"), text)], 1.0), atol=TOLERANCE_NATS, rtol=0)
        assert np.abs(row - full_forward([(weights("a"), text)], 1.0)).max() > 0.1
    held = rig.engine.checksums()
    assert held is None or held == weights("b").digests()


def test_an_update_in_mid_answer_gives_spans_that_are_right(rig, kind, weights):
    """Each span has the log-probabilities of its own weights; nothing sampled before is lost."""
    for _ in range(5):  # on a busy machine answers may be over before the update is ready
        if any(len(one.generation.versions) == 2 for one in _over_an_update(rig, kind, weights)):
            return
    pytest.fail("the update landed in no answer")


def _over_an_update(rig, kind, weights):
    """32 answers, all of them right, with new weights as soon as some of them are under way."""
    rig.serve(weights("a"))
    requests = [rig.ask(answers=8) for _ in range(4)]
    start = rig.engine.usage().generated_tokens
    rig.engine.submit(requests)
    finished = []
    update = threading.Thread(target=rig.serve, args=(weights("b"),))
    while not update.ident or update.is_alive():
        finished += rig.engine.collect(0.05)
        if not update.ident and (finished or rig.engine.usage().generated_tokens > start + 100):
            update.start()
    update.join()
    finished += rig.collect(32 - len(finished))

    asked = {request.request_id: request for request in requests}
    for one in finished:
        expected = rig.expected(asked[one.request_id], one, keeps_cache=kind.keeps_cache)
        np.testing.assert_allclose(one.generation.logprobs, expected, atol=TOLERANCE_NATS, rtol=0)
        assert one.generation.token_ids.size <= kind.max_new_tokens
    return finished


def step_behind(tensors: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    """The first step of Adam at a learning rate of 1e-6 has not been taken."""
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors.values():
        tensor.sub_(1e-6 * torch.randn(tensor.shape, generator=generator).sign())


def two_swapped(tensors: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    """They have the same shape, so that nothing else would complain."""
    first, second = (f"model.layers.{layer}.self_attn.k_proj.weight" for layer in range(2))
    tensors[first], tensors[second] = tensors[second], tensors[first]


def half_applied(tensors: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    """The second layer is that of the version before."""
    tensors.update({name: tensor for name, tensor in before.items() if ".layers.1." in name})


@pytest.mark.parametrize(("fault", "is_seen"), [(step_behind, False), (two_swapped, True), (half_applied, True)])
def test_an_engine_that_serves_others_than_were_published_is_found_out(
    rig, weights, tmp_path, monkeypatch, fault, is_seen
):
    """What it really holds and samples from is planted; the proof of every update looks at its bytes, and its scores.

    The canary has to see it in 16 bits, where a small step without a version before it is less than rounding.
    """
    published, tensors = weights("b"), load_file(weights("b").folder / "model.safetensors")
    fault(tensors, load_file(weights("a").folder / "model.safetensors"))
    shutil.copytree(published.folder, tmp_path / "planted")
    save_file(tensors, tmp_path / "planted" / "model.safetensors", {"format": "pt"})
    version = rig.serve(Weights(tmp_path / "planted", published.model))
    manifest = describe_folder(published.folder, "p", version, canary_sequences(VOCAB_SIZE), "bfloat16")

    with pytest.raises(WeightsUnproved, match="weights differ from version"):
        prove(rig.engine, manifest)
    with monkeypatch.context() as blind, pytest.raises(WeightsUnproved, match="canary") if is_seen else nullcontext():
        blind.setattr(rig.engine, "checksums", lambda: None)
        prove(rig.engine, manifest)

    rig.serve(published)
    assert prove(rig.engine, manifest).compared_share == 1.0


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_served_on(rig, weights, tmp_path):
    """A folder without tensors, as a torn publication leaves it."""
    version = rig.serve(weights("a"))
    (tmp_path / "config.json").write_text((weights("a").folder / "config.json").read_text())

    with pytest.raises(WeightsError):
        rig.engine.load(tmp_path, version)

    request = rig.ask()
    rig.engine.submit([request])
    check_logprobs(rig, [request])


def members(engine: ServerEngine) -> list[psutil.Process]:
    """The server and all that it has started; the one that was started last is at the end."""
    root = psutil.Process(engine._process.pid)
    return [root, *sorted(root.children(recursive=True), key=lambda process: process.create_time())]


@pytest.fixture
def worker(rig, tmp_path, request) -> Iterator[WorkerRig]:
    """A worker around the engine under test, of which twelve groups are wanted."""
    epoch = 10 + len(rig.served)  # versions that the engine has not seen
    made = WorkerRig(rig, tmp_path, run_epoch=epoch, num_groups=12)
    yield made
    made.close()


def check_all_came_once(worker: WorkerRig, counts: dict[str, int], versions: set[Version]) -> None:
    """Every group, to learner and peers, in one piece; each token as a full forward of its version has it."""
    tickets = sorted(group.ticket for group in worker.groups)
    assert len(tickets) == len(set(tickets)) == 12
    assert worker.published == dict.fromkeys(tickets, 1)
    assert counts.get("granted_again", 0) == counts.get("unsound", 0) == 0
    requests, finished = worker.as_answers()
    assert {span.version for one in finished for span in one.generation.versions} == versions
    check_answers(worker.rig, requests, finished)


@pytest.mark.parametrize(
    "kind",
    [SERVERS[0], pytest.param("sglang", marks=[pytest.mark.engines, pytest.mark.slow])],
    indirect=True,
)
def test_a_server_that_is_killed_in_mid_batch_is_replaced_and_no_group_is_lost_or_doubled(worker, weights):
    """SIGKILL while groups are in flight, as new weights are published: the worker starts another one and goes on."""
    engine = worker.rig.engine
    before, versions = members(engine), {worker.publish(weights("a"))}
    started = []

    def script() -> Iterator[None]:
        while not (worker.published and len(worker.loop._flights) > 1):
            yield
        os.kill(before[0].pid, signal.SIGKILL)
        versions.add(worker.publish(weights("b")))
        while not worker.loop.totals.engine_restarts:
            yield
        started.extend(worker.loop._again)

    counts = worker.run(script)

    assert started, "it was killed too late to tell"
    assert worker.loop.totals.engine_restarts == 1
    check_all_came_once(worker, counts, versions)
    assert not psutil.wait_procs(before, timeout=120)[1], "the killed server left a process"


@pytest.mark.parametrize("kind", SERVERS, indirect=True)
def test_a_server_that_hangs_in_mid_batch_is_replaced_and_no_group_is_lost_or_doubled(worker, weights, monkeypatch):
    """The process that samples is stopped; the one that speaks HTTP answers on."""
    engine = worker.rig.engine
    before, versions = members(engine), {worker.publish(weights("b"))}
    samplers = [process for process in before if "scheduler" in " ".join(process.cmdline())]
    why, restart = [], engine.restart

    def note_and_restart() -> None:
        why.append(str(engine._lost))
        restart()

    def script() -> Iterator[None]:
        while not (worker.published and len(worker.loop._flights) > 1):
            yield
        (samplers or before)[-1].suspend()

    monkeypatch.setattr(engine, "restart", note_and_restart)
    counts = worker.run(script)

    assert len(why) == 1
    assert "no token came" not in why[0], "that bound is longer"
    check_all_came_once(worker, counts, versions)
    assert not psutil.wait_procs(before, timeout=120)[1], "the stopped server left a process"


@pytest.mark.parametrize("kind", SERVERS, indirect=True)
def test_close_leaves_no_process(rig):
    """Not the server, not what it started; closing again does nothing."""
    before = members(rig.engine)

    rig.engine.close()
    rig.engine.close()

    assert len(before) > 1
    assert not psutil.wait_procs(before, timeout=120)[1]
