"""Tables of a report as HTML. Every text that comes from outside is escaped."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from mrl.config.overrides import leaves
from mrl.config.policy_tables import PolicyTable
from mrl.config.schema import RunConfig
from mrl.config.table import Table
from mrl.config.task_tables import TaskTable
from mrl.metrics.pass_at_k import Kappas, kappas, together
from mrl.records.evaluation_messages import Together
from mrl.report.comparing.beyond_accuracy import common_steps, most_answers
from mrl.report.comparison_table import shown, together_grids
from mrl.report.number_format import count, fixed, labelled, percent, signed, size
from mrl.report.progress import ALL_TASKS
from mrl.report.run_data import RunData
from mrl.report.samples.conversations import conversation, conversation_html

MIB = 1024 * 1024
SAMPLES_PER_POLICY = 12
MAX_TEXT_CHARS = 1200
MAX_OPEN_ROWS = 12
MAX_OPEN_MESSAGES = 6
"""Most messages of a conversation that is shown open; a longer one is folded until the reader opens it."""


def accuracy_table(data: RunData) -> str:
    """Return held-out accuracy at the first and the last evaluation, per policy and task, with the gain drawn."""
    rows = []
    for index, policy in enumerate(data.policies):
        tasks = [task for task in data.accuracy.get(policy, {}) if task]
        ordered = [task for task in data.tasks if task in tasks] + sorted(set(tasks) - set(data.tasks))
        for task in (ALL_TASKS, *ordered):
            rows.append(_accuracy_row(data, policy, index, task, len(ordered) + 1))
    head = _head("policy", "task", *(("start", "n"), ("end", "n"), ("gain", "n")), "0 &rarr; 1")
    return f'<div class="scroll"><table class="accuracy">{head}<tbody>{"".join(rows)}</tbody></table></div>'


def evaluation_notes(data: RunData) -> str:
    """Return notes on held-out tokens that newer weights sampled, and on prompts without answers; else empty text."""
    notes = []
    for policy in data.policies:
        shares = data.own_token_share.get(policy, {})
        step = min(shares, key=shares.__getitem__, default=0)
        if shares.get(step, 1.0) < 1.0:
            notes.append(
                f"{policy_html(data, policy)}: weights were updated during held-out evaluation. In the worst case, at "
                f"step {step}, the evaluated version sampled {percent(shares[step])} of the tokens and newer ones the "
                "rest."
            )
        missing = {step: number for step, number in data.missing_answers.get(policy, {}).items() if number}
        if missing:
            told = ", ".join(f"{count(number)} at step {step}" for step, number in sorted(missing.items()))
            notes.append(f"{policy_html(data, policy)}: held-out prompts without an answer: {told}.")
    return "".join(f'<p class="note">{note}</p>' for note in notes)


def estimates_table(data: RunData) -> str:
    """Return pass@k and majorities of each policy's last evaluation with several answers to a prompt; empty without."""
    rows = []
    for policy in data.policies:
        by_step = data.estimates.get(policy, {})
        step = max((step for step, found in by_step.items() if found), default=None)
        if step is not None:
            told = by_step[step].items()
            rows += [[policy, str(step), name, shown(found), count(found.prompts)] for name, found in told]
    return _grid_html(["policy", "step", "measure", "mean, 95 % interval", "prompts"], rows) if rows else ""


def together_table(data: RunData) -> str:
    """Return shares of prompts that policies solve together, and how alike the policies are, at the first and the last
    step at which several were evaluated; and, at the last step, shares that one policy solves and another does not.

    Every policy has k answers to a prompt, k being the largest of the run; empty where no step has several policies.
    """
    steps = Counter(step for by_step in data.tallies.values() for step, found in by_step.items() if found)
    end = max((step for step, number in steps.items() if number > 1), default=None)
    if end is None:
        return ""
    k = most_answers(data)
    names = [policy for policy in data.policies if data.tallies.get(policy, {}).get(end)]
    start = common_steps(data, names)[0]
    tallies = {step: {name: data.tallies[name][step] for name in names} for step in dict.fromkeys((start, end))}
    columns = [(step, together(of_step, k), kappas(of_step, k)) for step, of_step in tallies.items()]
    known = [(step, found, alike) for step, found, alike in columns if found is not None]
    if not known or known[-1][0] != end:
        return ""
    found = known[-1][1]
    _, alone = together_grids(found, k)
    return (
        f"{_together_lines(known, k)}{_grid_html([f'step {end}: row solves, column does not', *names], alone.rows)}"
        f'<p class="note">Over the {count(found.prompts)} prompts to which every policy has {k} '
        f"answer{'s' * (k > 1)} or more. Likeness is Cohen's kappa: 1 if two policies solve the same prompts, 0 if "
        "they agree no more than by chance at their accuracies, below 0 if they agree less than by chance.</p>"
    )


def _together_lines(columns: Sequence[tuple[int, Together, Kappas]], k: int) -> str:
    """Rows of measures with a column per step; all but likeness have intervals over prompts."""
    names = list(columns[0][1].alone)
    rows = [["solved by any", *(shown(found.union) for _, found, _ in columns)]]
    rows += [
        [f"unsolved by {name}, solved by another", *(shown(found.rescuable[name]) for _, found, _ in columns)]
        for name in names
    ]
    rows += [
        [f"likeness of {one} and {other}", *(fixed(alike[one][other], 3) for _, _, alike in columns)]
        for one, other in itertools.combinations(names, 2)
    ]
    steps = [f"step {step}, 95 % interval" for step, *_ in columns]
    return _grid_html([f"{k} answer{'s' * (k > 1)} of each", *steps], rows)


def _grid_html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as HTML: text in the first column, numbers in all others."""
    top = _head(escape(head[0]), *((escape(name), "n") for name in head[1:]))
    body = "".join(f"<tr><td>{escape(first)}</td>{''.join(map(_number, rest))}</tr>" for first, *rest in rows)
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def flow_table(data: RunData) -> str:
    """Return the traffic of every ordered pair of policies."""
    rows = []
    for (source, receiver), flow in sorted(data.flows.items(), key=lambda item: -item[1].get("records", 0.0)):
        names = f"<td>{policy_html(data, source)} &rarr; {policy_html(data, receiver)}</td>"
        numbers = (
            count(flow.get("records")),
            percent(flow.get("hit_rate")),
            fixed(flow.get("age_versions"), 1),
            size(flow.get("bytes")),
        )
        rows.append(f"<tr>{names}{''.join(map(_number, numbers))}</tr>")
    if not rows:
        return ""
    head = _head("from &rarr; to", ("records", "n"), ("hit rate", "n"), ("mean age (versions)", "n"), ("bytes", "n"))
    table = f'<div class="scroll"><table class="flows">{head}<tbody>{"".join(rows)}</tbody></table></div>'
    return (
        table if len(rows) <= MAX_OPEN_ROWS else f"<details><summary>All {len(rows)} pairs</summary>{table}</details>"
    )


def load_table(data: RunData) -> str:
    """Return the load of every host and GPU over the run; empty where nothing was measured."""
    rows = []
    for (kind, name), found in sorted(data.loads.items(), key=lambda one: (one[0][0] != "host", one[0])):
        busy = found.get("cpu_share" if kind == "host" else "busy_share", [])
        used, free = found.get("memory_mib", []), found.get("memory_free_mib", [])
        power_w, disk = found.get("power_w", []), found.get("disk_free_mib", [])
        numbers = (
            percent(_mean(busy)),
            percent(max(busy, default=None)),
            *map(_mib, (max(used, default=None), min(free, default=None), min(disk, default=None))),
            count(_mean(power_w)),
        )
        rows.append(f"<tr><td>{escape(f'{kind} {name}')}</td>{''.join(map(_number, numbers))}</tr>")
    if not rows:
        return ""
    columns = ("busy, mean", "busy, max", "memory used, max", "memory free, min", "disk free, min")
    head = _head("", *((name, "n") for name in (*columns, "power, mean (W)")))
    return f'<div class="scroll"><table class="loads">{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _mib(value: float | None) -> str:
    return size(None if value is None else value * MIB)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def config_table(config: dict[str, Any]) -> str:
    """Return the keys that differ from their defaults and, folded away, the whole configuration."""
    usual, known = leaves(usual_config(config)), leaves(config)
    other = {key: value for key, value in known.items() if key not in usual or usual[key] != value}
    whole = escape(json.dumps(config, indent=2, ensure_ascii=False))
    return (
        "<p>Keys whose value is not the default: set in the configuration or on the command line, or chosen "
        f"for the device, the models and the data.</p>{_values(other, usual)}"
        f'<details><summary>All {len(known)} keys</summary><pre class="text">{whole}</pre></details>'
    )


def usual_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults of a configuration with these policies and tasks; keys without a default are left out."""
    tables: dict[str, Any] = {name: _defaults(field.annotation) for name, field in RunConfig.model_fields.items()}
    for name, table in (("policies", PolicyTable), ("tasks", TaskTable)):
        tables[name] = {each: _defaults(table) for each in config.get(name, {})}
    return tables


def _defaults(kind: Any) -> dict[str, Any]:
    if not (isinstance(kind, type) and issubclass(kind, Table)):
        return {}
    found: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Table):
            found[name] = _defaults(field.annotation)
        elif not field.is_required():
            value = field.get_default(call_default_factory=True)
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def _values(values: dict[str, Any], usual: dict[str, Any]) -> str:
    rows = "".join(
        f'<tr><td>{escape(key)}</td><td class="text">{_text(json.dumps(value, ensure_ascii=False))}</td>'
        f'<td class="text">{_text(json.dumps(usual[key])) if key in usual else "-"}</td></tr>'
        for key, value in values.items()
    )
    head = _head("key", "value", "default")
    return f'<div class="scroll"><table class="config">{head}<tbody>{rows}</tbody></table></div>'


def sample_table(data: RunData, kind: str) -> str:
    """Return some answers of one kind per policy, spread over the run; rescues name the peer that wrote them."""
    rows = []
    for policy in data.policies:
        mine = [sample for sample in data.samples if sample.get("kind") == kind and sample.get("policy") == policy]
        mine.sort(key=_step_of)
        rows += [_sample_row(data, sample, kind) for sample in _spread(mine, SAMPLES_PER_POLICY)]
    if not rows:
        return ""
    source = [] if kind != "rescue" else ["from"]
    head = _head("policy", ("step", "n"), *source, "task", "prompt", "answer", ("reward", "n"))
    return f'<div class="scroll"><table class="samples">{head}<tbody>{"".join(rows)}</tbody></table></div>'


def unjudged_table(data: RunData) -> str:
    """Return the share of answers on which verifiers failed, and the first of every kind of failure; else empty."""
    shown_samples = [sample for sample in data.samples if sample.get("kind") == "unjudged"]
    shares = {policy: _mean([y for _, y in data.series(policy, "verify/failed_share")]) for policy in data.policies}
    if not shown_samples and not any(shares.values()):
        return ""
    told = ", ".join(f"{percent(share)} of the answers of {policy}" for policy, share in shares.items() if share)
    keys = ("policy", "task", "failure", "prompt", "completion")
    rows = "".join(
        "<tr>" + "".join(f'<td class="text">{_text(sample.get(key))}</td>' for key in keys) + "</tr>"
        for sample in shown_samples
    )
    head = _head(*keys[:-1], "answer")
    table = f'<div class="scroll"><table class="samples">{head}<tbody>{rows}</tbody></table></div>' * bool(rows)
    return f"<p>{escape(f'Verifiers gave no reward for {told}.')}</p>" * bool(told) + table


def _accuracy_row(data: RunData, policy: str, index: int, task: str, span: int) -> str:
    points = [(x, y) for x, y in data.accuracies(policy, task) if math.isfinite(y)]
    start = points[0][1] if points else None
    end = points[-1][1] if len(points) > 1 else None
    gain = end - start if start is not None and end is not None else None
    overall = task == ALL_TASKS
    first = f'<th scope="rowgroup" rowspan="{span}">{policy_html(data, policy)}</th>' if overall else ""
    last = int(points[-1][0]) if end is not None else None
    at_end = labelled(fixed(end), last, data.config.get("run", {}).get("steps"))
    numbers = "".join(map(_number, (fixed(start), at_end, signed(gain))))
    name = "<b>all tasks</b>" if overall else escape(task)
    kind = ' class="overall"' if overall else ""
    return f"<tr{kind}>{first}<td>{name}</td>{numbers}<td>{_dumbbell(start, end, index)}</td></tr>"


def _dumbbell(start: float | None, end: float | None, colour: int) -> str:
    def place(value: float) -> float:
        return 8 + 184 * min(1.0, max(0.0, value))

    parts = ['<line class="rule" x1="8" x2="192" y1="9" y2="9"/>']
    if start is not None and end is not None:
        parts.append(f'<line class="bar c{colour}" x1="{place(start):.1f}" x2="{place(end):.1f}" y1="9" y2="9"/>')
    if start is not None:
        parts.append(f'<circle class="open c{colour}" cx="{place(start):.1f}" cy="9" r="4.5"/>')
    if end is not None:
        parts.append(f'<circle class="mark c{colour}" cx="{place(end):.1f}" cy="9" r="5"/>')
    return f'<svg class="dumbbell" viewBox="0 0 200 18" aria-hidden="true">{"".join(parts)}</svg>'


def _sample_row(data: RunData, sample: dict[str, Any], kind: str) -> str:
    reward = sample.get("reward")
    source = f"<td>{policy_html(data, str(sample.get('source', '')))}</td>" if kind == "rescue" else ""
    value = float(reward) if isinstance(reward, int | float) else None
    return (
        f"<tr><td>{policy_html(data, str(sample.get('policy', '')))}</td>{_number(str(sample.get('step', '')))}{source}"
        f'<td>{_text(sample.get("task"))}</td><td class="text">{_text(sample.get("prompt"))}</td>'
        f"{_answer_cell(data, sample)}{_number(fixed(value))}</tr>"
    )


def _answer_cell(data: RunData, sample: dict[str, Any]) -> str:
    """Cell with an answer, or with an episode as a conversation, whose sampled turns have their policy's colour."""
    said = conversation(sample)
    if not said:
        return f'<td class="text">{_text(sample.get("completion", sample.get("answer")))}</td>'
    source = str(sample.get("source") or sample.get("policy"))
    colour = f' class="c{data.policies.index(source)}"' if source in data.policies else ""
    talk = conversation_html(sample, max_chars=MAX_TEXT_CHARS)
    if len(said) > MAX_OPEN_MESSAGES:
        last = next((one.text for one in reversed(said) if one.is_sampled), "")
        talk = f"<details><summary>{len(said)} messages: {_text(last[:80])}</summary>{talk}</details>"
    return f"<td{colour}>{talk}</td>"


def _step_of(sample: dict[str, Any]) -> int:
    step = sample.get("step")
    return step if isinstance(step, int) else 0


def _spread(samples: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    if len(samples) <= most:
        return list(samples)
    return [samples[round(place * (len(samples) - 1) / (most - 1))] for place in range(most)]


def _text(value: object) -> str:
    words = "" if value is None else str(value)
    cut = words if len(words) <= MAX_TEXT_CHARS else words[:MAX_TEXT_CHARS] + " [...]"
    return escape(cut.encode("utf-8", "backslashreplace").decode())


def policy_html(data: RunData, name: str) -> str:
    """Return the name of a policy in its colour; escaped alone where the run has no such policy."""
    if name not in data.policies:
        return escape(name)
    return f'<span class="policy c{data.policies.index(name)}">{escape(name)}</span>'


def _number(words: str) -> str:
    return f'<td class="n">{escape(words)}</td>'


def _head(*columns: str | tuple[str, str]) -> str:
    cells = [
        f"<th>{column}</th>" if isinstance(column, str) else f'<th class="n">{column[0]}</th>' for column in columns
    ]
    return f"<thead><tr>{''.join(cells)}</tr></thead>"
