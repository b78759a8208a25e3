"""Made-up groups, records, two small tokenizers, and the smallest model that a loss can be taken on."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
import torch._dynamo  # optimizers import it on first use, which takes seconds: not inside the time of a test

from mrl.alignment.receiver import Receiver, load_receiver
from mrl.config.policy_tables import ObjectiveTable
from mrl.learner.forward import ForwardSettings, frozen_logprobs
from mrl.learner.packing import pack
from mrl.learner.ranks.world import World
from mrl.learner.step import Updater
from mrl.records.codec import decode, encode, pack_array
from mrl.records.experience import (
    LikeliestUnits,
    OutcomeRecord,
    Received,
    ScoreRecord,
    TokenTrace,
    ValueRecord,
    experience_decoder,
)
from mrl.records.finish import FinishReason
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.records.version import Version, VersionSpan
from mrl.sharing.context import SharingContext
from mrl.sharing.own_examples import own_advantages
from mrl.sharing.own_objective import own_objective
from mrl.sharing.own_traces import rollout_record, trace_of
from mrl.sharing.regime import AbsorbResult, Author, Regime
from mrl.sharing.regimes import build_regime
from mrl.sharing.rlad import request_id
from mrl.sharing.sgt import SgtRegime
from tests.support.drawn_episodes import OTHER_CALLS
from tests.support.model_folders import write_byte_level
from tests.support.plain_voice import DirectRequestCodec
from tests.support.retokenizing import retokenize

_tickets = itertools.count()


def _of_wire(record) -> object:
    """The record as it comes off the wire."""
    return decode(encode(record), experience_decoder)


def _answer(ids, logprobs, step: int, text: bytes, finished: bool, reward: float) -> Answer:
    return Answer(
        token_ids=pack_array(ids, "i4"),
        logprobs=pack_array(np.broadcast_to(logprobs, len(ids)), "f4"),
        versions=[VersionSpan(len(ids), Version(0, step))],
        completion=text,
        finish_reason=FinishReason.STOP if finished else FinishReason.LENGTH,
        reward=reward,
    )


def _group_of(answers: list[Answer], prompt_id: str) -> ScoredGroup:
    return ScoredGroup(
        ticket=f"t{next(_tickets)}",
        prompt_id=prompt_id,
        task="words",
        prompt_token_ids=pack_array([1, 2, 3], "i4"),
        answers=answers,
    )


def group(
    rewards: list[float],
    prompt_id: str = "p",
    *,
    step: int = 0,
    texts: list[bytes] | None = None,
    finished: bool = True,
) -> ScoredGroup:
    """A group with these rewards, sampled by version (0, step); its ids are any, and no text of theirs."""
    answers = [
        _answer(
            [10 + n, 11, 12][: 2 + n % 2], -0.5 - n, step, texts[n] if texts else b"answer %d" % n, finished, reward
        )
        for n, reward in enumerate(rewards)
    ]
    return _group_of(answers, prompt_id)


def sampled_group(
    source: Receiver,
    rewards: list[float],
    prompt_id: str = "p",
    *,
    texts: list[bytes] | None = None,
    step: int = 0,
    finished: bool = True,
    logprobs: float | Callable = -0.5,
) -> ScoredGroup:
    """A group whose ids are the texts in the source's tokens; log-probs may be a function of the ids."""
    texts = texts or [b"reverse: yah %d" % n for n in range(len(rewards))]
    answers = []
    for text, reward in zip(texts, rewards, strict=True):
        ids = retokenize(source, text, finished=finished, max_tokens=999).token_ids
        told = logprobs(ids) if callable(logprobs) else logprobs
        answers.append(_answer(ids, told, step, text, finished, reward))
    return _group_of(answers, prompt_id)


def author(policy: str = "own", fingerprint: str = "print") -> Author:
    """An author whose record ids are id0, id1, ..."""
    ids = itertools.count()
    return Author(policy, fingerprint, "exact", lambda: f"id{next(ids)}", 12.5)


def success(
    text: bytes = b"reverse: yah", prompt_id: str = "p", *, source: str = "peer", age: int = 0, **how
) -> Received:
    """A peer's success as the learner gets it."""
    fields = {
        "reward": 1.0,
        "finish_reason": FinishReason.STOP,
        "task": "words",
        "fingerprint": "f",
        "verifier": "exact",
    } | how
    record = OutcomeRecord(
        record_id=f"{source}/{next(_tickets)}",
        source=source,
        oldest=Version(0, 0),
        newest=Version(0, 0),
        prompt_id=prompt_id,
        created_unix_s=0.0,
        completion=text,
        **fields,
    )
    return Received(record, age)


def rollout(shared: ScoredGroup, tokenizer: Receiver, *, source: str = "peer", age: int = 0) -> Received:
    """A peer's whole group, with GRPO's advantages, as the learner gets it."""
    advantages = own_advantages(shared, own_objective(ObjectiveTable(), max_answer_tokens=64))
    record = rollout_record(shared, author(source, tokenizer.fingerprint), tokenizer, advantages)
    return Received(_of_wire(record), age)


def value(rewards: list[float], prompt_id: str = "p", *, source: str = "peer", step: int = 0, age: int = 0) -> Received:
    """A peer's rewards as the learner gets them."""
    record = ValueRecord(
        record_id=f"{source}/{next(_tickets)}",
        source=source,
        oldest=Version(0, step),
        newest=Version(0, step),
        fingerprint="f",
        prompt_id=prompt_id,
        task="words",
        created_unix_s=0.0,
        rewards=rewards,
    )
    return Received(_of_wire(record), age)


def score(
    request_id: str,
    scores: list[TokenTrace | None],
    *,
    source: str = "peer",
    prompt_id: str = "p",
    units: list[LikeliestUnits | None] | msgspec.UnsetType = msgspec.UNSET,
) -> Received:
    """A teacher's answer to a request as the learner gets it."""
    record = ScoreRecord(
        record_id=f"{source}>{request_id}",
        source=source,
        oldest=Version(0, 0),
        newest=Version(0, 0),
        fingerprint="f",
        prompt_id=prompt_id,
        task="words",
        created_unix_s=0.0,
        request_id=request_id,
        receiver="own",
        scores=scores,
        units=units,
    )
    return Received(_of_wire(record), 0)


def scored_by(
    tokenizer: Receiver, shared: ScoredGroup, logprobs: float | Callable, *, source: str = "peer"
) -> Received:
    """What a teacher with this tokenizer answers to the request about a group."""
    texts = [answer.completion for answer in shared.answers]
    seen = sampled_group(tokenizer, [0.0] * len(texts), texts=texts, logprobs=logprobs)
    traces = [trace_of(one, tokenizer) for one in seen.answers]
    return score(request_id("own", shared.ticket), traces, source=source)


@pytest.fixture
def make() -> SimpleNamespace:
    """Everything above, by name."""
    return SimpleNamespace(
        group=group,
        sampled=sampled_group,
        author=author,
        success=success,
        rollout=rollout,
        value=value,
        score=score,
        scored_by=scored_by,
    )


@pytest.fixture
def make_group() -> Callable[..., ScoredGroup]:
    """`group`."""
    return group


@pytest.fixture
def make_success() -> Callable[..., Received]:
    """`success`."""
    return success


def _byte_level(folder, *, vocab_size: int, eos: str, corpus: list[str]) -> Receiver:
    return load_receiver(write_byte_level(folder, corpus, vocab_size, eos=eos))


@pytest.fixture(scope="session")
def receiver(tmp_path_factory) -> Receiver:
    """A byte-level receiver that joins what it knows."""
    folder = tmp_path_factory.mktemp("receiver")
    return _byte_level(folder, vocab_size=300, eos="</s>", corpus=["reverse: yah", "copy: hay"] * 4)


@pytest.fixture(scope="session")
def peer(tmp_path_factory) -> Receiver:
    """Another tokenizer, which cuts every byte apart."""
    return _byte_level(tmp_path_factory.mktemp("peer"), vocab_size=257, eos="<eos>", corpus=["z"])


@pytest.fixture
def voices(receiver, peer) -> dict[str, DirectRequestCodec]:
    """By name: tokenizer and syntax of calls of a policy; the policy itself is "own"."""
    return {
        "own": DirectRequestCodec(receiver),
        "bytes": DirectRequestCodec(peer),
        "bytes_other_calls": DirectRequestCodec(peer, OTHER_CALLS),
        "own_other_calls": DirectRequestCodec(receiver, OTHER_CALLS),
    }


@pytest.fixture
def make_context(receiver) -> Callable[..., SharingContext]:
    """The context of policy "own" beside "peer"; further keywords are keys of its objective."""

    def make(*, max_answer_tokens: int = 64, peers: tuple[str, ...] = ("peer",), **objective) -> SharingContext:
        return SharingContext(
            policy="own",
            objective=own_objective(ObjectiveTable(**objective), max_answer_tokens=max_answer_tokens),
            receiver=receiver,
            peers=peers,
            others=peers,
        )

    return make


@pytest.fixture
def build(make_context) -> Callable[..., Regime]:
    """A regime by name with the given parameters; `context` of policy "own" by default."""

    def build(name: str, context: SharingContext | None = None, **parameters) -> Regime:
        return build_regime({"regime": name, name: parameters}, context or make_context())

    return build


@pytest.fixture
def make_sgt(build, make_context) -> Callable[..., SgtRegime]:
    """An SGT regime of policy "own" with the given parameters."""

    def make(*, max_answer_tokens: int = 64, **parameters) -> SgtRegime:
        return build("sgt", make_context(max_answer_tokens=max_answer_tokens), **parameters)

    return make


@pytest.fixture
def step_of():
    """All that happens in one step: the groups arrive, the peers are heard, the batch is absorbed."""

    def run(regime: Regime, groups: list[ScoredGroup], received: list[Received] = (), *, step: int = 0, seed: int = 0):
        for one in groups:
            regime.asks(one)
        regime.hear(list(received), step=step)
        return regime.absorb(groups, step=step, rng=np.random.default_rng(seed))

    return run


@pytest.fixture
def record():
    """What the recorder of a regime says of a step, by default without own log-probs."""

    def record(
        regime: Regime, absorbed: AbsorbResult, logprobs: dict[int, np.ndarray] | None = None
    ) -> dict[str, float]:
        return regime.context.recorder.record(absorbed.examples, logprobs or {})

    return record


@pytest.fixture
def lab(receiver) -> SimpleNamespace:
    """A bigram model over the receiver's tokens, and what the learner's own code makes of a batch on it."""

    class Bigram(torch.nn.Module):
        """log pi(y_t | y_{t-1}): the smallest autoregressive model, with the methods of a transformers model."""

        config = SimpleNamespace()

        def __init__(self, seed: int) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(seed)
            shape = (len(receiver.table.pieces), 6)
            self.embed = torch.nn.Parameter(0.5 * torch.randn(*shape, generator=generator, dtype=torch.float64))
            self.weight = torch.nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))

        def get_decoder(self):
            return lambda input_ids, **_: SimpleNamespace(last_hidden_state=self.embed[input_ids])

        def get_output_embeddings(self):
            return self

        def logprobs(self, prompt, answer):
            """[T] with gradient, as written."""
            context = torch.tensor(np.concatenate([prompt[-1:], answer[:-1]]), dtype=torch.long)
            targets = torch.tensor(np.asarray(answer), dtype=torch.long)
            return torch.log_softmax(self.embed[context] @ self.weight.T, -1)[torch.arange(len(targets)), targets]

        def sampler_logprobs(self, ids):
            """[T] of an answer to the prompt [1, 2, 3], as a sampler would have noted them."""
            return self.logprobs(np.array([3]), ids).detach().numpy()

    def gradient(absorbed, regime, model, *, start=None, reference=None, update_index: int = 0):
        """Of the loss of the whole batch as one update; `start` is the model at the start of the step."""
        updater = Updater(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            regime.components,
            World(0, 1, torch.device("cpu")),
            forward=ForwardSettings(1.0),
            max_grad_norm=1e9,
            reference=reference,
        )
        batches = pack(absorbed.examples, regime.components, microbatch_tokens=128)
        proximal = None if start is None else frozen_logprobs(start, batches, ForwardSettings(1.0))
        updater.update(
            batches, proximal, absorbed.denominators, update_index=update_index, num_rows=len(absorbed.examples)
        )
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]

    def divergence(reference, row):
        """Scalar of a model: the mean over a row of k3 = exp(d) - d - 1, d = log pi_ref - log pi, as written."""

        def of(model):
            log_pi, log_ref = (one.logprobs(row.prompt_token_ids, row.answer_token_ids) for one in (model, reference))
            gap = log_ref.detach() - log_pi
            return (gap.exp() - gap - 1).mean()

        return of

    def score_of(model, function):
        """Gradient of a scalar written out by hand."""
        return list(torch.autograd.grad(function(model), list(model.parameters())))

    def assert_same(found, expected):
        scale = max(float(other.abs().max()) for other in expected)
        assert scale > 1e-6, "says nothing: both are zero"
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one / scale, other / scale, rtol=1e-4, atol=1e-5)

    def is_zero(found) -> bool:
        return all(not one.any() for one in found)

    return SimpleNamespace(
        model=lambda seed=2: Bigram(seed),
        gradient=gradient,
        divergence=divergence,
        score_of=score_of,
        assert_same=assert_same,
        is_zero=is_zero,
    )
