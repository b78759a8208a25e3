#!/usr/bin/env python3
"""Check of unit leases, for those who change them: no unit ever has two owners or gets lost, in any reachable state.

    .venv/bin/python tools/check_fencing.py [--deep]

One unit, two policies; messages are lost, doubled and overtaken; engines end, hang and are killed; the allocator and
the node may start again, and the node then forgets everything while its engines live on. The parts are those of runs
(`UnitCore`, `NodeGuard`); in each design after the first, one rule is dropped. With sleepers, engines are also asked to
sleep, lie about it, and are woken. With --deep also both restarts together, which takes a minute more. That every wait
of a whole run ends is checked by `simulate_run.py`.

two owners   states with two engines on the unit that may act (one that sleeps may not)
intruders    states with an engine that may act on a unit that the allocator calls free, or somebody else's
lost         states with a grant left from which no engine ever starts again

Exit code 1 when mrl's design has such a state, or a design with a dropped rule has none. Ends with one line of JSON.
"""

import argparse
import json
import sys
import time

from fencing_model.designs import MRL, WITHOUT
from fencing_model.search import search
from fencing_model.world import Bounds

AS_BUILT = (
    Bounds(grants=3, messages=2),
    Bounds(grants=2, messages=2, node_restarts=1),
    Bounds(grants=2, messages=2, allocator_restarts=1),
    Bounds(grants=3, messages=2, sleeps=True),
    Bounds(grants=3, messages=1, sleeps=True, node_restarts=1),
    Bounds(grants=2, messages=1, sleeps=True, allocator_restarts=1),
)
DEEP = Bounds(grants=2, messages=2, allocator_restarts=1, node_restarts=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deep", action="store_true", help="both restarts together: 280,000 states")
    arguments = parser.parse_args()
    began_s = time.monotonic()
    rows = fencing(deep=arguments.deep)
    ok = all(row["ok"] for row in rows)
    print(json.dumps({"bench": "fencing", "rows": rows, "ok": ok, "seconds": round(time.monotonic() - began_s, 1)}))
    return 0 if ok else 1


def fencing(*, deep: bool) -> list[dict[str, object]]:
    print(f"{'design':<22}{'faults':<48}{'states':>9}{'two owners':>12}{'intruders':>11}{'lost':>7}")
    rows: list[dict[str, object]] = []
    cases = [(MRL, bounds) for bounds in (*AS_BUILT, *([DEEP] if deep else []))]
    for design, bounds in [*cases, *WITHOUT]:
        found = search(design, bounds)
        print(
            f"{design.name:<22}{bounds!s:<48}{found.num_states:>9}{found.num_two_owners:>12}"
            f"{found.num_intruders:>11}{found.num_lost:>7}",
            flush=True,
        )
        ok = found.is_safe == (design is MRL)
        rows.append({"name": f"{design.name}, {bounds}", "value": found.num_states, "unit": "states", "ok": ok})
    return rows


if __name__ == "__main__":
    sys.exit(main())
