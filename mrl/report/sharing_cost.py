"""Cost of sharing for each ordered pair of policies over a run: the residual of peers' answers in own tokens."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape

from mrl.alignment.residual import excess_std_nats
from mrl.report.charts import STEP, Figure, window_of
from mrl.report.number_format import MISSING, count, fixed, percent, signed
from mrl.report.run_data import RunData
from mrl.report.svg import Axes, Line, line_chart, moving_mean
from mrl.report.tables import policy_html

MAX_LINES = 8
PREFIX = "align/"
NOTE = (
    "Answers: peer answers that were examined, or own answers that the peer scored; the other columns are about those "
    "trained on. 1:1: share of own tokens, or of bytes, in tokens that cover exactly one token of the peer. Length: "
    "own tokens per token of the peer. Gap: own log-prob of the text minus the peer's; the more negative, the less "
    "likely the text is to the receiver. Span std: standard deviation of the log-ratios of common spans. Out of band: "
    "share of ratios outside [0.8, 1.2]. Floor: the span std that the two tokenizers alone cause between equal "
    "policies; excess: the span std without the floor, if the two are independent. A tokenizer that joins words, or "
    "splits them depending on the following text, has no measurable floor. ESS: effective share of the answers of a "
    "step if they were weighted by own over peer probability."
)


@dataclass(slots=True)
class PairCost:
    """Sums over the steps of one receiver of its `align/` metrics about the answers of one source."""

    source: str
    receiver: str
    answers: float = 0.0
    """Answers that the receiver looked at."""
    rejected: float = 0.0
    """Answers that could not be used: not expressible in the receiver's tokens, or cut."""
    reasons: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    """Answers whose trace was not believed, by reason."""
    tokens: float = 0.0
    """Receiver's tokens of the answers trained on."""
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Measure -> sum over steps of value times weight."""
    weights: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Measure -> sum over steps of the weight: tokens, bytes, spans or answers."""

    def add(self, values: Mapping[str, float]) -> None:
        """Add one step. `values` are the `align/` metrics about this source, by name without prefix and source."""
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
        """Return the weighted mean of a measure over steps; None where no step had it."""
        return self.sums[name] / self.weights[name] if self.weights.get(name) else None

    @property
    def span_std_nats(self) -> float | None:
        """Square root of the mean variance of span log-ratios over steps, weighted by spans."""
        variance = self.mean("span_variance")
        return None if variance is None else math.sqrt(variance)

    def _weigh(self, name: str, value: float | None, weight: float) -> None:
        if value is not None and math.isfinite(value) and weight > 0:
            self.sums[name] += weight * value
            self.weights[name] += weight


def pair_costs(data: RunData) -> list[PairCost]:
    """Return one entry per pair whose receiver looked at answers of the source, in the order of the receivers."""
    found: dict[tuple[str, str], PairCost] = {}
    for receiver in data.policies:
        for step in sorted(data.steps.get(receiver, {})):
            for source, values in _by_source(data.steps[receiver][step]).items():
                found.setdefault((source, receiver), PairCost(source, receiver)).add(values)
    return [cost for cost in found.values() if cost.answers]


def cost_table(data: RunData) -> str:
    """Return the costs of all pairs as an HTML table; empty when no receiver ever looked at a peer's answer."""
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
    """Draw the gap of log-probabilities over steps, for the first MAX_LINES pairs."""
    lines = []
    for cost in pair_costs(data)[:MAX_LINES]:
        raw = data.series(cost.receiver, f"{PREFIX}gap_nats_per_byte/{cost.source}")
        points = [(x, 100 * y) for x, y in raw if math.isfinite(y)]
        smooth, colour = moving_mean(points, window_of(points)), data.policies.index(cost.receiver)
        lines.append(Line(f"{cost.source[:6]}→{cost.receiver[:6]}", colour, smooth, points))
    drawing = line_chart(lines, Axes(STEP, "gap (nats per 100 bytes)"))
    note = "Own log-prob of a peer's answer minus the peer's own, in the receiver's colour. 0: equally likely to both."
    return Figure("How unlikely peers' answers are", drawing, note)


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
    names = f"{policy_html(data, cost.source)} &rarr; {policy_html(data, cost.receiver)}"
    return f"<tr><td>{names}</td>{cells}<td>{escape(', '.join(marks))}</td></tr>"


def _floor_and_excess(data: RunData, cost: PairCost) -> tuple[str, str]:
    """Two cells: the span std that the two tokenizers alone cause, and the measured span std without that part."""
    pair = (cost.source, cost.receiver)
    if pair not in data.floors:
        return MISSING, MISSING
    floor = data.floors[pair]
    if floor is None:
        return "not measurable", MISSING
    std = cost.span_std_nats
    return fixed(floor), MISSING if std is None else fixed(excess_std_nats(std, floor))
