"""`bandit.html`: the study on one page that needs no other file, for a reader who has not seen the code."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from mrl.bandit.method_looks import LOOKS
from mrl.bandit.methods import Row
from mrl.bandit.study_text import CAPTIONS, LIMITS, OPENING, STYLE, TWO_NUMBERS


class ToyTable(NamedTuple):
    """Mean success by method, `by_method[name][i]` after `steps[i]` steps."""

    steps: Sequence[int]
    by_method: Mapping[str, Sequence[float]]


def page(numbers: Mapping[str, Any], rows: Sequence[Row], toy: ToyTable, pictures: Mapping[str, bytes]) -> str:
    """The whole page; `pictures` maps file names to PNG, in the order in which they are shown."""
    figures = "".join(_figure(name, data, _toy(toy) if name == "toy.png" else "") for name, data in pictures.items())
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>Support and stability of shared experience</title><style>{STYLE}</style></head><body><main>
{OPENING}
{TWO_NUMBERS}
<h2>The reference instance in figures</h2>
{_instance(numbers)}
<div class="scroll wide">{_table(rows)}</div>
{figures}
{LIMITS}
{_footer(numbers)}
</main></body></html>
"""


def significant(value: float) -> str:
    """A number for a table: three significant digits, and an exponent only below 0.0001 and from 100 000 on."""
    if value == 0 or abs(value) < 1e-15:
        return "0"
    if abs(value) < 1e-4 or abs(value) >= 1e5:
        return f"{value:.2e}"
    return f"{value:#.3g}".rstrip(".")


def _figure(name: str, data: bytes, extra: str) -> str:
    caption = CAPTIONS[name]
    source = base64.b64encode(data).decode()
    return (
        f"<section><h2>{escape(caption.finding)}</h2><p>{caption.before}</p>"
        f'<figure><img src="data:image/png;base64,{source}" alt="{escape(caption.alt)}" loading="lazy">'
        f"<figcaption><b>How to read it.</b> {caption.reading}</figcaption></figure>{extra}</section>"
    )


def _instance(numbers: Mapping[str, Any]) -> str:
    instance, settings = numbers["instance"], numbers["settings"]
    return (
        "<p>Eight answers, two of them right. The learner finds one in "
        f"{100 * instance['p']:.1f} % of its samples (p), the peer in {100 * instance['q']:.0f} % (q); "
        f"χ²(π‖μ) = {instance['chi_squared']:.2f}. Groups of {settings['group']} and {settings['peer_group']} answers, "
        f"λ = {settings['lambda_']:g}; a rescue happens on {100 * instance['rescue_probability']:.0f} % of the visits. "
        f"Beside every closed form stands a Monte Carlo estimate from {numbers['draws']:,} draws with its standard "
        "error: two ways to the same number.</p>"
    )


def _table(rows: Sequence[Row]) -> str:
    heads = ("method", "the peer gives", "S", "S, sampled", "V", "V, sampled", "bias", "S/√V")
    head = "".join(f"<th{' class=n' if index > 1 else ''}>{text}</th>" for index, text in enumerate(heads))
    body = "".join(_table_row(row) for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _table_row(row: Row) -> str:
    one = row.measured
    cells = (
        significant(row.support),
        _measured(one.support, one.support_error),
        significant(row.variance),
        _measured(one.variance, one.variance_error),
        significant(row.bias),
        f"{row.support / row.variance**0.5:.2f}",
    )
    name = f'<th scope="row" style="color:{LOOKS[row.name].colour}">{escape(row.name)}</th>'
    return f"<tr>{name}<td>{row.shares}</td>{''.join(f'<td class=n>{cell}</td>' for cell in cells)}</tr>"


def _measured(value: float, error: float) -> str:
    """Value and standard error, both without an exponent."""
    return f"{significant(value)} ± {np.format_float_positional(error, precision=1, fractional=False)}"


def _toy(toy: ToyTable) -> str:
    head = "".join(f"<th class=n>after {step} steps</th>" for step in toy.steps)
    body = "".join(
        f'<tr><th scope="row" style="color:{LOOKS[name].colour}">{escape(name)}</th>'
        + "".join(f"<td class=n>{value:.3f}</td>" for value in values)
        + "</tr>"
        for name, values in toy.by_method.items()
    )
    return f"<table><thead><tr><th>mean success</th>{head}</tr></thead><tbody>{body}</tbody></table>"


def _footer(numbers: Mapping[str, Any]) -> str:
    toy = numbers["toy"]
    return (
        f"<footer><p>Made by <code>mrl bandit --seed {numbers['seed']}</code>: {numbers['draws']:,} draws; toy of "
        f"{toy['contexts']} contexts, {toy['arms']} arms, {toy['steps']} steps, {toy['seeds']} seed(s). "
        "Every number is also in <code>bandit.json</code>. Methods: Mutual reinforcement learning, "
        '<a href="https://arxiv.org/abs/2605.07244">arXiv 2605.07244</a>. Bandit model, formulas and numbers: '
        "this project.</p></footer>"
    )
