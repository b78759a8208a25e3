"""When turns on a GPU pay: learners and engines as holders of GPUs in virtual time, from measured seconds.

Every policy has a learner, which needs so many seconds of a GPU for a step, and engines, which need so many to sample
its batch, and may wait beside that for environments and verifiers without a GPU. Three placements are played, by the
rules of `mrl.rollout.engine_turns` and its queue: every learner and every engine on a GPU of its own; each policy on
one GPU, in turns; all policies on one GPU, in turns. What is told is the time of a step of all policies, and what it
costs in seconds of GPUs: turns pay where that is less.

    .venv/bin/python tools/simulate_turns.py --run runs/quickstart                     # seconds from a run's timeline
    .venv/bin/python tools/simulate_turns.py --policy 60,120,40 --policy 60,120,40 --ahead 0

A policy is LEARN_S,SAMPLE_S,OUTSIDE_S of one step. What moves and how fast is told with `--learner-gib`, `--engine-gib`
and `--gib-s`; the rate of PCIe is an assumption until it is measured. Nothing else costs anything in a change of turns.
"""

import argparse
import heapq
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mrl.metrics.jsonl import read_metrics
from mrl.metrics.timeline import read_timeline
from mrl.rollout.engine_turns import KEPT_PER_SWITCH, MIN_TURN_S

SLICE_S = 0.5
"""After so much sampling an engine looks whether anybody waits."""
OF_LEARNER, OF_ENGINE = ("training", "publishing", "saving a checkpoint"), ("sampling", "scoring", "loading weights")
"""Spans that need the device."""
Waiting = float | Callable[[], bool]


@dataclass(frozen=True)
class Policy:
    """Seconds of one step."""

    learn_s: float
    sample_s: float
    outside_s: float = 0.0


@dataclass(frozen=True)
class Moves:
    """What leaves a GPU with its holder, and how fast."""

    learner_gib: float
    engine_gib: float
    gib_s: float


@dataclass
class Gpu:
    """Its queue, whose first member has it."""

    queue: list[object] = field(default_factory=list)
    busy_s: float = 0.0


@dataclass
class Progress:
    """Of one policy."""

    trained: int = 0
    sampled: int = 0
    ready: int = 0


def learner(policy: Policy, at: Progress, gpu: Gpu, steps: int, move_s: float) -> Iterator[Waiting]:
    """It has its turn for one step."""
    me = object()
    for _ in range(steps):
        yield lambda: at.ready > 0
        gpu.queue.append(me)
        yield lambda: gpu.queue[0] is me
        yield 2 * move_s + policy.learn_s
        gpu.busy_s += policy.learn_s
        at.ready -= 1
        at.trained += 1
        gpu.queue.remove(me)


def engine(policy: Policy, at: Progress, gpu: Gpu, steps: int, move_s: float, *, ahead: int) -> Iterator[Waiting]:
    """It keeps its turn while nobody waits, and for long enough where it has work; answers in flight rest."""
    me, since_s, quantum_s = object(), 0.0, max(MIN_TURN_S, 2 * KEPT_PER_SWITCH * move_s)
    while at.sampled < steps:
        while at.sampled >= at.trained + 1 + ahead:
            if me in gpu.queue and len(gpu.queue) > 1:
                yield move_s
                gpu.queue.remove(me)
            yield lambda: at.sampled < at.trained + 1 + ahead or (me in gpu.queue and len(gpu.queue) > 1)
        left_s = policy.sample_s
        while left_s > 0:
            if me not in gpu.queue:
                gpu.queue.append(me)
                yield lambda: gpu.queue[0] is me
                yield move_s
                since_s = 0.0
            slice_s = min(SLICE_S, left_s)
            yield slice_s
            gpu.busy_s += slice_s
            left_s, since_s = left_s - slice_s, since_s + slice_s
            if len(gpu.queue) > 1 and since_s >= quantum_s:
                yield move_s
                gpu.queue.remove(me)
        at.sampled += 1
        if len(gpu.queue) > 1 and me in gpu.queue:
            yield move_s
            gpu.queue.remove(me)
        if policy.outside_s:
            yield policy.outside_s
        at.ready += 1
    if me in gpu.queue:
        gpu.queue.remove(me)


def play(policies: Sequence[Policy], gpus: Sequence[tuple[Gpu, Gpu]], moves: Moves, *, steps: int, ahead: int) -> float:
    """Seconds until all policies have trained all steps. `gpus`: of each policy's learner, and of its engine."""
    running = []
    for policy, (of_learner, of_engine) in zip(policies, gpus, strict=True):
        at, shared = Progress(), of_learner is of_engine
        move_s = [shared * gib / moves.gib_s for gib in (moves.learner_gib, moves.engine_gib)]
        running.append(learner(policy, at, of_learner, steps, move_s[0]))
        running.append(engine(policy, at, of_engine, steps, move_s[1], ahead=ahead))
    now_s, events, waits = 0.0, list[tuple[float, int]](), dict[int, Callable[[], bool]]()
    due = list(range(len(running)))
    while due or events:
        for number in due:
            asked = next(running[number], None)
            if callable(asked):
                waits[number] = asked
            elif asked is not None:
                heapq.heappush(events, (now_s + asked, number))
        due = [number for number, holds in waits.items() if holds()]
        for number in due:
            del waits[number]
        if not due and events:
            now_s, number = heapq.heappop(events)
            due = [number]
    assert not waits, "somebody waits for ever"
    return now_s


def placements(
    policies: Sequence[Policy], moves: Moves, *, steps: int, ahead: int
) -> list[tuple[str, int, float, float]]:
    """Name, GPUs, seconds of a step of all policies, and the share of the GPUs that computes."""
    one = Gpu()
    each = [Gpu() for _ in policies]
    played = {
        "each learner and engine on its own GPU": [(Gpu(), Gpu()) for _ in policies],
        "each policy on one GPU in turns": [(gpu, gpu) for gpu in each],
        "all policies on one GPU in turns": [(one, one) for _ in policies],
    }
    found = []
    for name, gpus in played.items():
        lasted_s = play(policies, gpus, moves, steps=steps, ahead=ahead)
        different = {id(gpu): gpu for pair in gpus for gpu in pair}.values()
        busy = sum(gpu.busy_s for gpu in different) / (len(different) * lasted_s)
        found.append((name, len(different), lasted_s / steps, busy))
    return found


def measured(run: Path) -> list[Policy]:
    """Seconds of the device for a step of every policy of a run, and what its verifiers took beside."""
    steps: dict[str, int] = {}
    for record in read_metrics(run / "metrics.jsonl"):
        if record["role"].startswith("learner/") and "loss/total" in record.get("values", {}):
            steps[record["policy"]] = max(steps.get(record["policy"], 0), record["step"])
    found = {name: [0.0, 0.0, 0.0] for name in steps}
    for span in read_timeline(run / "timeline.jsonl"):
        role, _, rest = span.role.partition("/")
        seconds = found.get(rest.partition("/")[0])
        if seconds is not None:
            seconds[0] += span.duration_s * (role == "learner" and span.kind in OF_LEARNER)
            seconds[1] += span.duration_s * (role == "worker" and span.kind in OF_ENGINE)
            seconds[2] += span.duration_s * (role == "worker" and span.kind.startswith("awaiting verdicts"))
    return [Policy(*(one / steps[name] for one in seconds)) for name, seconds in found.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="the folder of a run, whose timeline has the seconds")
    parser.add_argument("--policy", action="append", default=[], help="LEARN_S,SAMPLE_S[,OUTSIDE_S]")
    parser.add_argument("--ahead", type=int, default=2, help="max_staleness_versions; 0 plays a synchronous run")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learner-gib", type=float, default=18.0, help="parameters and moments: 12 bytes for each")
    parser.add_argument("--engine-gib", type=float, default=12.0, help="weights and cache")
    parser.add_argument("--gib-s", type=float, default=20.0, help="of PCIe, each way")
    chosen = parser.parse_args()
    policies = [Policy(*map(float, words.split(","))) for words in chosen.policy]
    policies += measured(chosen.run) if chosen.run else []
    if not policies:
        parser.error("--run or --policy")
    moves = Moves(chosen.learner_gib, chosen.engine_gib, chosen.gib_s)
    rows = placements(policies, moves, steps=chosen.steps, ahead=chosen.ahead)
    first = rows[0][1] * rows[0][2]
    print("| placement | GPUs | s for a step of all | GPUs compute | GPU-seconds of a step | of the first |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, gpus, step_s, busy in rows:
        cost_s = gpus * step_s
        print(f"| {name} | {gpus} | {step_s:.1f} | {busy:.0%} | {cost_s:.1f} | {cost_s / first:.2f} |")
    best = min(rows, key=lambda row: row[1] * row[2])
    print(f"least GPU-seconds: {best[0]}" + ", so turns pay here" * (best is not rows[0]))
    print(json.dumps({"policies": [vars(policy) for policy in policies], "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
