"""Some rows of a batch are the batch of these rows."""

from dataclasses import fields

import numpy as np
import pytest

from mrl.alignment.flags import Flag
from mrl.alignment.pair_card import written_by
from mrl.alignment.peer_answer import PeerAnswer, bare_text
from mrl.alignment.sampled_answers import describe_answers
from mrl.alignment.selection import RowPart, first_tokens, join_rows, select_rows
from mrl.alignment.translate import translate_batch
from mrl.records.finish import FinishReason
from tests.support.retokenizing import retokenize

TEXTS = ["reverse: yah 12 + 34", "def f(x): return x\n", "na\u00efve caf\u00e9", "hay"]


@pytest.mark.parametrize("rows", [[], [0], [2], [1, 3], [0, 2, 4, 5], list(range(6))])
def test_selecting_is_translating_these_alone(receiver_of, rows):
    """Every field is what it would be without the others: rejected, bare and cut rows included."""
    peer, receiver = receiver_of("byte_level"), receiver_of("metaspace")
    answers = [*written_by(peer, TEXTS), bare_text(b"\xff", finished=True), bare_text(b"sun nus", finished=True)]
    whole = translate_batch(answers, receiver, max_tokens=6)
    alone = translate_batch([answers[row] for row in rows], receiver, max_tokens=6)
    found = select_rows(whole, rows)
    for field in fields(alone):
        one, other = getattr(found, field.name), getattr(alone, field.name)
        assert np.array_equal(one, other), field.name
        if field.name != "reject_reason":
            assert one.dtype == other.dtype, field.name


@pytest.fixture(name="batch")
def finished_answers(receiver_of):
    """Finished answers of a metaspace peer in byte-level tokens, a rejected one among them."""
    peer, receiver = receiver_of("metaspace"), receiver_of("byte_level")
    ids = [retokenize(peer, text.encode(), finished=True, max_tokens=99).token_ids for text in TEXTS]
    logprobs = [-np.arange(1, len(one) + 1, dtype=np.float32) / 8 for one in ids]
    answers = describe_answers(peer, ids, logprobs, [FinishReason.STOP] * len(ids))
    return translate_batch([*answers, bare_text(b"\xff", finished=True)], receiver, max_tokens=99)


def test_first_tokens_are_the_row_without_its_end(batch):
    """Cut before the EOS: spans, tokens and bytes of the text alone, the peer's end booked as dropped."""
    counts = np.diff(batch.row_offsets)
    has_end = np.array([n > 1 and batch.row(r).span_bytes[-1] == 0 for r, n in enumerate(counts)])
    cut = first_tokens(batch, (counts - has_end).tolist())
    assert has_end.any()
    assert np.array_equal(np.diff(cut.row_offsets), counts - has_end)
    assert cut.dropped_tokens.sum() >= batch.dropped_tokens.sum() + has_end.sum()
    for row in range(batch.num_rows):
        one, whole = cut.row(row), batch.row(row)
        assert np.array_equal(one.token_ids, whole.token_ids[: len(one.token_ids)])
        assert np.array_equal(one.span_logprob, whole.span_logprob[: len(one.span_logprob)])
        assert one.peer_logprob == pytest.approx(one.span_logprob.sum() + one.dropped_logprob)


def test_a_cut_inside_a_span_is_a_mistake(batch):
    """Half a span has no log-prob."""
    row = next(r for r in range(batch.num_rows) if (batch.row(r).span_receiver_tokens > 1).any())
    counts = np.diff(batch.row_offsets)
    inside = int(np.flatnonzero(np.diff(batch.row(row).span_of_token, prepend=-1) == 0)[0])
    counts[row] = inside
    with pytest.raises(ValueError, match="inside a span"):
        first_tokens(batch, counts.tolist())


def test_rows_of_one_part_are_the_batch(batch):
    """Every field, rejected rows included."""
    found = join_rows(batch, [[RowPart(row)] for row in range(batch.num_rows)])
    for field in fields(batch):
        one, other = getattr(found, field.name), getattr(batch, field.name)
        assert np.array_equal(one, other), field.name
        assert field.name == "reject_reason" or one.dtype == other.dtype, field.name


def test_joined_rows_are_their_parts_end_to_end(batch):
    """As a slow twin says, part by part: spans counted on, what has no counterpart dropped behind its part."""
    unsaid = sampled_tokens(3)
    parts = [[RowPart(0, unsaid), RowPart(None, unsaid)], [], [RowPart(1), RowPart(2), RowPart(3)], [RowPart(None)]]
    found = join_rows(batch, parts)
    assert found.num_rows == 4
    for row, of_row in enumerate(parts):
        one, ids, spans, peer_spans, logprobs, dropped = found.row(row), [], [], [], [], []
        for part in of_row:
            first = 1 + max(spans, default=-1)
            if part.row is not None:
                whole = batch.row(part.row)
                ids += whole.token_ids.tolist()
                spans += [first + span for span in whole.span_of_token.tolist()]
                peer_spans += [first + span if span >= 0 else -1 for span in whole.peer_span_of_token.tolist()]
                logprobs += whole.span_logprob.tolist()
            if part.unsaid is not None:
                peer_spans += [-1] * len(part.unsaid.special)
                dropped += part.unsaid.logprobs.tolist()
        assert one.token_ids.tolist() == ids
        assert one.span_of_token.tolist() == spans
        assert one.peer_span_of_token.tolist() == peer_spans
        assert one.span_logprob.tolist() == logprobs
        assert (one.dropped_tokens, one.dropped_logprob) == (len(dropped), pytest.approx(sum(dropped)))
        assert one.peer_logprob == pytest.approx(sum(logprobs) + sum(dropped))
    assert found.is_exact.tolist() == [False, True, True, True]


def test_a_row_with_a_rejected_part_is_rejected(batch):
    """For its reason; nothing of the other parts is used, and all of the peer is dropped."""
    rejected = batch.num_rows - 1
    found = join_rows(batch, [[RowPart(0), RowPart(rejected)], [RowPart(None), RowPart(None)]])
    assert found.reject_reason == (batch.reject_reason[rejected], "")
    row = found.row(0)
    assert row.token_ids.size == row.span_logprob.size == 0
    assert row.flags & Flag.REJECT
    assert row.dropped_tokens == row.peer_token_bytes.size > 0
    assert row.dropped_logprob == pytest.approx(row.peer_logprob)


def sampled_tokens(size):
    """What a peer sampled in so many tokens."""
    numbers = -np.arange(1, size + 1, dtype=np.float32)
    return PeerAnswer(
        completion=bytes(size),
        byte_lengths=np.ones(size, dtype=np.int32),
        logprobs=numbers,
        special=np.zeros(size, dtype=bool),
        finish_reason=FinishReason.LENGTH,
        fingerprint="peer",
    )
