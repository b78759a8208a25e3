"""What sharing cost each ordered pair of policies: the residual of peers' answers in own tokens, over a whole run."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape

from mrl.alignment.residual import excess_std_nats
from mrl.report.charts import STEP, Figure
from mrl.report.number_format import MISSING, count, fixed, percent, signed
from mrl.report.run_data import RunData
from mrl.report.svg import Axes, Line, line_chart, moving_mean

MAX_LINES = 8
PREFIX = "align/"
NOTE = (
    "Peer answers that were looked at, or own ones that the peer scored; the figures are of those trained on. 1:1: "
    "own tokens, or bytes in them, that cover exactly one token of the peer. Length: own tokens per token of the peer. "
    "Gap: own log-prob of the text minus the peer's; the more negative, the stranger the text. Span std and out of "
    "band: log-ratios of common spans, and the share outside [0.8, 1.2]. Floor: the span std that the two tokenizers "
    "alone make of equal policies; excess: what is left without it, if the two are independent. A tokenizer that joins "
    "words, or cuts them by what follows, has no measurable floor. ESS: effective share of the answers of a step, were "
    "they weighted by own over peer probability."
)


@dataclass(slots=True)
class PairCost:
    """Sums over the steps of one receiver, for one source."""

    source: str
    receiver: str
    answers: float = 0.0
    rejected: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    """Traces that were not believed, by reason."""
    tokens: float = 0.0
    """Own tokens of the answers trained on."""
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    weights: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, values: Mapping[str, float]) -> None:
        """Count one step; `values` are those of this source, without prefix and source."""
        rows = values.get("rows", 0.0)
        self.answers += rows
        self.rejected += rows * values.get("rejected_share", 0.0)
        for name, value in values.items():
            room, _, rest = name.partition("/")
            if rest:
                counters = {"rejected": self.reasons, "flagged": self.flags, "trace_rejected": self.faults}
                counters.get(room, Counter())[rest] += int(value)
        tokens, size, spans = (values.get(name, 0.0) for name in ("receiver_tokens", "bytes", "spans"))
        ratio = values.get("length_ratio", 0.0)
        self.tokens += tokens
        self._weigh("one_to_one_tokens", values.get("one_to_one_tokens"), tokens)
        self._weigh("one_to_one_bytes", values.get("one_to_one_bytes"), size)
        self._weigh("sequence_ess", values.get("sequence_ess"), rows)
        self._weigh("length_ratio", ratio or None, tokens / ratio if ratio else 0.0)
        self._weigh("gap_nats_per_byte", values.get("gap_nats_per_byte"), size)
        self._weigh("gap_nats_per_token", values.get("gap_nats_per_token"), tokens)
        std = values.get("span_std_nats")
        self._weigh("span_variance", None if std is None else std * std, spans)
        self._weigh("outside_band", values.get("outside_band"), spans)

    def mean(self, name: str) -> float | None:
        """The weighted mean over steps; None where no step had it."""
        return self.sums[name] / self.weights[name] if self.weights.get(name) else None

    @property
    def span_std_nats(self) -> float | None:
        """Root of the mean variance over steps."""
        variance = self.mean("span_variance")
        return None if variance is None else math.sqrt(variance)

    def _weigh(self, name: str, value: float | None, weight: float) -> None:
        if value is not None and math.isfinite(value) and weight > 0:
            self.sums[name] += weight * value
            self.weights[name] += weight


def pair_costs(data: RunData) -> list[PairCost]:
    """One entry per pair that met, in the order of the policies."""
    found: dict[tuple[str, str], PairCost] = {}
    for receiver in data.policies:
        for step in sorted(data.steps.get(receiver, {})):
            for source, values in _by_source(data.steps[receiver][step]).items():
                found.setdefault((source, receiver), PairCost(source, receiver)).add(values)
    return [cost for cost in found.values() if cost.answers]


def cost_table(data: RunData) -> str:
    """The table as HTML; empty when no peer answer was ever tried."""
    costs = pair_costs(data)
    if not costs:
        return ""
    rows = "".join(_row(data, cost) for cost in costs)
    remarks = "<th>remarks</th>" if any(cost.reasons or cost.flags or cost.faults for cost in costs) else "<th></th>"
    names = [
        "answers",
        "rejected",
        "own tokens",
        "1:1 tokens",
        "bytes",
        "length",
        "gap, nats/byte",
        "nats/token",
        "span std, nats",
        "floor",
        "excess",
    ]
    cells = "".join(f'<th class="n">{name}</th>' for name in [*names, "out of band", "ESS"])
    head = f"<thead><tr><th>from &rarr; to</th>{cells}{remarks}</tr></thead>"
    table = f'<div class="scroll"><table class="costs">{head}<tbody>{rows}</tbody></table></div>'
    return f"<h3>Cost of sharing per pair</h3>{table}<p class='note'>{escape(NOTE)}</p>"


def gap_chart(data: RunData) -> Figure:
    """The gap of every pair over steps."""
    lines = []
    for cost in pair_costs(data)[:MAX_LINES]:
        raw = data.series(cost.receiver, f"{PREFIX}gap_nats_per_byte/{cost.source}")
        points = [(x, 100 * y) for x, y in raw if math.isfinite(y)]
        window = max(5, len(points) // 20) | 1 if len(points) >= 10 else 1
        colour = data.policies.index(cost.receiver)
        lines.append(Line(f"{cost.source[:6]}→{cost.receiver[:6]}", colour, moving_mean(points, window), points))
    drawing = line_chart(lines, Axes(STEP, "gap (nats per 100 bytes)"))
    note = "Own log-prob of a peer's answer minus the peer's own, in the colour of the receiver. 0: as likely to both."
    return Figure("How strange peers' answers are", drawing, note)


def _by_source(values: Mapping[str, float]) -> dict[str, dict[str, float]]:
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for name, value in values.items():
        what, _, source = name.removeprefix(PREFIX).rpartition("/")
        if name.startswith(PREFIX) and what:
            found[source][what] = value
    return found


def _row(data: RunData, cost: PairCost) -> str:
    numbers = (
        count(cost.answers),
        percent(cost.rejected / cost.answers),
        count(cost.tokens),
        percent(cost.mean("one_to_one_tokens")),
        percent(cost.mean("one_to_one_bytes")),
        fixed(cost.mean("length_ratio")),
        signed(cost.mean("gap_nats_per_byte"), 3),
        signed(cost.mean("gap_nats_per_token")),
        fixed(cost.span_std_nats),
        *_floor_and_excess(data, cost),
        percent(cost.mean("outside_band")),
        percent(cost.mean("sequence_ess")),
    )
    cells = "".join(f'<td class="n">{escape(words)}</td>' for words in numbers)
    marks = [f"{count(n)} rejected: {name}" for name, n in sorted(cost.reasons.items())]
    marks += [f"{count(n)} without trace: {name}" for name, n in sorted(cost.faults.items())]
    marks += [f"{count(n)} {name}" for name, n in sorted(cost.flags.items())]
    names = f"{_policy(data, cost.source)} &rarr; {_policy(data, cost.receiver)}"
    return f"<tr><td>{names}</td>{cells}<td>{escape(', '.join(marks))}</td></tr>"


def _floor_and_excess(data: RunData, cost: PairCost) -> tuple[str, str]:
    """What tokenizers alone make of the span std, and what is left without it."""
    pair = (cost.source, cost.receiver)
    if pair not in data.floors:
        return MISSING, MISSING
    floor = data.floors[pair]
    if floor is None:
        return "not measurable", MISSING
    std = cost.span_std_nats
    return fixed(floor), MISSING if std is None else fixed(excess_std_nats(std, floor))


def _policy(data: RunData, name: str) -> str:
    if name not in data.policies:
        return escape(name)
    return f'<span class="policy c{data.policies.index(name)}">{escape(name)}</span>'
