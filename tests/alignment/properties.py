"""What must hold for every alignment, as checks over generated answers; `test_mutants` shows that each can fail.

Expectations are computed slowly, one token at a time, from the definitions.
"""

import itertools
import unicodedata
from pathlib import Path
from random import Random

import numpy as np

from mrl.alignment.flags import Flag, Rejected
from mrl.alignment.normalization import normalize_nfc
from mrl.alignment.peer_answer import PeerAnswer, validate
from mrl.alignment.receiver import Receiver, Retokenized, load_receiver
from mrl.alignment.source import describe_answers
from mrl.alignment.spans import align_batch
from mrl.alignment.spreading import SPREADING, advantages_to_receiver
from mrl.alignment.tokenizer_file import read_tokenizer_file
from mrl.alignment.translate import AlignedBatch, translate_batch

FRAGMENTS = (
    *("reverse", " yah", "  two", " ", "12", "345 ", "\n", "\r\n\t", "=", ".", "def f(x):", "sun nus"),
    *("\U0001f469\u200d\U0001f52c", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f44d\U0001f3fd", "\U0001d4b3"),
    *("caf\u00e9", "e\u0301", "a\u0323\u0302", "\u1112\u1161\u11ab", "\u212b", "\uf900", "\u0930\u093c", "\u0344"),
    *("\u6f22\u5b57", "\ud55c\uad6d", "\u0627\u0644", "\u0e44\u0e17", "\x00", "\x1f", "\u0085", "\u200b", "\ufeff"),
    *("\u2581", "\u0120", "</s>", "<|im_end|>", "<unk>", "<0x0A>", "<tool>", "<th\u00efnk>"),
)
KINDS = ("byte_level", "byte_level_nfc", "metaspace", "metaspace_prepend")
ENDLESS, SILENT = "byte_level without an EOS", "byte_level whose EOS is the letter y"
EXAMPLES = 60


class Receivers(dict):
    """Kind -> receiver, loaded when first asked for."""

    def __init__(self, folders: dict[str, Path]) -> None:
        super().__init__()
        self.folders = folders

    def __missing__(self, kind: str) -> Receiver:
        if kind in KINDS:
            self[kind] = load_receiver(self.folders[kind], use_tiktoken=False)
        else:
            plain = read_tokenizer_file(self.folders["byte_level"])
            eos_ids = () if kind == ENDLESS else (plain.content["model"]["vocab"]["y"],)
            self[kind] = Receiver(plain, eos_ids=eos_ids, use_tiktoken=False)
        return self[kind]


def load(folders: dict[str, Path]) -> Receivers:
    """The receivers that the checks use."""
    return Receivers(folders)


def usual(receivers: dict[str, Receiver]) -> dict[str, Receiver]:
    """Those of `KINDS`."""
    return {kind: receivers[kind] for kind in KINDS}


def make_text(random: Random) -> str:
    """One to nine fragments."""
    return "".join(random.choice(FRAGMENTS) for _ in range(random.randint(1, 9)))


def make_lengths(random: Random, num_bytes: int) -> list[int]:
    """Any segmentation, with tokens without bytes anywhere."""
    lengths: list[int] = []
    while num_bytes:
        if random.random() < 0.15:
            lengths.append(0)
        lengths.append(random.randint(1, min(num_bytes, 6)))
        num_bytes -= lengths[-1]
    return lengths + [0] * (random.random() < 0.15)


def make_answer(random: Random, text: str | None = None) -> PeerAnswer:
    """A peer whose tokens end anywhere, cut anywhere, with specials anywhere."""
    data = (make_text(random) if text is None else text).encode()
    finished = random.random() < 0.6
    if not finished:
        data = data[: random.randint(1, len(data))]
    elif random.random() < 0.1:
        data = data[:-1] + b"\xff"
    lengths = make_lengths(random, len(data))
    special = [not length and random.random() < 0.6 for length in lengths]
    if finished and random.random() < 0.9:
        lengths, special = [*lengths, 0], [*special, True]
    logprobs = [-random.random() * random.choice((4, 4, 1e-6)) for _ in lengths]
    return PeerAnswer(
        completion=data,
        byte_lengths=np.array(lengths, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        special=np.array(special, dtype=bool),
        finished=finished,
        fingerprint="peer",
        noncanonical=random.random() < 0.2,
    )


def make_batch(random: Random, size: int = 12) -> list[PeerAnswer]:
    """Answers of a batch."""
    return [make_answer(random) for _ in range(size)]


def own_answer(random: Random, source: Receiver, text: str) -> PeerAnswer:
    """What a policy with this tokenizer might sample: canonical ids, a special in the middle, an EOS or none."""
    ids = source.cut_texts([text], [text.encode()]).token_ids.tolist()
    if random.random() < 0.3:
        ids.insert(random.randrange(len(ids)), min(source.table.special_ids))
    finished = random.random() < 0.7
    ids += [source.eos_id] * finished
    logprobs = np.array([-random.random() for _ in ids], dtype=np.float32)
    return describe_answers(source, [np.array(ids, dtype=np.int32)], [logprobs], [finished])[0]


def slow_spans(peer: list[int], own: list[int]) -> list[tuple[list[int], list[int]]]:
    """The definition: a span closes where both sides have a boundary, and only tokens with bytes close one."""
    ends = [
        {end for end, length in zip(itertools.accumulate(side), side, strict=True) if length} for side in (peer, own)
    ]
    common = sorted(ends[0] & ends[1])
    sides = []
    for side in (peer, own):
        placed: list[list[int]] = [[] for _ in common]
        for place, end in enumerate(itertools.accumulate(side)):
            following = [n for n, at in enumerate(common) if (at >= end if side[place] else at > end)]
            placed[following[0] if following else -1].append(place)
        sides.append(placed)
    return list(zip(*sides, strict=True))


def align_rows(rows: list[tuple[list[int], list[int]]]) -> list[list[tuple[list[int], list[int]]]]:
    """`align_batch` on lists, as token places per span and row."""
    flat = [np.array([n for row in rows for n in row[side]], dtype=np.int32) for side in (0, 1)]
    offsets = [np.array([0, *itertools.accumulate(len(row[side]) for row in rows)], dtype=np.int64) for side in (0, 1)]
    spans = align_batch(flat[0], offsets[0], flat[1], offsets[1])
    found = []
    for row in range(len(rows)):
        numbers = range(int(spans.row_starts[row]), int(spans.row_starts[row + 1]))
        sides = []
        for of_token, bounds in ((spans.of_peer, offsets[0]), (spans.of_receiver, offsets[1])):
            own = of_token[bounds[row] : bounds[row + 1]].tolist()
            assert own == sorted(own), "spans cover the tokens in order"
            assert set(own) == set(numbers), "every token is in a span of its row"
            sides.append([[place for place, span in enumerate(own) if span == number] for number in numbers])
        found.append(list(zip(*sides, strict=True)))
    return found


def make_row(random: Random) -> tuple[list[int], list[int]]:
    """Two segmentations of the same number of bytes."""
    num_bytes = random.randint(1, 24)
    return make_lengths(random, num_bytes), make_lengths(random, num_bytes)


def check_spans_are_those_of_the_definition(receivers: dict[str, Receiver], random: Random) -> None:
    """Spans cover both sides, hold the same bytes, and no finer common partition exists."""
    for _ in range(EXAMPLES):
        rows = [make_row(random) for _ in range(random.randint(1, 6))]
        assert align_rows(rows) == [slow_spans(*row) for row in rows]


def check_swapped_sides_give_swapped_spans(receivers: dict[str, Receiver], random: Random) -> None:
    """Nothing depends on which side is the peer."""
    rows = [make_row(random) for _ in range(EXAMPLES)]
    swapped = align_rows([(own, peer) for peer, own in rows])
    assert align_rows(rows) == [[(peer, own) for own, peer in row] for row in swapped]


def check_swapped_tokenizers_give_swapped_spans(receivers: dict[str, Receiver], random: Random) -> None:
    """A text carried over and back lands on its own tokens, over the same spans."""
    for source, receiver in itertools.permutations(usual(receivers).values(), 2):
        text = unicodedata.normalize("NFC", make_text(random)).replace("\u2581", "_")
        ids = np.append(source.cut_texts([text], [text.encode()]).token_ids, np.int32(source.eos_id))
        answer = describe_answers(source, [ids], [np.zeros(len(ids), dtype=np.float32)], [True])
        there = translate_batch(answer, receiver, max_tokens=10_000)
        mine = [there.token_ids]
        reply = describe_answers(receiver, mine, [np.zeros(len(mine[0]), dtype=np.float32)], [True])
        back = translate_batch(reply, source, max_tokens=10_000)
        assert back.token_ids.tolist() == ids.tolist()
        assert back.span_of_token.tolist() == there.peer_span_of_token.tolist()
        assert back.peer_span_of_token.tolist() == there.span_of_token.tolist()
        assert not any(one.noncanonical for one in (*answer, *reply))


def check_refining_the_peer_never_lowers_the_span_count(receivers: dict[str, Receiver], random: Random) -> None:
    """Finer tokens have more boundaries, so at least as many are common; the finest give the receiver's own."""
    for _ in range(EXAMPLES):
        peer, own = make_row(random)
        finer = [part for length in peer for part in ([1] * length if random.random() < 0.5 else [length])]
        coarse, fine, finest = align_rows([(peer, own), (finer, own), ([1] * sum(own), own)])
        assert len(coarse) <= len(fine) <= len(finest) == sum(length > 0 for length in own)


def same_rows(one: AlignedBatch, row: int, other: AlignedBatch, place: int) -> None:
    """Two rows of two batches are equal in every field."""
    first, second = one.row(row), other.row(place)
    for name in first.__dataclass_fields__:
        assert np.array_equal(getattr(first, name), getattr(second, name)), name


def check_batch_equals_row_by_row(receivers: dict[str, Receiver], random: Random) -> None:
    """Neighbours change nothing, however the batch is cut into chunks."""
    for receiver in usual(receivers).values():
        answers = make_batch(random, 20) + [own_answer(random, receiver, "reverse yah 12") for _ in range(3)]
        random.shuffle(answers)
        whole = translate_batch(answers, receiver, max_tokens=9)
        chunked = translate_batch(answers, receiver, max_tokens=9, chunk_bytes=40)
        for name in whole.__dataclass_fields__:
            assert np.array_equal(getattr(whole, name), getattr(chunked, name)), name
            assert getattr(whole, name) is not getattr(chunked, name)
        for row, answer in enumerate(answers):
            same_rows(whole, row, translate_batch([answer], receiver, max_tokens=9), 0)


def check_every_logprob_is_in_a_span_or_dropped(receivers: dict[str, Receiver], random: Random) -> None:
    """Per row the peer's total is the spans' total plus what was dropped, and so for token counts."""
    for receiver, max_tokens in itertools.product(usual(receivers).values(), (6, 1000)):
        answers = make_batch(random, EXAMPLES)
        batch = translate_batch(answers, receiver, max_tokens=max_tokens)
        for row, answer in enumerate(answers):
            trace = batch.row(row)
            total = float(answer.logprobs.astype(np.float64).sum())
            assert abs(trace.peer_logprob - total) < 1e-9
            assert abs(trace.span_logprob.sum() + trace.dropped_logprob - total) < 1e-9
            assert trace.span_peer_tokens.sum() + trace.dropped_tokens == len(answer.logprobs)
            for number, logprob in enumerate(trace.span_logprob):
                inside = answer.logprobs[trace.peer_span_of_token == number].astype(np.float64)
                assert len(inside) == trace.span_peer_tokens[number]
                assert abs(inside.sum() - logprob) < 1e-9
                assert (trace.span_of_token == number).sum() == trace.span_receiver_tokens[number] > 0


def readable(answer: PeerAnswer) -> tuple[int, str]:
    """How many peer tokens, from the start, are whole characters, and their text."""
    best = (0, "")
    for count, end in enumerate(itertools.accumulate(answer.byte_lengths.tolist()), start=1):
        try:
            best = count, answer.completion[:end].decode()
        except UnicodeDecodeError:
            continue
    return best


def check_rows_stand_for_the_peer_text(receivers: dict[str, Receiver], random: Random) -> None:
    """Span for span the receiver's bytes are the peer's, the tail behind the last whole character is dropped, no
    special is emitted but the EOS, and nothing is rejected that can be expressed.
    """
    for kind, receiver in usual(receivers).items():
        answers = make_batch(random, EXAMPLES)
        batch = translate_batch(answers, receiver, max_tokens=10_000)
        for row, answer in enumerate(answers):
            trace, (count, text) = batch.row(row), readable(answer)
            if not text:
                assert trace.reject_reason == "utf8"
                assert trace.flags & Flag.REJECT
                continue
            if trace.reject_reason:
                assert "metaspace" in kind, trace.reject_reason
                assert "\u2581" in text
                assert trace.token_ids.size == trace.span_logprob.size == 0
                continue
            check_row(receiver, answer, trace, count, text)


def check_row(receiver: Receiver, answer: PeerAnswer, trace, count: int, text: str) -> None:
    """One translated row against its text."""
    read = unicodedata.normalize("NFC", text) if receiver.reads_nfc else text
    whole = count == len(answer.special)
    has_eos = whole and answer.finished and bool(answer.special[-1]) and not answer.byte_lengths[-1]
    body = trace.token_ids[:-1] if has_eos else trace.token_ids
    assert receiver.completion_bytes(body) == read.encode()
    assert not set(body.tolist()) & receiver.table.special_ids
    assert body.tolist() == receiver.cut_texts([read], [read.encode()]).token_ids.tolist()
    if has_eos:
        assert trace.token_ids[-1] == receiver.eos_id
        assert trace.span_of_token[-1] == trace.peer_span_of_token[-1] == len(trace.span_logprob) - 1
        assert trace.span_receiver_tokens[-1] == 1
        assert trace.span_bytes[-1] == 0
    assert (trace.peer_span_of_token >= 0).tolist() == [place < count for place in range(len(answer.special))]
    assert bool(trace.flags & Flag.TAIL) == (not answer.finished or not whole)
    assert bool(trace.flags & Flag.NORM) == (read != text)
    assert bool(trace.flags & Flag.NONCANON) == answer.noncanonical
    assert bool(trace.flags & Flag.EOS_UNMAPPED) == (answer.finished and whole and not has_eos)
    assert bool(trace.flags & Flag.SPECIAL_IN) == (int(answer.special.sum()) > answer.ends_with_eos)
    assert not trace.flags & (Flag.REJECT | Flag.RECV_TRUNC | Flag.SPECIAL_OUT)
    check_boundaries(receiver, answer, trace, count, has_eos)


def check_boundaries(receiver: Receiver, answer: PeerAnswer, trace, count: int, has_eos: bool) -> None:
    """Every span ends at the same text on both sides; where nothing was normalised the spans are the definition's."""
    peer = [int(length) for length in answer.byte_lengths[:count]]
    body = trace.token_ids[: len(trace.token_ids) - has_eos]
    own = receiver.byte_lengths(body, np.array([0, len(body)])).tolist()
    own_bytes = receiver.completion_bytes(body)
    for number in range(len(trace.span_logprob) - has_eos):
        peer_end = sum(n for n, span in zip(peer, trace.peer_span_of_token, strict=False) if span <= number)
        own_end = sum(n for n, span in zip(own, trace.span_of_token, strict=False) if span <= number)
        prefix = answer.completion[:peer_end]
        if trace.flags & Flag.NORM:
            characters = unicodedata.normalize("NFC", prefix.decode(errors="surrogateescape"))
            prefix = characters.encode(errors="surrogateescape")
        assert own_bytes[:own_end] == prefix
        assert trace.span_bytes[: number + 1].sum() == own_end
    if not trace.flags & Flag.NORM:
        if has_eos:
            peer[-1], own = 1, [*own, 1]
        spans = slow_spans(peer, own)
        assert trace.span_peer_tokens.tolist() == [len(places) for places, _ in spans]
        assert trace.span_receiver_tokens.tolist() == [len(places) for _, places in spans]


def check_normalised_rows_keep_their_boundaries(receivers: dict[str, Receiver], random: Random) -> None:
    """Tokens that end outside changed clusters keep their place, others ride along with the token that leaves one."""
    parts = [part for part in FRAGMENTS if part.isascii() or not unicodedata.is_normalized("NFC", part)]
    for _ in range(EXAMPLES):
        text = "".join(random.choice(parts) for _ in range(random.randint(1, 6)))
        normalized = normalize_nfc(text)
        if normalized is None:
            assert unicodedata.is_normalized("NFC", text)
            continue
        assert normalized.text == unicodedata.normalize("NFC", text)
        lengths = make_lengths(random, len(text.encode()))
        new = normalized.map_lengths(np.array(lengths, dtype=np.int32)).tolist()
        assert sum(new) == len(normalized.text.encode())
        assert min(new) >= 0
        new_bytes = normalized.text.encode()
        for end, new_end, length in zip(itertools.accumulate(lengths), itertools.accumulate(new), new, strict=True):
            if length:
                prefix = unicodedata.normalize("NFC", text.encode()[:end].decode(errors="ignore"))
                assert prefix.encode() == new_bytes[:new_end][: len(prefix.encode())]
        ascii_ends = [len(text[:at].encode()) for at in range(1, len(text) + 1) if text[at : at + 1].isascii()]
        pieces = np.diff([0, *ascii_ends]).astype(np.int32)
        kept = list(itertools.accumulate(normalized.map_lengths(pieces).tolist()))
        wanted = [len(unicodedata.normalize("NFC", text.encode()[:end].decode()).encode()) for end in ascii_ends]
        assert kept == wanted


def check_cut_answers_are_prefixes(receivers: dict[str, Receiver], random: Random) -> None:
    """A limit cuts at the last whole span within it, books the rest as dropped, and never leaves an EOS behind."""
    for receiver in usual(receivers).values():
        answers = make_batch(random, 20)
        whole = translate_batch(answers, receiver, max_tokens=10_000)
        for max_tokens in (1, 2, 5, 11):
            cut = translate_batch(answers, receiver, max_tokens=max_tokens)
            for row in range(len(answers)):
                long, short = whole.row(row), cut.row(row)
                ends = np.cumsum(long.span_receiver_tokens)
                kept = int((ends <= max_tokens).sum())
                if long.reject_reason or (len(ends) and not kept):
                    assert short.reject_reason == (long.reject_reason or "too_long")
                    assert short.dropped_tokens == len(answers[row].special)
                    continue
                assert len(short.span_logprob) == kept
                assert short.token_ids.tolist() == long.token_ids[: ends[kept - 1]].tolist()
                assert short.span_logprob.tolist() == long.span_logprob[:kept].tolist()
                assert bool(short.flags & Flag.RECV_TRUNC) == (kept < len(ends))


def check_the_own_tokenizer_passes_untouched(receivers: dict[str, Receiver], random: Random) -> None:
    """With equal fingerprints ids and log-probs come out bit for bit, one span per token, specials included."""
    for kind, receiver in usual(receivers).items():
        texts = [make_text(random).replace("\u2581", "_") for _ in range(12)]
        if "nfc" in kind:
            texts = [unicodedata.normalize("NFC", text) for text in texts]
        mine = [own_answer(random, receiver, text) for text in texts]
        answers = [answer for pair in zip(mine, make_batch(random, 12), strict=True) for answer in pair]
        batch = translate_batch(answers, receiver, max_tokens=10_000)
        for place, answer in enumerate(mine):
            trace = batch.row(2 * place)
            assert trace.reject_reason == ""
            assert trace.token_ids.tobytes() == answer.token_ids.tobytes()
            assert trace.span_logprob.astype(np.float32).tobytes() == answer.logprobs.tobytes()
            assert trace.span_of_token.tolist() == trace.peer_span_of_token.tolist() == [*range(len(trace.token_ids))]
            assert trace.dropped_tokens == 0


def check_lying_ids_are_rejected(receivers: dict[str, Receiver], random: Random) -> None:
    """Ids of the own tokenizer that stand for another text, or are no ids, are refused; others in the batch are not."""
    receiver = receivers["byte_level"]
    truth = own_answer(random, receiver, "reverse: yah")
    for change in (lambda ids: ids[::-1].copy(), lambda ids: ids * 0 - 1, lambda ids: ids * 0 + 10**9):
        lie = PeerAnswer(**(fields_of(truth) | {"token_ids": change(truth.token_ids)}))
        batch = translate_batch([truth, lie, truth], receiver, max_tokens=99)
        assert batch.reject_reason == ("", "ids_differ", "")
        assert batch.row(2).token_ids.tolist() == truth.token_ids.tolist()
        assert batch.row(1).dropped_tokens == len(truth.special)


def check_false_descriptions_are_rejected(receivers: dict[str, Receiver], random: Random) -> None:
    """True ids beside another text, or beside other byte lengths, are refused."""
    receiver = receivers["byte_level"]
    truth = own_answer(random, receiver, "reverse: yah")
    first, second = np.flatnonzero(truth.byte_lengths)[:2]
    lengths = truth.byte_lengths.copy()
    lengths[first] += 1
    lengths[second] -= 1
    for lie in ({"completion": b"reverse: yoh"}, {"byte_lengths": lengths}):
        liar = PeerAnswer(**(fields_of(truth) | lie))
        assert translate_batch([liar, truth], receiver, max_tokens=99).reject_reason == ("ids_differ", "")


def check_an_end_without_counterpart_is_dropped(receivers: dict[str, Receiver], random: Random) -> None:
    """A receiver without an EOS books the peer's as dropped and says so; the text is the same."""
    answers = make_batch(random, EXAMPLES)
    without = translate_batch(answers, receivers[ENDLESS], max_tokens=10_000)
    with_eos = translate_batch(answers, receivers["byte_level"], max_tokens=10_000)
    seen = 0
    for row, answer in enumerate(answers):
        trace, longer = without.row(row), with_eos.row(row)
        lost = int(answer.ends_with_eos and bool(longer.token_ids.size) and longer.dropped_tokens == 0)
        assert trace.token_ids.tolist() == longer.token_ids[: len(longer.token_ids) - lost].tolist()
        assert trace.dropped_tokens == longer.dropped_tokens + lost
        assert bool(trace.flags & Flag.EOS_UNMAPPED) == bool(lost or longer.flags & Flag.EOS_UNMAPPED)
        seen += lost
    assert seen


def fields_of(answer: PeerAnswer) -> dict:
    """The fields of an answer as they are."""
    return {name: getattr(answer, name) for name in answer.__dataclass_fields__}


def lies(answer: PeerAnswer) -> list[tuple[str, dict]]:
    """Fields that cannot be, each with the reason to expect."""
    lengths, logprobs = answer.byte_lengths, answer.logprobs
    last = np.arange(len(lengths)) == len(lengths) - 1
    first, second = np.flatnonzero(lengths)[:2]
    negative = lengths.copy()
    negative[first] += negative[second] + 1
    negative[second] = -1
    return [
        ("lengths", {"byte_lengths": lengths + last.astype(np.int32)}),
        ("lengths", {"byte_lengths": negative}),
        ("lengths", {"completion": answer.completion + b"x"}),
        ("lengths", {"special": np.ones(len(lengths), dtype=bool)}),
        ("logprobs", {"logprobs": np.where(last, np.nan, logprobs).astype(np.float32)}),
        ("logprobs", {"logprobs": np.where(last, np.inf, logprobs).astype(np.float32)}),
        ("logprobs", {"logprobs": np.where(last, -np.inf, logprobs).astype(np.float32)}),
        ("logprobs", {"logprobs": np.where(last, 0.01, logprobs).astype(np.float32)}),
        ("logprobs", {"logprobs": np.where(last, -1e6, logprobs).astype(np.float32)}),
        ("shape", {"logprobs": logprobs[:-1]}),
        ("shape", {"special": np.append(answer.special, True)}),
        ("shape", {"token_ids": np.zeros(len(lengths) + 1, dtype=np.int32)}),
        ("size", {"fingerprint": "x" * 1000}),
        ("size", {"completion": b"x" * (2 << 20)}),
        ("type", {"fingerprint": 7}),
        ("type", {"completion": "text"}),
        ("type", {"finished": 1}),
        ("type", {"byte_lengths": None}),
    ]


def check_lying_fields_are_rejected(receivers: dict[str, Receiver], random: Random) -> None:
    """Each lie is a rejection with its reason, on the wire and inside a batch, and harms no neighbour."""
    truth = make_answer(random, "reverse: yah")
    while (truth.byte_lengths > 0).sum() < 3:
        truth = make_answer(random, "reverse: yah")
    honest = validate(**truth.fields())
    assert isinstance(honest, PeerAnswer)
    for name, value in fields_of(truth).items():
        assert np.array_equal(getattr(honest, name), value), name
    for reason, lie in lies(truth):
        assert validate(**(fields_of(truth) | lie)) == Rejected(reason), lie
        liar = PeerAnswer(**(fields_of(truth) | lie))
        batch = translate_batch([truth, liar, truth], receivers["byte_level"], max_tokens=99)
        assert batch.reject_reason == ("", reason, ""), lie
        assert batch.row(1).token_ids.size == batch.row(1).peer_span_of_token.size == 0
        same_rows(batch, 0, batch, 2)
    for _ in range(EXAMPLES):
        fields = truth.fields()
        name = random.choice([*fields])
        garbage = random.choice(
            [random.randbytes(random.randint(0, 40)), None, -1, "x", 2.5, [1], True, np.zeros((2, 2))]
        )
        result = validate(**(fields | {name: garbage}))
        if isinstance(result, PeerAnswer):
            translate_batch([result], receivers["metaspace"], max_tokens=9)
    for name in ("byte_lengths", "logprobs", "special"):
        cut = truth.fields() | {name: truth.fields()[name][:-1]}
        assert isinstance(validate(**cut), Rejected)


def check_spreading_keeps_the_total_of_every_span(receivers: dict[str, Receiver], random: Random) -> None:
    """Every rule sums to the span's log-prob, copies it where a token is alone, and follows its formula."""
    batch = translate_batch(make_batch(random, EXAMPLES), receivers["metaspace"], max_tokens=30)
    own = np.array([-random.random() * 3 for _ in batch.token_ids])
    own[: len(own) // 4] = 0.0
    own[-len(own) // 4 :] *= 1e4
    for name, rule in SPREADING.items():
        spread = rule(batch, own)
        for span, total in enumerate(batch.span_logprob):
            inside = batch.span_of_token == span
            part, old, sizes = spread[inside], own[inside], batch.token_bytes[inside]
            assert abs(part.sum() - total) < 1e-9 * max(1, -total)
            if len(part) == 1:
                assert part[0] == total
            expected = {
                "none": [0.0] * (len(part) - 1) + [total],
                "uniform": [total / len(part)] * len(part),
                "bytes": total * sizes / sizes.sum() if sizes.sum() else [total / len(part)] * len(part),
                "receiver_additive": old + (total - old.sum()) / len(part),
                "receiver_multiplicative": total * old / old.sum() if old.sum() else [total / len(part)] * len(part),
            }[name]
            assert np.allclose(part, expected, rtol=0, atol=1e-9)
            assert name == "receiver_additive" or (part <= 0).all()


def check_advantages_are_byte_weighted_means(receivers: dict[str, Receiver], random: Random) -> None:
    """Dense advantages become the mean over the peer's bytes of the span, a constant stays, scalars are broadcast."""
    batch = translate_batch(make_batch(random, EXAMPLES), receivers["byte_level"], max_tokens=12)
    dense = np.array([random.gauss(0, 1) for _ in batch.peer_logprobs])
    moved = advantages_to_receiver(batch, dense)
    for token, span in enumerate(batch.span_of_token):
        inside = batch.peer_span_of_token == span
        weights = batch.peer_token_bytes[inside]
        mean = np.average(dense[inside], weights=weights if weights.sum() else None)
        assert abs(moved[token] - mean) < 1e-12
    assert (advantages_to_receiver(batch, np.full(len(dense), 0.3)) == 0.3).all()
    scalars = np.array([random.gauss(0, 1) for _ in range(batch.num_rows)])
    rows = np.repeat(np.arange(batch.num_rows), np.diff(batch.row_offsets))
    assert (advantages_to_receiver(batch, scalars, per_row=True) == scalars[rows]).all()


def check_sampled_answers_travel(receivers: dict[str, Receiver], random: Random) -> None:
    """What a policy samples arrives at every other tokenizer as the same text, and other cuts of it are told apart."""
    for source, receiver in itertools.product(usual(receivers).values(), usual(receivers).values()):
        text = unicodedata.normalize("NFC", make_text(random)).replace("\u2581", "_")
        answer = own_answer(random, source, text)
        assert not answer.noncanonical or (answer.special[:-1]).any()
        assert answer.completion == text.encode()
        assert answer.byte_lengths.sum() == len(answer.completion)
        trace = translate_batch([answer], receiver, max_tokens=10_000).row(0)
        assert trace.reject_reason == ""
        assert receiver.completion_bytes(trace.token_ids) == text.encode()
        assert bool(trace.token_ids[-1] == receiver.eos_id) == answer.finished
    for source in usual(receivers).values():
        led = [min(source.table.special_ids), *source.cut_texts(["yah"], [b"yah"]).token_ids]
        led_by_special = describe_answers(source, [np.array(led, dtype=np.int32)], [np.zeros(len(led))], [False])[0]
        assert led_by_special.byte_lengths.sum() == len(b"yah")
    source = receivers["byte_level"]
    letters = [source.table.pieces.index(bytes([byte])) for byte in b"reverse"] + [source.eos_id]
    odd = describe_answers(source, [np.array(letters, dtype=np.int32)], [np.zeros(8, dtype=np.float32)], [True])[0]
    assert odd.noncanonical
    assert odd.byte_lengths.tolist() == [1] * 7 + [0]


def check_plain_text_gives_no_special_id(receivers: dict[str, Receiver], random: Random) -> None:
    """Literals of special tokens stay text, and an id that must stay silent is refused."""
    for kind in ("metaspace", "metaspace_prepend"):
        assert receivers[kind].table.join([0, 1]) == b"", "<unk> and </s> have no bytes"
    for receiver in usual(receivers).values():
        for literal in ("</s>", "<|im_end|>", "<unk>", "a</s>b", "<|im_end|> "):
            result = receiver.retokenize(literal.encode(), finished=False, max_tokens=99)
            assert isinstance(result, Retokenized)
            assert not receiver.table.special_ids & set(result.token_ids.tolist())
            assert receiver.completion_bytes(result.token_ids) == literal.encode()
    sampled = [own_answer(random, receivers["byte_level"], text) for text in ("yah y", "=")]
    foreign = [PeerAnswer(**(fields_of(answer) | {"token_ids": None})) for answer in sampled]
    batch = translate_batch(foreign, receivers[SILENT], max_tokens=99)
    assert batch.reject_reason == ("special_out", "")
    assert batch.row(0).flags & Flag.SPECIAL_OUT
    assert batch.row(0).flags & Flag.REJECT


CHECKS = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")
          and name not in ("check_row", "check_boundaries")}  # fmt: skip
