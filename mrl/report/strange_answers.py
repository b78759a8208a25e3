"""The answers of peers that a receiver found strangest, a few per pair, below what sharing cost on the whole."""

from collections import defaultdict
from collections.abc import Iterator
from html import escape
from typing import Any

from mrl.report.readable import count, fixed, percent, signed
from mrl.report.run_data import RunData

ROWS_PER_PAIR = 3
NOTE = (
    "Those with the most negative gap per byte among the answers trained on; residuals/<receiver>.jsonl has a line for "
    "every answer that was looked at. Weight: the answer's share of the step's own over peer probability, times the "
    "number of answers, so that 1 is its fair share."
)
HEAD = ("answer", "step", "bytes", "gap, nats", "nats/byte", "nats/token", "span std", "out of band", "1:1 tokens")


def strange_table(data: RunData) -> str:
    """The table as HTML, closed at first; empty when no answer of a peer was compared."""
    rows = "".join(_row(receiver, line, lines) for receiver, lines, line in _strangest(data))
    if not rows:
        return ""
    cells = "".join(f'<th class="n">{name}</th>' for name in HEAD[1:])
    head = f'<thead><tr><th>from &rarr; to</th><th>{HEAD[0]}</th>{cells}<th class="n">weight</th><th></th></tr></thead>'
    table = f'<div class="scroll"><table class="costs">{head}<tbody>{rows}</tbody></table></div>'
    note = f"<p class='note'>{escape(NOTE)}</p>"
    return f"<details><summary>Strangest answers per pair</summary>{table}{note}</details>"


def _strangest(data: RunData) -> Iterator[tuple[str, list[dict[str, Any]], dict[str, Any]]]:
    """(receiver, lines of the pair, line), strangest first."""
    for receiver, lines in data.residuals.items():
        by_source: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for line in lines:
            by_source[str(line.get("source", ""))].append(line)
        for _, mine in sorted(by_source.items()):
            compared = [line for line in mine if _number(line, "gap_nats_per_byte") is not None]
            compared.sort(key=lambda line: float(line["gap_nats_per_byte"]))
            yield from ((receiver, compared, line) for line in compared[:ROWS_PER_PAIR])


def _row(receiver: str, line: dict[str, Any], of_pair: list[dict[str, Any]]) -> str:
    weight, peers = _number(line, "ess_weight"), sum(other.get("step") == line.get("step") for other in of_pair)
    numbers = (
        str(line.get("step", "")),
        count(_number(line, "bytes")),
        signed(_number(line, "gap_nats"), 1),
        signed(_number(line, "gap_nats_per_byte"), 3),
        signed(_number(line, "gap_nats_per_token")),
        fixed(_number(line, "span_std_nats")),
        percent(_number(line, "outside_band")),
        percent(_number(line, "one_to_one_tokens")),
        fixed(None if weight is None else weight * peers),
    )
    cells = "".join(f'<td class="n">{escape(words)}</td>' for words in numbers)
    pair = f"{escape(str(line.get('source', '')))} &rarr; {escape(receiver)}"
    flags = line.get("flags")
    names = ", ".join(map(str, flags)) if isinstance(flags, list) else ""
    answer = f"{line.get('record_id', '')} #{line.get('answer', '')}"
    return f"<tr><td>{pair}</td><td>{escape(answer)}</td>{cells}<td>{escape(names.lower())}</td></tr>"


def _number(line: dict[str, Any], name: str) -> float | None:
    value = line.get(name)
    return float(value) if isinstance(value, int | float) else None
