"""The live view: one screen of a run, drawn with rich, for terminals from 80 columns on.

Columns fall away as the terminal narrows. The activity or wait of a learner never does: it moves from the table of
policies to the table of roles below, learners first. The flow of experience between policies stands beside the roles
where there is room. A run with episodes shows one at the bottom, as a conversation; on a low terminal the episode and
the flow take turns.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mrl.report.console_lines import doing, state
from mrl.report.number_format import count, elapsed, fixed, percent, seconds, signed, size, sparkline
from mrl.report.palette import colour_of
from mrl.report.progress import PolicyProgress, Progress, RoleSign, kind_of
from mrl.report.samples.live_episode import episode_text

WIDE = 118
MEDIUM = 96
LOW = 28
BAR_CELLS = 8
EPISODE_LINES, LEAST_EPISODE_LINES = 10, 5
QUIET_S = 3.0
"""Age in seconds of a heartbeat from which it is coloured; the role is called silent later."""


class Title(NamedTuple):
    """Name and regime of the run, for the header."""

    name: str
    regime: str


class LiveView:
    """Renders a `Progress` as of `now_s`. After the run's end, roles, shares of capacity and episode are left out."""

    def __init__(self, progress: Progress, title: Title, now_s: float, *, has_ended: bool = False) -> None:
        self._progress, self._title, self._now_s, self._has_ended = progress, title, now_s, has_ended

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or console.size.height
        episode = None if self._has_ended else self._progress.episodes.at(self._now_s, with_pauses=self._is_low(height))
        tables, left = self._fitted(console, options, height, has_episode=bool(episode))
        if episode and left < LEAST_EPISODE_LINES:
            episode, (tables, left) = None, self._fitted(console, options, height, has_episode=False)
        yield tables
        if width < WIDE or self._has_ended:
            events = list(self._events(min(4, left - 2 - (EPISODE_LINES if episode else 0))))
            left -= len(events) + bool(events)
            yield from events
        if episode:
            colour = self._name(episode.source or episode.policy)[1]
            yield Padding(episode_text(episode, width, max(2, left - 1), colour), (1, 0, 0, 0))

    def _is_low(self, height: int) -> bool:
        """Whether an episode and the flow do not fit at once: each policy has a line in two tables."""
        return height < LOW + 2 * len(self._progress.policies)

    def _fitted(
        self, console: Console, options: ConsoleOptions, height: int, *, has_episode: bool
    ) -> tuple[Group, int]:
        """Return the tables, and the number of lines left below them."""
        is_low = self._is_low(height)
        room = height - 8 - len(self._progress.policies) - (EPISODE_LINES if has_episode and not is_low else 0)
        tables = Group(*self._tables(console, options, room, has_flows=not (is_low and has_episode)))
        return tables, height - len(console.render_lines(tables, options.update(height=None), pad=False))

    def _tables(
        self, console: Console, options: ConsoleOptions, room: int, *, has_flows: bool
    ) -> Iterable[RenderableType]:
        """Yield header and tables; the part below the policies has about `room` lines."""
        width = options.max_width if has_flows else min(options.max_width, WIDE - 1)
        yield self._header()
        yield Padding(self._policies(width), (1, 0, 0, 0))
        if not self._has_ended and (allocation := self._progress.allocation.line(self._now_s)):
            room -= 2
            yield Text(f"\n {allocation}", "dim", overflow="ellipsis", no_wrap=True)
        flows = self._flows(max(3, room // 3))
        if self._has_ended:
            yield Padding(flows, (1, 0, 0, 0))
            return
        beside = console.measure(flows, options=options).maximum + 4 if width >= WIDE else 0
        rows = max(4, min(room // 2, room - 6 - max(3, len(self._progress.flows))))
        if not has_flows:
            rows = len(self._progress.policies) + 1
        roles = self._roles(rows, width - beside)
        if width >= WIDE:
            pair = Table.grid(padding=(0, 4, 0, 0))
            pair.add_row(flows, Group(roles, *self._events(4)))
            yield Padding(pair, (1, 0, 0, 0))
            return
        yield Padding(roles, (1, 0, 0, 0))
        if has_flows:
            yield Padding(flows, (1, 0, 0, 0))

    def _header(self) -> RenderableType:
        progress = self._progress
        left = Text.assemble((" mrl ", "bold reverse"), ("  " + self._title.name, "bold"))
        left.append(f"  {self._title.regime}, {len(progress.policies)} policies", "dim")
        right = Text()
        if restarts := progress.process.get("restarts"):
            right.append(f"restarts {count(restarts)}  ", "bold yellow")
        if memory := progress.process.get("pss_mib"):
            right.append(f"{memory / 1024:.1f} GiB  ", "dim")
        started_s = self._now_s if progress.started_s is None else progress.started_s
        right.append("ended after " * self._has_ended + elapsed(self._now_s - started_s), "bold")
        header = Table.grid(expand=True)
        header.add_column(no_wrap=True)
        header.add_column(justify="right", no_wrap=True)
        header.add_row(left, right)
        return header

    def _policies(self, width: int) -> Table:
        table = _table()
        table.add_column("\npolicy", no_wrap=True)
        for heading in _headings(width):
            table.add_column(heading, justify="right", no_wrap=True)
        with_now = width >= WIDE and not self._has_ended
        if with_now:
            table.add_column("\nnow", overflow="fold")
        for index, (name, policy) in enumerate(self._progress.policies.items()):
            now = [self._now(self._progress.learner_of(name))] if with_now else []
            table.add_row(Text(name, f"bold {colour_of(index).dark}"), *self._cells(policy, index, width), *now)
        return table

    def _cells(self, policy: PolicyProgress, index: int, width: int) -> Iterable[Text]:
        get = policy.latest.get
        yield Text.assemble(str(policy.step), (f"/{self._progress.steps}", "dim"))
        reward = Text(fixed(get("reward/mean")))
        if unjudged := get("verify/failed_share", 0.0):
            reward.append(f" {percent(unjudged)} unjudged", "bold red")
        if width >= MEDIUM:
            reward.append(
                f" {sparkline(list(policy.rewards.values()), 12 if width >= WIDE else 8):>8}", colour_of(index).dark
            )
        yield reward
        yield self._accuracy(policy, width)
        yield Text(count(policy.rollout_tokens_s(self._now_s)))
        if width >= MEDIUM:
            yield Text(count(get("rate/trained_tokens_s")))
        yield Text(f"{fixed(get('staleness/mean_versions'), 1)}/{count(get('staleness/max_versions'))}")
        rescues = Text(count(sum(policy.rescues.values())) if policy.rescues else "-")
        if withheld := sum(policy.withheld.values()):
            rescues.append(f" {count(withheld)} withheld", "bold red")
        yield rescues

    def _accuracy(self, policy: PolicyProgress, width: int) -> Text:
        start, end = policy.start_and_end()
        text = Text(fixed(start))
        if end is None or start is None:
            return text
        text.append(f" → {fixed(end)}" if width >= MEDIUM else f"→{fixed(end)}", "bold")
        if width >= MEDIUM:
            text.append(f" {signed(end - start)}", "green" if end > start else "red" if end < start else "dim")
        return text

    def _now(self, sign: RoleSign | None) -> Text:
        silent = sign is not None and self._progress.is_silent(sign, self._now_s)
        waits = sign is not None and bool(sign.beat.awaiting)
        return Text(
            state(self._progress, sign, self._now_s),
            "bold red" if silent else "yellow" if waits else "dim" if sign is None else "",
        )

    def _flows(self, rows: int) -> RenderableType:
        table = _table("experience between policies")
        table.add_column("from → to", no_wrap=True)
        for heading in ("records", "hit rate", "mean age", "bytes"):
            table.add_column(heading, justify="right", no_wrap=True)
        flows = sorted(self._progress.flows.items(), key=lambda item: -item[1].get("records", 0.0))
        for (source, receiver), flow in flows[:rows]:
            table.add_row(
                Text.assemble(self._name(source), (" → ", "dim"), self._name(receiver)),
                count(flow.get("records")),
                _bar(flow.get("hit_rate")).append(f" {percent(flow.get('hit_rate')):>4}", "default"),
                Text.assemble(fixed(flow.get("age_versions"), 1), (" v", "dim")),
                size(flow.get("bytes")),
            )
        held = self._progress.exchange
        caption = f"exchange holds {count(held.get('records'))} records, {size(held.get('used_bytes'))}" if held else ""
        if not flows:
            caption = "nothing yet" if not held else caption + "; nothing delivered yet"
        if len(flows) > rows:
            caption += f"; {len(flows) - rows} more pairs"
        return Group(table, Text(" " + caption, "dim"))

    def _roles(self, rows: int, width: int) -> Table:
        table = _table("roles" + f", {rows} of {len(self._progress.roles)}" * (len(self._progress.roles) > rows))
        table.add_column("", no_wrap=True)
        table.add_column("now", no_wrap=True)
        table.add_column("for", justify="right", no_wrap=True)
        table.add_column("heard", justify="right", no_wrap=True)
        signs = sorted(self._progress.roles.values(), key=self._rank)
        name_width = max((len(sign.beat.role) for sign in signs[:rows]), default=0)
        for sign in signs[:rows]:
            self._role(table, sign, max(16, width - name_width - 36))
        return table

    def _rank(self, sign: RoleSign) -> tuple[bool, bool, str]:
        learner = kind_of(sign.beat.role) == "learner"
        return not self._progress.is_silent(sign, self._now_s), not learner, sign.beat.role

    def _role(self, table: Table, sign: RoleSign, width: int) -> None:
        age_s, bound_s = sign.age_s(self._now_s), sign.beat.bound_s
        silent = self._progress.is_silent(sign, self._now_s)
        style = "bold red" if silent else "yellow" if age_s > QUIET_S else ""
        dot = Text("● ", "red" if silent else "yellow" if age_s > QUIET_S else "green")
        table.add_row(
            dot.append(sign.beat.role, style or "default"),
            Text(_cut(doing(sign), width), style or ("yellow" if sign.beat.awaiting else "dim")),
            Text(seconds(sign.for_s(self._now_s)) + (f" of {seconds(bound_s)}" if bound_s else ""), "dim"),
            Text(f"{seconds(age_s)} ago", style),
        )

    def _events(self, rows: int) -> Iterable[RenderableType]:
        progress = self._progress
        if not progress.events or rows < 1:
            return
        started_s = progress.started_s or 0.0
        yield Text("\n events", "bold")
        for at_s, text in list(progress.events)[-rows:]:
            yield Text.assemble(
                (f" {elapsed(at_s - started_s)} ", "dim"), (text, "yellow"), overflow="ellipsis", no_wrap=True
            )

    def _name(self, policy: str) -> tuple[str, str]:
        known = list(self._progress.policies)
        return (policy, colour_of(known.index(policy)).dark) if policy in known else (policy, "")


def _headings(width: int) -> list[str]:
    trained = ["trained\ntokens/s"] if width >= MEDIUM else []
    return ["\nstep", "\nreward", "held-out\naccuracy", "sampled\ntokens/s", *trained, "stale\nmean/max", "\nrescues"]


def _table(title: str = "") -> Table:
    return Table(
        box=box.SIMPLE_HEAD,
        title=f" {title}" if title else None,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        pad_edge=True,
        padding=(0, 1),
        show_edge=False,
    )


def _bar(share: float | None) -> Text:
    known = share if share is not None and math.isfinite(share) else 0.0
    filled = round(max(0.0, min(1.0, known)) * BAR_CELLS)
    return Text.assemble(("━" * filled, "green"), ("─" * (BAR_CELLS - filled), "dim"))


def _cut(text: str, width: int) -> str:
    if len(text) > width:
        text = text.removeprefix("awaiting ")
    return text if len(text) <= width else text[: width - 1] + "…"
