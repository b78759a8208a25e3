"""Stop strings: found in the bytes of tokens as they come, while the tokens stay what they were."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.alignment.receiver import load_receiver
from mrl.engines import segments
from mrl.engines.continuous import ContinuousBatch
from mrl.engines.engine import GenerationRequest, Sampling, StopStringMatcher, StopStrings, before_stop
from mrl.engines.segments import Segments
from mrl.engines.server_backend import Segment
from mrl.engines.token_sampling import answer_seeds
from mrl.models.tokenizers import train_metaspace
from mrl.records.finish import FinishReason
from mrl.records.version import Version, VersionSpan

EOS, OLD = 1, Version(0, 3)


def letters(token_ids) -> bytes:
    """Ids from 2 on are letters; smaller ones have no text."""
    return bytes(b"abcde"[token_id % 5] for token_id in token_ids if token_id > EOS)


def stop_at(*texts: bytes) -> StopStrings:
    return StopStrings(texts, letters, letters)


@pytest.mark.parametrize(
    ("texts", "parts", "ends"),
    [
        ((b"cd",), [[2], [3]], [None, 1]),  # over two calls
        ((b"cd",), [[2, 1, 3, 4]], [3]),  # a special token within has no text
        ((b"ccd",), [[2, 2, 2, 3]], [4]),  # begins again within itself
        ((b"x", b"ea"), [[4, 5], [6]], [2, None]),
        ((b"cd",), [[3, 2]], [None]),
    ],
)
def test_a_stop_string_is_found_where_it_is_complete(texts, parts, ends):
    """Of the tokens that came, up to the one with its last byte."""
    watch = StopStringMatcher(stop_at(*texts))
    assert [watch.ends_at(part) for part in parts][: len(ends)] == ends


@given(
    texts=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    parts=st.lists(st.lists(st.integers(0, 5), max_size=8), min_size=1, max_size=6),
)
def test_parts_are_looked_at_as_their_tokens_are(texts, parts):
    """However they are cut, up to the first end."""
    whole, alone = (StopStringMatcher(stop_at(*(text.encode() for text in texts))) for _ in range(2))
    for part in parts:
        by_token = next((number for number, one in enumerate(part, start=1) if alone.ends_at([one]) is not None), None)
        assert whole.ends_at(part) == by_token
        if by_token is not None:
            return


def test_a_part_without_an_end_is_spelled_at_once():
    """Only one with a stop string in it is looked at token by token."""
    asked: list[int] = []

    def counted(token_ids) -> bytes:
        asked.append(len(token_ids))
        return letters(token_ids)

    watch = StopStringMatcher(StopStrings((b"cd",), letters, counted))
    watch.ends_at([2])
    asked.clear()
    assert watch.ends_at([4] * 100) is None
    assert asked == [100]
    assert watch.ends_at([4, 2, 3, 4]) == 3


def test_the_space_that_a_first_token_loses_is_in_no_stop_string(tmp_path):
    """A text that begins with a word has no space there, whatever its token spells further on."""
    train_metaspace(["yah yah two"], 300).save_pretrained(tmp_path)
    receiver = load_receiver(tmp_path)
    space = next(index for index, piece in enumerate(receiver.table.pieces) if piece == b" ")
    stop = StopStrings((b" ",), lambda ids: receiver.table.join(ids).removeprefix(b" "), receiver.table.join)
    assert StopStringMatcher(stop).ends_at([space]) is None
    assert StopStringMatcher(stop).ends_at([space, space]) == 2


@pytest.mark.parametrize(
    ("text", "left"), [(b"5\n\nQ: 6", b"5"), (b"Q: a\n\n", b""), (b"none", b"none"), (b"a\nb\n\nQ:", b"a\nb")]
)
def test_a_verifier_is_given_the_text_before_the_first(text, left):
    """Of several, that which stands first."""
    assert before_stop(text, (b"Q:", b"\n\n")) == left


def test_without_any_the_text_is_whole():
    """The empty list cuts nothing."""
    assert before_stop(b"a\n\nb", ()) == b"a\n\nb"


@pytest.mark.parametrize("max_running", [3, 32])
def test_the_embedded_engine_ends_answers_and_samples_the_same_up_to_there(tiny_model, max_running):
    """With rows that are refilled and moved, each answer is the one without stop strings, cut behind its first."""

    def sampled(stop: StopStrings | None) -> dict:
        batch = ContinuousBatch(tiny_model("qwen3", seed=1), Sampling(1.0, 24, (EOS,), stop), max_running=max_running)
        batch.relabel(OLD)
        batch.submit(
            [
                GenerationRequest(f"r{n}", np.array([5, 9 + n], dtype=np.int32), answer_seeds(0, "a", f"{n}", 0, 4))
                for n in range(6)
            ]
        )
        found = {}
        while batch.in_flight:
            found |= {(one.request_id, one.index): one.generation for one in batch.step()}
        return found

    whole, cut = sampled(None), sampled(stop_at(b"ab", b"ddd"))

    stopped = 0
    for name, answer in whole.items():
        end = StopStringMatcher(stop_at(b"ab", b"ddd")).ends_at(answer.token_ids.tolist())
        stopped += end is not None
        np.testing.assert_array_equal(cut[name].token_ids, answer.token_ids[:end])
        assert cut[name].finish_reason is (FinishReason.STOP if end is not None else answer.finish_reason)
    assert 0 < stopped < 24


class Counting:
    """A server that samples the next ids, to the limit that it is given."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def generate(self, http, token_ids, sampling, *, max_new_tokens, seed, request_id) -> Segment:
        self.asked.append(max_new_tokens)
        tokens = [token_ids[-1] + 1 + n for n in range(max_new_tokens)]
        return Segment(tokens, [-float(token) for token in tokens], FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("text", "limit", "tokens", "reason", "calls"),
    [
        (b"ab", 10, [7, 8, 9, 10, 11], FinishReason.STOP, [3, 3]),
        (b"ba", 7, [7, 8, 9, 10, 11, 12, 13], FinishReason.LENGTH, [3, 3, 1]),
    ],
    ids=["a stop string", "none"],
)
def test_what_a_server_samples_behind_a_stop_string_is_not_the_answers(monkeypatch, text, limit, tokens, reason, calls):
    """It is asked for little at a time, and its limit there is no end; without a stop string the policy's limit is."""
    monkeypatch.setattr(segments, "TOKENS_BETWEEN_STOPS", 3)
    server = Counting()
    asked = Segments(server, None, Sampling(1.0, limit, (99,), stop_at(text)), drain_s=5.0)
    asked.label(OLD, "")
    request = GenerationRequest("r", np.array([6], dtype=np.int32), np.array([7], dtype=np.uint64))

    answer = asyncio.run(asked.answer(request, 0)).generation

    assert answer.token_ids.tolist() == tokens
    assert answer.logprobs.tolist() == [-float(token) for token in tokens]
    assert answer.versions == [VersionSpan(len(tokens), OLD)]
    assert answer.finish_reason is reason
    assert server.asked == calls


def test_a_stream_ends_at_its_stop_string(monkeypatch):
    """The server is asked for no more of it, and nobody is told of what it sampled behind."""
    monkeypatch.setattr(segments, "TOKENS_BETWEEN_STOPS", 6)
    server, told = Streaming(), []
    asked = Segments(server, None, Sampling(1.0, 10, (99,), stop_at(b"ab")), drain_s=5.0)
    asked.label(OLD, "")
    request = GenerationRequest("r", np.array([6], dtype=np.int32), np.array([7], dtype=np.uint64), streams=True)

    answer = asyncio.run(asked.answer(request, 0, told.append)).generation

    assert answer.token_ids.tolist() == [7, 8, 9, 10, 11]
    assert answer.finish_reason is FinishReason.STOP
    assert [one.generation.token_ids.tolist() for one in told] == [[7, 8], [7, 8, 9, 10]]
    assert {one.generation.finish_reason for one in told} == {FinishReason.ABORT}
    assert (server.num_parts, server.num_closed) == (3, 1)


def test_a_stream_is_read_to_its_end(monkeypatch):
    """So its connection is good for another call."""
    server = Streaming()
    asked = Segments(server, None, Sampling(1.0, 5, (99,)), drain_s=5.0)
    asked.label(OLD, "")
    request = GenerationRequest("r", np.array([6], dtype=np.int32), np.array([7], dtype=np.uint64), streams=True)

    answer = asyncio.run(asked.answer(request, 0)).generation

    assert answer.token_ids.tolist() == [7, 8, 9, 10, 11]
    assert answer.finish_reason is FinishReason.LENGTH
    assert (server.num_read, server.num_closed) == (1, 1)


class Streaming(Counting):
    """Two tokens at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.num_parts = self.num_read = self.num_closed = 0

    async def stream(self, http, token_ids, sampling, **asked):
        try:
            whole = await self.generate(http, token_ids, sampling, **asked)
            for start in range(0, len(whole.token_ids), 2):
                self.num_parts += 1
                is_last = start + 2 >= len(whole.token_ids)
                reason = whole.finish_reason if is_last else FinishReason.ABORT
                yield Segment(whole.token_ids[start : start + 2], whole.logprobs[start : start + 2], reason)
            self.num_read += 1
        finally:
            self.num_closed += 1
