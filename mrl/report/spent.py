"""What only the metrics of a whole run tell: the time of all its attempts, and the tokens scored for others."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

PAUSE_S = 60.0
"""A supervisor writes every few seconds; where nobody wrote for longer than this, no attempt was going on."""
SCORED = "scoring/tokens"


class Spent(NamedTuple):
    """Over all attempts of one run."""

    running_s: float
    """Without the pauses between attempts."""
    scored_tokens: float
    """Answer tokens that engines scored for other policies, as last told by every worker (every 2 s, and per batch)."""


def spent_of(lines: Sequence[Mapping[str, Any]]) -> Spent:
    """From the lines of `metrics.jsonl`."""
    times_s = sorted(float(line["time_unix_s"]) for line in lines if "time_unix_s" in line)
    gaps_s = (later - earlier for earlier, later in itertools.pairwise(times_s))
    return Spent(sum(gap_s for gap_s in gaps_s if gap_s <= PAUSE_S), _scored_tokens(lines))


def _scored_tokens(lines: Iterable[Mapping[str, Any]]) -> float:
    """A worker counts from its start, so the last count of every life is added up; a new life has a new pid."""
    told: dict[str, float] = {}
    pids: dict[str, int] = {}
    total = 0.0
    for line in lines:
        role = str(line.get("role", ""))
        pid = line.get("heartbeat", {}).get("pid", pids.get(role))
        if pid != pids.get(role):
            pids[role], told[role] = pid, 0.0
        scored = line.get("values", {}).get(SCORED)
        if scored is not None:
            last = told.get(role, 0.0)
            total += scored - last if scored >= last else scored
            told[role] = scored
    return total
