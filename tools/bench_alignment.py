#!/usr/bin/env python3
"""Speed of the alignment layer on one core, for those who change it, beside references measured in the same run.

    .venv/bin/python tools/bench_alignment.py [--quick]

Qwen's and Mistral's real vocabularies (package data of `dashscope` and `mistral_common`), word problems and prose.
align      spans of a whole batch from byte lengths            against spacy-alignments, a Python two-pointer,
                                                               and the receiver's own encode_batch
path       bytes and log-probs to an aligned batch             against encode_batch
growth     time per token and peak memory at 0.1, 1, 10 M      against the same at the smallest size
Times are process time, of which a neighbour on the machine takes nothing, and the best of several. Growth compares
sizes measured one after the other, each for about as long, since the clock of a core wanders over minutes; the growth
that remains is the kernel's, which gives a large result its pages (of 1 us per token, 0.1 us at 10 M and none at
0.1 M). Ends with one line of JSON.
"""

import argparse
import gc
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

for variable in ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np  # noqa: E402
import real_vocabularies  # noqa: E402
import spacy_alignments  # noqa: E402
from bench_row import Row, end, print_rows  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from mrl.alignment.card_text import card_texts  # noqa: E402
from mrl.alignment.pair_card import MAX_TOKENS, written_by  # noqa: E402
from mrl.alignment.peer_answer import PeerAnswer  # noqa: E402
from mrl.alignment.receiver import Receiver, load_receiver  # noqa: E402
from mrl.alignment.shared_spans import align_batch  # noqa: E402
from mrl.alignment.translate import CHUNK_BYTES, translate_batch  # noqa: E402

REPEATS = 5
ROUNDS = 3
TOKENS_PER_SIZE = 2_000_000
SPACY_ROWS = 60
PAIRS = (("tekken", "qwen"), ("qwen", "tekken"))


class Sides(NamedTuple):
    """A batch as flat byte lengths of its tokens, and row offsets, for both sides."""

    peer: np.ndarray
    peer_offsets: np.ndarray
    receiver: np.ndarray
    receiver_offsets: np.ndarray

    @property
    def tokens(self) -> int:
        """Number of receiver tokens."""
        return len(self.receiver)


def best_s(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Shortest of several process times, in seconds."""
    return min(mean_s(work, 1) for _ in range(repeats))


def mean_s(work: Callable[[], Any], repeats: int) -> float:
    """Mean process time of a call, without pauses of the garbage collector: the heap here is full of vocabularies."""
    gc.collect()
    gc.disable()
    start = time.process_time()
    for _ in range(repeats):
        work()
    took = time.process_time() - start
    gc.enable()
    return took / repeats


def two_pointer(peer: Sequence[int], receiver: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Spans of one row, found by walking both sides, as trainers do that align one answer at a time."""
    groups, mine, theirs = [], list[int](), list[int]()
    i = j = peer_end = receiver_end = 0
    while i < len(peer) or j < len(receiver):
        if j == len(receiver) or (i < len(peer) and peer_end <= receiver_end):
            theirs.append(i)
            peer_end += peer[i]
            i += 1
        else:
            mine.append(j)
            receiver_end += receiver[j]
            j += 1
        if peer_end == receiver_end and mine and theirs:
            groups.append((theirs, mine))
            mine, theirs = [], []
    return groups


def sides_of(peer: Receiver, receiver: Receiver, texts: list[str]) -> Sides:
    """Tokenize texts by both sides, which must read them as the same bytes."""
    data = [text.encode() for text in texts]
    theirs, mine = peer.cut_texts(texts, data), receiver.cut_texts(texts, data)
    assert not theirs.faults
    assert not mine.faults
    return Sides(theirs.lengths, theirs.offsets, mine.lengths, mine.offsets)


def rows_of_lengths(lengths: np.ndarray, offsets: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(lengths, offsets[1:-1])]


def check_groups(sides: Sides) -> None:
    """Check that the two-pointer finds as many spans in each row as the batch form."""
    spans = align_batch(*sides)
    walked = [
        len(two_pointer(a, b)) for a, b in zip(rows_of_lengths(*sides[:2]), rows_of_lengths(*sides[2:]), strict=True)
    ]
    assert walked == np.diff(spans.row_starts).tolist()


def spacy_s(texts: list[str], sides: Sides) -> float:
    """Seconds per receiver token of spacy-alignments on a part of the rows, given tokens as text."""

    def pieces(text: str, lengths: list[int]) -> list[str]:
        data, end, found = text.encode(), 0, []
        for length in lengths:
            start, end = end, end + length
            found.append(data[start:end].decode(errors="replace"))
        return found

    parts = zip(texts, rows_of_lengths(*sides[:2]), rows_of_lengths(*sides[2:]), strict=True)
    pairs = [(pieces(text, a), pieces(text, b)) for text, a, b in list(parts)[:: max(1, len(texts) // SPACY_ROWS)]]
    tokens = sum(len(b) for _, b in pairs)
    return best_s(lambda: [spacy_alignments.get_alignments(a, b) for a, b in pairs], 3) / tokens


def bench_pair(folders: Path, peer_name: str, receiver_name: str) -> list[Row]:
    """Rows of alignment and of the whole path, for one direction."""
    peer = load_receiver(folders / peer_name)
    receiver = load_receiver(folders / receiver_name)
    library = Tokenizer.from_file(str(folders / receiver_name / "tokenizer.json"))
    library.encode_special_tokens = True
    texts = [text for kind in ("math", "prose") for text in card_texts()[kind]]
    sides, answers = sides_of(peer, receiver, texts), written_by(peer, texts)
    check_groups(sides)
    walked = list(zip(rows_of_lengths(*sides[:2]), rows_of_lengths(*sides[2:]), strict=True))
    align_s = best_s(lambda: align_batch(*sides), 20)
    walk_s = best_s(lambda: [two_pointer(a, b) for a, b in walked])
    encode_s = best_s(lambda: library.encode_batch(texts, add_special_tokens=False))
    path_s = best_s(lambda: translate_batch(answers, receiver, max_tokens=MAX_TOKENS))
    pair, mega = f"{peer_name} -> {receiver_name}", sides.tokens / 1e6
    print(f"{pair}: {len(texts)} rows, {sides.tokens} receiver tokens", flush=True)
    spacy = spacy_s(texts, sides) * sides.tokens
    return [
        Row(f"align, {pair}", mega / align_s, "M tok/s", "spacy-alignments, times faster", spacy / align_s, ">=30"),
        Row(f"align, {pair}", mega / align_s, "M tok/s", "Python two-pointer, times faster", walk_s / align_s, ">=5"),
        Row(f"align, {pair}", mega / align_s, "M tok/s", "share of encode_batch", align_s / encode_s, "<=0.05"),
        Row(f"path, {pair}", mega / path_s, "M tok/s", "share of encode_batch", path_s / encode_s, "<=1.5"),
    ]


def in_chunks(sides: Sides) -> list[Sides]:
    """Split a batch into groups of rows of the size in which `translate_batch` works."""
    ends = np.cumsum(sides.receiver, dtype=np.int64)[sides.receiver_offsets[1:] - 1]
    cuts = [0, *(np.flatnonzero(np.diff(ends // CHUNK_BYTES)) + 1).tolist(), len(ends)]
    return [
        Sides(
            sides.peer[sides.peer_offsets[a] : sides.peer_offsets[b]],
            sides.peer_offsets[a : b + 1] - sides.peer_offsets[a],
            sides.receiver[sides.receiver_offsets[a] : sides.receiver_offsets[b]],
            sides.receiver_offsets[a : b + 1] - sides.receiver_offsets[a],
        )
        for a, b in itertools.pairwise(cuts)
    ]


def peak_mib(work: Callable[[], Any]) -> tuple[float, float]:
    """(MiB by which the peak of resident memory exceeds what was resident before, MiB of the arrays in the result)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    result = work()
    peak = _status("VmHWM")
    arrays = [getattr(result, name) for name in getattr(result, "__slots__", ())]
    return (peak - before) / 1024, sum(getattr(array, "nbytes", 0) for array in arrays) / 2**20


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


class Load(NamedTuple):
    """One size of batch: its receiver tokens, and its work by name."""

    tokens: int
    work: dict[str, Callable[[], Any]]


def load_of(receiver: Receiver, peer: Receiver, texts: list[str], whole: list[PeerAnswer], copies: float) -> Load:
    """Make the work of one size: the whole path, and the alignment alone in the same chunks."""
    answers: list[PeerAnswer] = (whole * (int(copies) + 1))[: max(1, round(copies * len(whole)))]
    sides = sides_of(peer, receiver, (texts * (int(copies) + 1))[: len(answers)])
    chunks = in_chunks(sides)
    return Load(
        sides.tokens,
        {
            "align": lambda: [align_batch(*chunk) for chunk in chunks],
            "path": lambda: translate_batch(answers, receiver, max_tokens=MAX_TOKENS),
        },
    )


def bench_growth(folders: Path, sizes: Sequence[int]) -> list[Row]:
    """Rows of time per token from small batches to large ones, in rounds of all sizes."""
    peer, receiver = load_receiver(folders / "qwen"), load_receiver(folders / "tekken")
    texts = [text for kind in ("math", "prose") for text in card_texts()[kind]]
    whole, per_pass = written_by(peer, texts), sides_of(peer, receiver, texts).tokens
    loads = [load_of(receiver, peer, texts, whole, size / per_pass) for size in sizes]
    rows: list[Row] = []
    for name in ("align", "path"):
        rounds = [[ns_per_token(load, name) for load in loads] for _ in range(ROUNDS)]
        for place, load in enumerate(loads):
            mega = f"{load.tokens / 1e6:.1f} M tokens"
            each = min(times[place] for times in rounds)
            growth = min(times[place] / times[0] for times in rounds)
            rows.append(Row(f"{name}, {mega}", each, "ns/token", "the smallest", growth, "<=1.5"))
            note = ""
            if name == "path":
                peak, arrays = peak_mib(load.work[name])
                note = f", memory at its peak +{max(0.0, peak):.0f} MiB, of which {arrays:.0f} MiB are the result"
            print(f"{name}, {mega}: {each:.0f} ns per token{note}", flush=True)
    return rows


def ns_per_token(load: Load, name: str) -> float:
    """Process nanoseconds per token, the mean over at least about `TOKENS_PER_SIZE` tokens."""
    repeats = max(1, TOKENS_PER_SIZE // load.tokens)
    return mean_s(load.work[name], repeats) / load.tokens * 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed of the alignment layer.")
    parser.add_argument("--quick", action="store_true", help="leave the row of 10 M tokens out")
    parser.add_argument(
        "--folders", type=Path, help="folder where tokenizers are or are to be made (a temporary folder)"
    )
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as scratch:
        folders = arguments.folders or Path(scratch)
        for name in ("qwen", "tekken"):
            real_vocabularies.make_folder(name, folders)
        rows = [row for pair in PAIRS for row in bench_pair(folders, *pair)]
        rows += bench_growth(folders, (100_000, 1_000_000, *(() if arguments.quick else (10_000_000,))))
    print_rows(rows)
    return end("alignment", rows)


if __name__ == "__main__":
    sys.exit(main())
