"""The tables of `mrl inspect`: records held, traffic between policies, and clients."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from mrl.inspection.shown_records import shown_text
from mrl.records.exchange_messages import ClientState, PairFlow, PolicyStat, Stat

LOOK: dict[str, Any] = {"title_justify": "left", "box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "title_style": "bold"}
SILENT_S = 3.0
"""Seconds without a message after which a client is marked; living clients are heard every second."""
MAX_CLIENTS = 12
"""Clients that the table lists."""

Pair = tuple[str, str]


class Rates(NamedTuple):
    """Records per second, since the previous account or since the daemon started."""

    delivered: Mapping[Pair, float]
    """(source, receiver) -> records delivered."""
    put: Mapping[str, float]
    """Policy -> records put."""
    refused: Mapping[Pair, float]
    """(policy, reason) -> records refused."""


def rates_per_s(stat: Stat, before: Stat | None) -> Rates:
    """Return the rates since `before` if that is an account of the same daemon, otherwise since the daemon's start."""
    if before is not None and before.incarnation != stat.incarnation:
        before = None
    passed_s = max(stat.uptime_s - (before.uptime_s if before else 0.0), 1e-9)

    def rates(now: dict[Any, int], then: dict[Any, int]) -> dict[Any, float]:
        return {key: (number - then.get(key, 0)) / passed_s for key, number in now.items()}

    return Rates(
        rates(_delivered(stat), _delivered(before) if before else {}),
        rates(_put(stat), _put(before) if before else {}),
        rates(_refused(stat), _refused(before) if before else {}),
    )


def _delivered(stat: Stat) -> dict[Pair, int]:
    return {(flow.source, flow.receiver): flow.records for flow in stat.flows}


def _put(stat: Stat) -> dict[str, int]:
    return {policy_stat.policy: policy_stat.put for policy_stat in stat.policies}


def _refused(stat: Stat) -> dict[Pair, int]:
    return {
        (policy_stat.policy, reason): number
        for policy_stat in stat.policies
        for reason, number in policy_stat.refused.items()
    }


def tables(stat: Stat, rates: Rates) -> Group:
    """Return all tables about one daemon."""
    flows: list[RenderableType] = [flow_table(stat, rates)]
    if any(rates.refused):
        flows.append(refusal_table(stat, rates))
    waits = [client_table(stat.sessions)] if stat.sessions else []
    parts = (Columns(items, padding=(0, 4)) for items in (flows, waits) if items)
    return Group(*_summary(stat), Text(), policy_table(stat.policies, rates), *parts)


def _summary(stat: Stat) -> list[Text]:
    storage = Text("storage: ")
    storage.append(stat.storage or "well", "green" if not stat.storage else "bold red")
    pace = f", {1e3 * stat.commit_s / stat.commits:.1f} ms per commit" if stat.commits else ""
    storage.append(
        f", {stat.unstored} Puts not stored yet, {stat.later} Puts deferred; file {mib(stat.file_bytes)} MiB{pace}"
    )
    lines = (
        f"deliveries: {stat.unacknowledged} records unacknowledged, {stat.abandoned} given up; "
        f"{stat.undelivered} messages had no receiver",
        f"score requests: {stat.unserved} not assigned to a worker; {stat.dropped_watches} watches dropped",
        f"dropped input: {listed(stat.malformed)}",
    )
    held = f"{mib(stat.used_bytes)} of {mib(stat.budget_bytes)} MiB held ({stat.used_bytes / stat.budget_bytes:.0%})"
    title = Text.assemble((f"exchange {stat.incarnation}", "bold"), f", up {stat.uptime_s:.0f} s, ")
    title.append(f"{len(stat.clients)} clients, {held}")
    return [title, storage, *(Text(shown_text(line)) for line in lines)]


def policy_table(policies: list[PolicyStat], rates: Rates) -> Table:
    """Return the table of records held of every policy; the column `oldest` is the greatest age in versions."""
    table = Table(Column("policy", no_wrap=True), Column("version", no_wrap=True), title="records held", **LOOK)
    for name in ("oldest", "prompts", "records", "MiB", "put", "put/s", "refused", "watched", "barrier"):
        table.add_column(name, justify="right")
    for name in ("by type", "evicted"):
        table.add_column(name, overflow="fold")
    for policy_stat in policies:
        barrier = "-" if policy_stat.barrier is None else policy_stat.barrier
        rate = f"{rates.put[policy_stat.policy]:.1f}"
        sizes = (policy_stat.oldest_age_versions, policy_stat.prompts, policy_stat.records, mib(policy_stat.bytes))
        numbers = (
            *sizes,
            policy_stat.put,
            rate,
            sum(policy_stat.refused.values()),
            policy_stat.watched_prompts,
            barrier,
        )
        counts = (policy_stat.kinds, policy_stat.evicted)
        _add(table, policy_stat.policy, policy_stat.newest or "-", *numbers, *map(listed, counts))
    return table


def refusal_table(stat: Stat, rates: Rates) -> Table:
    """Return the table of records refused, by policy and reason."""
    table = Table(Column("policy", no_wrap=True), "reason", title="records refused", **LOOK)
    for name in ("records", "per s"):
        table.add_column(name, justify="right")
    for (policy, reason), number in sorted(_refused(stat).items()):
        _add(table, policy, reason, number, f"{rates.refused[policy, reason]:.2f}")
    return table


def flow_table(stat: Stat, rates: Rates) -> Table:
    """Return the table of records delivered, by source and receiver."""
    table = Table(Column("from", no_wrap=True), Column("to", no_wrap=True), title="records delivered", **LOOK)
    for name in ("records", "per s", "MiB", "asked", "hits", "hit rate", "mean age"):
        table.add_column(name, justify="right")
    for flow in stat.flows:
        _add(table, flow.source, flow.receiver, *_flow_cells(flow, rates.delivered[flow.source, flow.receiver]))
    return table


def client_table(clients: list[ClientState]) -> Table:
    """Return the table of clients: those with most records unacknowledged or queued, then those silent longest."""
    table = Table(Column("client", no_wrap=True), "policy", title="clients", **LOOK)
    for name in ("heard", "unacknowledged", "queued"):
        table.add_column(name, justify="right")
    for state in clients[:MAX_CLIENTS]:
        heard = Text(f"{state.silent_s:.1f} s ago", "yellow" if state.silent_s > SILENT_S else "")
        numbers = (state.unacknowledged, state.queued)
        _add(table, state.client, state.policy, heard, *(number or "-" for number in numbers))
    if len(clients) > MAX_CLIENTS:
        _add(table, f"... and {len(clients) - MAX_CLIENTS} more")
    return table


def _add(table: Table, *cells: object) -> None:
    """Add a row. Clients choose their names, so markup and what a terminal would act upon are shown as text."""
    table.add_row(*(cell if isinstance(cell, Text) else Text(shown_text(str(cell))) for cell in cells))


def _flow_cells(flow: PairFlow, rate_per_s: float) -> tuple[object, ...]:
    hit_rate = f"{flow.hits / flow.asked:.2f}" if flow.asked else "-"
    age = f"{flow.mean_age_versions:.1f}" if flow.records else "-"
    return flow.records, f"{rate_per_s:.2f}", mib(flow.bytes), flow.asked, flow.hits, hit_rate, age


def mib(num_bytes: int) -> str:
    """Return bytes as MiB, with two decimals."""
    return f"{num_bytes / 2**20:.2f}"


def listed(counts: Mapping[str, int]) -> str:
    """Return the counts that are not 0, in the order of their names."""
    return ", ".join(f"{name} {number}" for name, number in sorted(counts.items()) if number) or "none"
