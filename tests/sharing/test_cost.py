"""What sharing costs per peer: traces, alignment with own tokens, and the gap once own log-probs are known."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mrl.alignment.receiver import Receiver, load_receiver
from mrl.metrics.names import is_known
from mrl.records.codec import decode, encode, pack_array
from mrl.records.experience import OutcomeRecord, Received, TokenTrace, experience_decoder
from mrl.records.rollouts import Answer
from mrl.records.version import Version, VersionSpan
from mrl.sharing.cost import GAPS, Tried, align_shared, gap_values, peer_answer, shared_values, trace_of, tried_values
from mrl.sharing.regime import Author

TEXT = b"reverse: yah"


@pytest.fixture(scope="session")
def peer(tmp_path_factory) -> Receiver:
    """Another tokenizer, which cuts every byte apart."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=257, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    tokenizer.train_from_iterator(["z"], trainer)
    folder = tmp_path_factory.mktemp("peer")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return load_receiver(folder)


def sampled(peer: Receiver, text: bytes = TEXT, completion: bytes | None = None) -> Answer:
    """An answer of the peer, -0.5 nats a token."""
    ids = peer.retokenize(text, finished=True, max_tokens=99).token_ids
    return Answer(
        token_ids=pack_array(ids, "i4"),
        logprobs=pack_array(np.full(ids.size, -0.5), "f4"),
        versions=[VersionSpan(ids.size, Version(0, 0))],
        completion=text if completion is None else completion,
        finished=True,
        reward=1.0,
    )


@pytest.fixture
def make_record(peer, make_success):
    """A record with a trace, as it comes off the wire."""

    def make(text: bytes = TEXT, **how) -> OutcomeRecord:
        how = {"trace": trace_of(sampled(peer, text), peer), "fingerprint": peer.fingerprint} | how
        return decode(encode(make_success(text, **how).record), experience_decoder)

    return make


def test_trace_says_how_the_source_cut(peer):
    """One length, log-prob and mark per token, EOS included; no ids."""
    trace = trace_of(sampled(peer), peer)
    assert trace.byte_lengths == pack_array([1] * len(TEXT) + [0], "i4")
    assert trace.logprobs == pack_array([-0.5] * (len(TEXT) + 1), "f4")
    assert trace.special == bytes(len(TEXT)) + b"\1"
    assert not trace.noncanonical


def test_answer_whose_ids_are_another_text_has_no_trace(peer):
    """A worker that strips something from the text sends none rather than a wrong one."""
    assert trace_of(sampled(peer, completion=b"reverse:"), peer) is None


def test_residual_of_a_shared_answer(peer, receiver, make_record):
    """Coverage counts own tokens, and the gap is own minus peer log-prob over the same text, EOS included."""
    own_ids = receiver.retokenize(TEXT, finished=True, max_tokens=64).token_ids
    shared = align_shared([(3, make_record())], receiver, max_tokens=64)
    values = shared_values(shared)
    assert values["align/receiver_tokens/peer"] == own_ids.size
    assert values["align/length_ratio/peer"] == pytest.approx(own_ids.size / (len(TEXT) + 1))
    assert values["align/bytes/peer"] == len(TEXT)
    gaps = gap_values(shared, {3: np.full(own_ids.size, -0.25, np.float32)})
    expected = -0.25 * own_ids.size + 0.5 * (len(TEXT) + 1)
    assert gaps["align/gap_nats_per_byte/peer"] == pytest.approx(expected / len(TEXT))
    assert set(gaps) == {f"align/{name}/peer" for name in GAPS}
    assert all(map(is_known, values | gaps))


def test_gap_waits_for_log_probs_of_the_very_tokens(receiver, make_record):
    """Without log-probs, or with those of another number of tokens, there is no gap rather than a wrong one."""
    shared = align_shared([(0, make_record())], receiver, max_tokens=64)
    assert gap_values(shared, {}) == {}
    assert gap_values(shared, {0: np.zeros(1, np.float32)}) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"byte_lengths": pack_array([100] + [0] * len(TEXT), "i4")},
        {"logprobs": pack_array([np.nan] * (len(TEXT) + 1), "f4")},
        {"logprobs": b"abc"},
        {"special": b""},
    ],
    ids=["lengths", "nan", "torn", "short"],
)
def test_lying_traces_are_left_out(receiver, make_record, peer, change):
    """A trace that cannot be true gives no figures and no exception."""
    trace = trace_of(sampled(peer), peer)
    fields = {name: getattr(trace, name) for name in ("byte_lengths", "logprobs", "special")} | change
    assert align_shared([(0, make_record(trace=TokenTrace(**fields)))], receiver, max_tokens=64) == []


def test_records_without_a_trace_still_count(receiver, make_record):
    """Older or plain records are tried like others, only without alignment."""
    record = make_record(trace=None)
    assert peer_answer(record) is None
    assert align_shared([(0, record)], receiver, max_tokens=64) == []
    values = tried_values([Tried(record, ""), Tried(record, "utf8"), Tried(make_record(source="other"), "")])
    assert values["align/rows/peer"] == 2.0
    assert values["align/rejected_share/peer"] == 0.5
    assert values["align/rejected/utf8/peer"] == 1.0
    assert values["align/rows/other"] == 1.0
    assert all(map(is_known, values))


def test_sgt_reports_the_cost_of_every_rescue(make_sgt, make_group, make_record, receiver):
    """The regime names the place of each rescue among its examples, so that the learner can add its log-probs."""
    sgt = make_sgt()
    failed = make_group([0.0, 0.0])
    assert sgt.asks(failed) == ["p"]
    passed = make_group([1.0, 0.0], "q")
    absorbed = sgt.absorb([failed, passed], [Received(make_record(), 0)], step=0, rng=np.random.default_rng(0))
    (rows,) = absorbed.shared
    (place,) = rows.places
    example = absorbed.examples[place]
    assert example.component == "rescue"
    assert rows.batch.token_ids.tolist() == example.answer_token_ids.tolist()
    assert absorbed.counts["align/rows/peer"] == 1.0
    assert absorbed.counts["align/one_to_one_tokens/peer"] < 1.0


def test_sgt_publishes_the_trace(peer, make_sgt, make_group, receiver):
    """A published success carries how the own tokenizer cut it."""
    sgt = make_sgt()
    group = make_group([1.0], texts=[TEXT])
    ids = receiver.retokenize(TEXT, finished=True, max_tokens=64).token_ids
    own = sampled(receiver)
    group = type(group)(**{name: getattr(group, name) for name in group.__struct_fields__} | {"answers": [own]})
    (record,) = sgt.publish(group, Author("own", receiver.fingerprint, "exact", lambda: "r1", 0.0))
    assert len(record.trace.special) == ids.size
    assert peer_answer(record).completion == TEXT
