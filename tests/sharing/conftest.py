"""Made-up groups, records and a small receiver."""

import itertools
import json
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mrl.alignment.receiver import Receiver, load_receiver
from mrl.records.codec import pack_array
from mrl.records.experience import OutcomeRecord, Received
from mrl.records.rollouts import Answer, ScoredGroup
from mrl.records.version import Version, VersionSpan
from mrl.sharing.sgt import SgtParameters, SgtRegime

_tickets = itertools.count()


def _answer(reward: float, number: int, step: int, text: bytes | None, finished: bool) -> Answer:
    ids = [10 + number, 11, 12][: 2 + number % 2]
    return Answer(
        token_ids=pack_array(ids, "i4"),
        logprobs=pack_array([-0.5 - number] * len(ids), "f4"),
        versions=[VersionSpan(len(ids), Version(0, step))],
        completion=b"answer %d" % number if text is None else text,
        finished=finished,
        reward=reward,
    )


def group(
    rewards: list[float],
    prompt_id: str = "p",
    *,
    step: int = 0,
    texts: list[bytes] | None = None,
    finished: bool = True,
    run_epoch: int = 0,
) -> ScoredGroup:
    """A group with these rewards, sampled by version (0, step)."""
    answers = [
        _answer(reward, number, step, texts[number] if texts else None, finished)
        for number, reward in enumerate(rewards)
    ]
    return ScoredGroup(
        ticket=f"t{next(_tickets)}",
        prompt_id=prompt_id,
        task="words",
        prompt_token_ids=pack_array([1, 2, 3], "i4"),
        answers=answers,
    )


def success(
    text: bytes = b"reverse: yah", prompt_id: str = "p", *, source: str = "peer", age: int = 0, **how
) -> Received:
    """A peer's success as the learner gets it."""
    fields = {"reward": 1.0, "finished": True, "task": "words", "fingerprint": "f", "verifier": "exact"} | how
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


@pytest.fixture
def make_group() -> Callable[..., ScoredGroup]:
    """`group`."""
    return group


@pytest.fixture
def make_success() -> Callable[..., Received]:
    """`success`."""
    return success


@pytest.fixture(scope="session")
def receiver(tmp_path_factory) -> Receiver:
    """A byte-level receiver."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(["reverse: yah", "copy: hay"] * 4, trainer)
    folder = tmp_path_factory.mktemp("receiver")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return load_receiver(folder)


@pytest.fixture
def make_sgt(receiver) -> Callable[..., SgtRegime]:
    """An SGT regime of policy "own" with the given parameters."""

    def make(*, max_answer_tokens: int = 64, **parameters) -> SgtRegime:
        return SgtRegime(
            SgtParameters(**parameters), policy="own", receiver=receiver, max_answer_tokens=max_answer_tokens
        )

    return make
