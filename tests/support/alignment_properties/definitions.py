"""Slow and obvious definitions, against which alignments are checked."""

import itertools

from mrl.alignment.peer_answer import PeerAnswer

Places = list[tuple[list[int], list[int]]]
"""For each span, the token places of both sides."""


def slow_spans(peer: list[int], own: list[int]) -> Places:
    """Return the spans by definition: one closes at a boundary of both sides, and only tokens with bytes close one."""
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


def readable(answer: PeerAnswer) -> tuple[int, str]:
    """Return the number of leading peer tokens that are whole characters, and their text."""
    best = (0, "")
    for count, end in enumerate(itertools.accumulate(answer.byte_lengths.tolist()), start=1):
        try:
            best = count, answer.completion[:end].decode()
        except UnicodeDecodeError:
            continue
    return best
