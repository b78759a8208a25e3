"""The answers of peers that a receiver found strangest, a few per pair, below what sharing cost on the whole.

They are found in one pass over the receivers' files, of which no more than one step is in memory.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from mrl.metrics.residuals import every_steps, residual_files, standing_lines
from mrl.report.number_format import count, fixed, percent, signed

ROWS_PER_PAIR = 3
NOTE = (
    "Those with the most negative gap per byte among the answers trained on; residuals/<receiver>.jsonl has a line for "
    "every answer that was looked at, or scored by the peer. Weight: the answer's share of the step's own over peer "
    "probability, times the number of answers, so that 1 is its fair share."
)
HEAD = ("answer", "step", "bytes", "gap, nats", "nats/byte", "nats/token", "span std", "out of band", "1:1 tokens")


class Strange(NamedTuple):
    """One answer."""

    source: str
    receiver: str
    line: dict[str, Any]
    num_compared: int
    """Answers of the pair that were compared in the same step, this one among them."""


@dataclass(slots=True)
class StrangeAnswers:
    """What the files of a run tell."""

    answers: list[Strange] = field(default_factory=list)
    """By receiver, then source, strangest first."""
    every_steps: dict[str, int] = field(default_factory=dict)
    """Receiver -> only multiples of this step are in its file; those that have all steps are left out."""
    problems: list[str] = field(default_factory=list)
    """Files that cannot be read."""


def strange_answers(residuals: Path) -> StrangeAnswers:
    """The strangest answers of every pair in a `residuals` folder, which may be missing."""
    found = StrangeAnswers()
    for receiver, path in residual_files(residuals).items():
        try:
            found.answers += strangest(receiver, standing_lines(path, found.problems.append))
            every = every_steps(path)
        except OSError as error:
            found.problems.append(f"{path.name} cannot be read ({error.strerror})")
        else:
            found.every_steps |= {receiver: every} if every > 1 else {}
    return found


def strangest(receiver: str, lines: Iterable[dict[str, Any]]) -> list[Strange]:
    """The `ROWS_PER_PAIR` strangest answers of every source; the lines of one step stand together."""
    best: defaultdict[str, list[Strange]] = defaultdict(list)
    for _, of_step in itertools.groupby(lines, key=lambda line: line.get("step")):
        compared: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for line in of_step:
            if _number(line, "gap_nats_per_byte") is not None:
                compared[str(line.get("source", ""))].append(line)
        for source, mine in compared.items():
            candidates = (Strange(source, receiver, line, len(mine)) for line in mine)
            best[source] = heapq.nsmallest(ROWS_PER_PAIR, itertools.chain(best[source], candidates), key=_gap)
    return [one for _, of_source in sorted(best.items()) for one in of_source]


def strange_table(found: StrangeAnswers) -> str:
    """The table as HTML, closed at first; empty when no answer of a peer was compared."""
    if not found.answers:
        return ""
    cells = "".join(f'<th class="n">{name}</th>' for name in HEAD[1:])
    head = f'<thead><tr><th>from &rarr; to</th><th>{HEAD[0]}</th>{cells}<th class="n">weight</th><th></th></tr></thead>'
    rows = "".join(map(_row, found.answers))
    table = f'<div class="scroll"><table class="costs">{head}<tbody>{rows}</tbody></table></div>'
    note = f"<p class='note'>{escape(' '.join([NOTE, *_thinned(found)]))}</p>"
    return f"<details><summary>Strangest answers per pair</summary>{table}{note}</details>"


def _thinned(found: StrangeAnswers) -> list[str]:
    """What is not in the files."""
    return [
        f"The file of {receiver} grew too long: it has only the steps that are multiples of {every}."
        for receiver, every in sorted(found.every_steps.items())
    ]


def _gap(one: Strange) -> float:
    return float(one.line["gap_nats_per_byte"])


def _row(one: Strange) -> str:
    line, weight = one.line, _number(one.line, "ess_weight")
    numbers = (
        str(line.get("step", "")),
        count(_number(line, "bytes")),
        signed(_number(line, "gap_nats"), 1),
        signed(_number(line, "gap_nats_per_byte"), 3),
        signed(_number(line, "gap_nats_per_token")),
        fixed(_number(line, "span_std_nats")),
        percent(_number(line, "outside_band")),
        percent(_number(line, "one_to_one_tokens")),
        fixed(None if weight is None else weight * one.num_compared),
    )
    cells = "".join(f'<td class="n">{escape(words)}</td>' for words in numbers)
    pair = f"{escape(one.source)} &rarr; {escape(one.receiver)}"
    flags = line.get("flags")
    names = ", ".join(map(str, flags)) if isinstance(flags, list) else ""
    answer = f"{line.get('record_id', '')} #{line.get('answer', '')}"
    return f"<tr><td>{pair}</td><td>{escape(answer)}</td>{cells}<td>{escape(names.lower())}</td></tr>"


def _number(line: dict[str, Any], name: str) -> float | None:
    value = line.get(name)
    return float(value) if isinstance(value, int | float) else None
