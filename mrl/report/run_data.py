"""Data of a run for its report, read from the files of its folder and nothing else.

Every file may be missing or damaged: `problems` names what cannot be read, and the report shows the rest.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from mrl.config.run_folder import RunFolder
from mrl.errors import RunFolderError
from mrl.metrics.jsonl import each_metrics, read_samples
from mrl.metrics.names import LOST_POINTS
from mrl.records.evaluation_messages import Estimate, PromptTally
from mrl.report.progress import ALL_TASKS, is_step

CAPACITY = {"allocation/slots": "slots", "allocation/held_units": "units"}
"""Metric of a policy's capacity -> kind of capacity that the run leases."""

Points = list[tuple[float, float]]
"""(x, y) in order of x; y may be NaN."""


@dataclass(slots=True)
class RunData:
    """Data of one run, as series per policy."""

    name: str
    config: dict[str, Any]
    policies: list[str]
    tasks: list[str]
    steps: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    """Policy -> learner step -> metric -> value, without steps that a resume voided."""
    step_ends: dict[str, Points] = field(default_factory=dict)
    """Policy -> (unix seconds, learner step) in the order of the file, with steps that a resume voided."""
    accuracy: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    """Policy -> task -> step -> held-out accuracy; the task "" stands for all tasks together."""
    own_token_share: dict[str, dict[int, float]] = field(default_factory=dict)
    """Policy -> step -> share of the held-out answers' tokens that this step's version sampled, no newer version."""
    missing_answers: dict[str, dict[int, float]] = field(default_factory=dict)
    """Policy -> step -> number of held-out prompts without an answer."""
    estimates: dict[str, dict[int, dict[str, Estimate]]] = field(default_factory=dict)
    """Policy -> step -> measure -> estimate, for evaluations with several answers to each prompt."""
    tallies: dict[str, dict[int, list[PromptTally]]] = field(default_factory=dict)
    """Policy -> step -> numbers of answers and right answers to every held-out prompt."""
    flows: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    """(source, receiver) -> records, bytes, hit_rate and age_versions."""
    capacity: dict[str, Points] = field(default_factory=dict)
    """Policy -> (minutes since the first metric, slots or units of the policy)."""
    capacity_kind: str = "slots"
    """Kind of capacity that is leased: "slots" or "units"."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    floors: dict[tuple[str, str], float | None] = field(default_factory=dict)
    """(source, receiver) -> span std in nats that tokenizers alone cause in equal policies; None: not measurable."""
    loads: dict[tuple[str, str], dict[str, list[float]]] = field(default_factory=dict)
    """("host" or "gpu", its name) -> measure -> all values."""
    restarts: float = 0.0
    lost_points: dict[str, float] = field(default_factory=dict)
    """Tracker -> number of points that it did not take, in the newest attempt."""
    wall_s: float = 0.0
    started_unix_s: float | None = None
    problems: list[str] = field(default_factory=list)

    def series(self, policy: str, metric: str) -> Points:
        """Return one learner metric over steps, NaN at steps without it; empty when no step has a finite value."""
        by_step = self.steps.get(policy, {})
        points = [(float(step), by_step[step].get(metric, math.nan)) for step in sorted(by_step)]
        return points if any(math.isfinite(y) for _, y in points) else []

    def accuracies(self, policy: str, task: str = ALL_TASKS) -> Points:
        """Return held-out accuracy over steps."""
        return [(float(step), value) for step, value in sorted(self.accuracy.get(policy, {}).get(task, {}).items())]


def read_run(path: Path) -> RunData:
    """Read a run folder. Raises RunFolderError when it holds no readable config.json, for then it is no run."""
    run = RunFolder(path)
    config = _read_config(run)
    policies, tasks = list(config.get("policies", {})), list(config.get("tasks", {}))
    data = RunData(str(config.get("run", {}).get("name", path.name)), config, policies, tasks)
    told = data.problems.append
    for line in each_metrics(run.metrics_jsonl, told):
        if isinstance(line.get("values"), dict):
            _take_time(data, line)
            _take_line(data, line)
    begin_s = data.started_unix_s or 0.0
    data.capacity = {name: [((x - begin_s) / 60, y) for x, y in points] for name, points in data.capacity.items()}
    data.problems += [_lost(label, count) for label, count in data.lost_points.items() if count > 0]
    _take_evaluations(data, run)
    data.samples += read_samples(run.rollouts, told)
    data.samples = _without_repeats(data.samples)
    _take_floors(data, run)
    return data


def _lost(label: str, count: float) -> str:
    kind = label.partition("-")[0]
    return f"tracker {label} lost {count:,.0f} points; `mrl report RUN --to {kind}` sends all points again"


def _without_repeats(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop repeated samples: an evaluated answer may stand both in its evaluation and among the samples."""
    parts = ("policy", "step", "kind", "prompt", "completion")
    return list({tuple(str(sample.get(part)) for part in parts): sample for sample in samples}.values())


def _read_config(run: RunFolder) -> dict[str, Any]:
    try:
        config = json.loads(run.config_json.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        cure = "give the folder of a run, runs/<name>"
        raise RunFolderError("no readable config.json", where=str(run.path), cure=cure) from error
    if not isinstance(config, dict):
        raise RunFolderError(
            "config.json contains no JSON object", where=str(run.path), cure="give the folder of a run, runs/<name>"
        )
    return config


def _take_time(data: RunData, line: dict[str, Any]) -> None:
    if isinstance(line.get("time_unix_s"), int | float):
        time_s = float(line["time_unix_s"])
        begin_s = time_s if data.started_unix_s is None else data.started_unix_s
        end_s = max(begin_s + data.wall_s, time_s)
        data.started_unix_s = min(begin_s, time_s)
        data.wall_s = end_s - data.started_unix_s


def _take_line(data: RunData, line: dict[str, Any]) -> None:
    policy, values, step = str(line.get("policy", "")), line["values"], int(line.get("step", 0))
    if policy and policy not in data.policies:
        data.policies.append(policy)
    if is_step(str(line.get("role", "")), values):
        _take_step(data, policy, step, values)
        if isinstance(line.get("time_unix_s"), int | float):
            data.step_ends.setdefault(policy, []).append((float(line["time_unix_s"]), float(step)))
    for name, value in values.items():
        room, _, rest = name.partition("/")
        if room == "eval" and policy and math.isfinite(value):
            _take_evaluation(data, policy, step, rest, value)
        elif name in CAPACITY and policy:
            data.capacity.setdefault(policy, []).append((float(line["time_unix_s"]), value))
            data.capacity_kind = CAPACITY[name]
        elif name == "process/restarts":
            data.restarts = max(data.restarts, value)
        elif room in ("host", "gpu") and rest.count("/") == 1 and math.isfinite(value):
            what, unit = rest.split("/")
            data.loads.setdefault((room, unit), {}).setdefault(what, []).append(value)
        elif name.startswith(LOST_POINTS):
            data.lost_points[name.removeprefix(LOST_POINTS)] = value
        elif room == "exchange" and rest.startswith("flow_") and rest.count("/") == 2:
            what, source, receiver = rest.removeprefix("flow_").split("/")
            data.flows.setdefault((source, receiver), {})[what] = value


def _take_evaluation(data: RunData, policy: str, step: int, name: str, value: float) -> None:
    what, _, task = name.partition("/")
    if what == "accuracy":
        data.accuracy.setdefault(policy, {}).setdefault(task, {})[step] = value
    elif what == "own_token_share":
        data.own_token_share.setdefault(policy, {})[step] = value
    elif what in ("missing", "missing_answers"):
        data.missing_answers.setdefault(policy, {})[step] = value


def _take_step(data: RunData, policy: str, step: int, values: dict[str, float]) -> None:
    by_step = data.steps.setdefault(policy, {})
    if step < next(reversed(by_step), step):  # steps stand in rising order, so the newest is the last
        for voided in [known for known in by_step if known > step]:
            del by_step[voided]
    by_step[step] = values


def _take_floors(data: RunData, run: RunFolder) -> None:
    for path in sorted(run.pair_cards.glob("*.json")):
        try:
            card = json.loads(path.read_text(encoding="utf-8"))
            first, second = card["names"]
            if card["fingerprints"][0] and card["fingerprints"][0] == card["fingerprints"][1]:
                data.floors |= {(first, second): 0.0, (second, first): 0.0}
            for direction in card["directions"]:
                std = direction["floor"].get("span_std_nats")
                data.floors[direction["peer"], direction["receiver"]] = None if std is None else float(std)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            data.problems.append(f"{path.name} cannot be read ({type(error).__name__})")


def _take_evaluations(data: RunData, run: RunFolder) -> None:
    for path in sorted(run.evaluation.glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            policy, step = str(result["policy"]), int(result["step"])
            found = {ALL_TASKS: float(result["accuracy"])}
            found |= {str(task): float(entry["accuracy"]) for task, entry in result.get("per_task", {}).items()}
            told = {name: float(result[name]) for name in ("own_token_share", "missing") if name in result}
            answers = [answer for answer in result.get("answers", []) if isinstance(answer, dict)]
            estimates = msgspec.convert(result.get("estimates", {}), dict[str, Estimate])
            tallies = msgspec.convert(result.get("prompts", []), list[PromptTally])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
            data.problems.append(f"{path.name} cannot be read ({type(error).__name__})")
            continue
        for task, accuracy in found.items():
            data.accuracy.setdefault(policy, {}).setdefault(task, {})[step] = accuracy
        for name, value in told.items():
            _take_evaluation(data, policy, step, name, value)
        data.estimates.setdefault(policy, {})[step] = estimates
        data.tallies.setdefault(policy, {})[step] = tallies
        data.samples += [{"policy": policy, "step": step, "kind": "evaluation", **answer} for answer in answers]
