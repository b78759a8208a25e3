"""A synthetic run: made-up numbers with the shape of real ones. Nothing in it was measured."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.config.run_folder import RunFolder, dump_config
from mrl.config.schema import RunConfig
from mrl.metrics.jsonl import MetricsWriter, SampleWriter
from mrl.records.telemetry_messages import HeartbeatRecord, MetricsRecord, SampleRecord, TelemetryRecord

NAMES = ("qwen", "llama", "gemma", "phi", "mistral", "olmo", "falcon", "granite")
TASKS = ("chain_sum", "spell_backward", "letter_counting", "reverse")
STEP_S = 1.2
T0 = 1_760_000_000.0


def synthetic_config(policies: int = 2, steps: int = 320, regime: str = "sgt") -> RunConfig:
    """The configuration of a run that never happened."""
    return RunConfig.model_validate(
        {
            "run": {"name": "synthetic", "steps": steps},
            "tasks": {task: {"source": "words", "dataset": task} for task in TASKS},
            "sharing": {"regime": regime},
            "policies": {name: {"model": f"models/{name}"} for name in NAMES[:policies]},
        }
    )


def _learner(
    rng: np.random.Generator, name: str, index: int, step: int, steps: int, peers: list[str]
) -> dict[str, float]:
    done = step / steps
    skill = 0.2 + 0.6 / (1 + math.exp(-9 * (done - 0.35 - 0.04 * index)))
    failed = max(0.02, 0.7 - 0.8 * skill)
    asked = rng.binomial(32, failed)
    hits = rng.binomial(asked, min(0.9, 0.2 + 0.7 * done)) if peers else 0
    wait, train, publish = (
        0.05 + rng.exponential(0.12),
        0.5 + 0.1 * rng.random() + 0.1 * index,
        0.04 + 0.02 * rng.random(),
    )
    values = {
        "reward/mean": min(1.0, max(0.0, skill + rng.normal(0, 0.05))),
        "reward/all_failed_share": failed,
        "loss/total": rng.normal(0, 0.02),
        "staleness/mean_versions": 0.8 + 0.3 * rng.random() + 0.1 * index,
        "staleness/max_versions": float(rng.integers(1, 3)),
        "sharing/asked_prompts": float(asked),
        "sharing/hit_prompts": float(hits),
        "sharing/rescues": float(hits),
        "time/wait_for_groups_s": wait,
        "time/train_s": train,
        "time/publish_s": publish,
        "time/form_s": 0.03,
        "time/step_s": wait + 0.03 + train + publish + 0.05,
        "rate/trained_tokens_s": 4000 + 600 * rng.random() - 200 * index,
    }
    for peer in peers:
        if peer != name and hits:
            values |= _costs(rng, peer, done, hits)
    if step % 97 == 40:
        values["reward/mean"] = math.nan
    return values


def _costs(rng: np.random.Generator, peer: str, done: float, hits: int) -> dict[str, float]:
    tokens = 24.0 * hits
    values = {
        "rows": hits + 1.0,
        "rejected_share": 1 / (hits + 1),
        "rejected/bytes_differ": 1.0,
        "flagged/noncanon": float(rng.integers(0, 2)),
        "one_to_one_tokens": 0.75 + 0.05 * rng.random(),
        "length_ratio": 1.2,
        "receiver_tokens": tokens,
        "bytes": 2.5 * tokens,
        "spans": 0.9 * tokens,
        "gap_nats_per_byte": -0.4 + 0.3 * done + 0.03 * rng.normal(),
        "gap_nats_per_token": -1.0 + 0.75 * done,
        "span_std_nats": 0.5,
        "outside_band": 0.4 - 0.2 * done,
    }
    return {f"align/{name}/{peer}": value for name, value in values.items()}


def _evaluation(rng: np.random.Generator, index: int, step: int, steps: int) -> dict[str, float]:
    done = step / steps
    by_task = {}
    for number, task in enumerate(TASKS):
        good = number % 2 == index % 2
        start, end = (0.55, 0.9) if good else (0.04, 0.78)
        rise = 1 / (1 + math.exp(-10 * (done - (0.15 if good else 0.4)))) if step else 0.0
        by_task[f"eval/accuracy/{task}"] = float(np.clip(start + (end - start) * rise + rng.normal(0, 0.02), 0, 1))
    return by_task | {"eval/accuracy": float(np.mean(list(by_task.values())))}


def synthetic_stream(
    policies: int = 2, steps: int = 320, until: int | None = None
) -> Iterator[tuple[float, TelemetryRecord]]:
    """Records in the order of their arrival, with the second of the run at which each arrived."""
    names = NAMES[:policies]
    rng = np.random.default_rng(7)

    def metrics(
        role: str, policy: str, step: int, now_s: float, values: dict[str, float]
    ) -> tuple[float, MetricsRecord]:
        return now_s, MetricsRecord(role=role, policy=policy, step=step, time_unix_s=T0 + now_s, values=values)

    def beat(role: str, policy: str, now_s: float, **text: Any) -> tuple[float, HeartbeatRecord]:
        fields: dict[str, Any] = {
            "doing": "sampling",
            "awaiting": "",
            "whom": "",
            "for_s": 0.3,
            "bound_s": 0.0,
            "pid": 11,
        }
        return now_s, HeartbeatRecord(role=role, policy=policy, time_unix_s=T0 + now_s, **(fields | text))

    slots = {name: 512 // len(names) for name in names}
    flow: dict[tuple[str, str], float] = {(a, b): 0.0 for a in names for b in names if a != b}
    for step in range(0, (until or steps) + 1):
        now_s = 20 + step * STEP_S
        for index, name in enumerate(names):
            if step % 40 == 0 or step == steps:
                yield metrics(f"learner/{name}", name, step, now_s, _evaluation(rng, index, step, steps))
            if step == 0:
                continue
            yield metrics(
                f"learner/{name}",
                name,
                step,
                now_s,
                _learner(rng, name, index, step, steps, [peer for peer in names if peer != name]),
            )
            rate = {"rate/rollout_tokens_s": 4800 + 400 * rng.random(), "rollout/slots": float(slots[name])}
            yield metrics(f"worker/{name}/0", name, step, now_s, rate)
            late = index == 1
            text = {"awaiting": "groups", "whom": f"worker/{name}/0", "for_s": 1.2, "bound_s": 300.0} if late else {}
            yield beat(f"learner/{name}", name, now_s, **({"doing": "training"} | text))
            died = name == names[0] and step >= 200
            yield beat(f"worker/{name}/0", name, now_s, pid=12 if died else 11)
        if step % 10 == 0 and step:
            for (source, receiver), total in flow.items():
                flow[source, receiver] = total + rng.integers(4, 16) * (1 + NAMES.index(source) % 3)
            values = {"exchange/records": 9.0 + step, "exchange/used_bytes": 350.0 * step}
            for (source, receiver), total in flow.items():
                pair = f"{source}/{receiver}"
                values[f"exchange/flow_records/{pair}"] = total
                values[f"exchange/flow_bytes/{pair}"] = 352 * total
                values[f"exchange/flow_hit_rate/{pair}"] = min(
                    0.85, 0.2 + 0.6 * step / steps + 0.05 * NAMES.index(source)
                )
                values[f"exchange/flow_age_versions/{pair}"] = 2.0 + 8 * rng.random()
            yield metrics("exchange", "", step, now_s, values)
            told = {name: {"allocation/slots": float(slots[name])} for name in names}
            if len(names) > 1:
                giver, taker = rng.permutation(len(names))[:2]
                moved = int(min(24, slots[names[giver]] - 64)) if slots[names[giver]] > 88 else 0
                slots[names[giver]] -= moved
                slots[names[taker]] += moved
                told = {name: {"allocation/slots": float(slots[name])} for name in names}
                for name in (names[giver], names[taker]) if moved else ():
                    told[name]["allocation/moves_because/a_better_split"] = float(moved)
            for name in names:
                yield metrics("allocator", name, step, now_s, told[name])
        yield beat("exchange", "", now_s, doing="serving")
        yield beat("allocator", "", now_s, doing="deciding")
    yield metrics("supervisor", "", until or steps, now_s, {"process/restarts": 1.0, "process/pss_mib": 2870.0})


def _samples(names: tuple[str, ...], steps: int) -> Iterator[SampleRecord]:
    words = ("hay", "sun", "lamp", "<b>&amp;", "river", "stone")
    for index, name in enumerate(names):
        for step in {1, max(1, steps // 2), steps}:
            for number, word in enumerate(words[:3]):
                right = step > steps // 2 or number == index % 2
                prompt = f"[b] Spell this word backward (example: sun -> nus): {word}"
                answer = word[::-1] if right else word
                yield SampleRecord(
                    policy=name,
                    step=step,
                    kind="rollout",
                    task=TASKS[1],
                    prompt=prompt,
                    completion=answer,
                    reward=float(right),
                )
        if len(names) > 1:
            peer = names[(index + 1) % len(names)]
            for number, word in enumerate(words):
                yield SampleRecord(
                    policy=name,
                    step=10 + 20 * number,
                    kind="rescue",
                    task=TASKS[1],
                    prompt=f"[b] Spell this word backward (example: sun -> nus): {word}",
                    completion=f"reverse: {word[::-1]}",
                    reward=1.0,
                    source=peer,
                )


def write_synthetic_run(folder: Path, policies: int = 2, steps: int = 320, regime: str = "sgt") -> Path:
    """A run folder with everything that the report reads."""
    run = RunFolder(folder)
    run.evaluation.mkdir(parents=True)
    config = synthetic_config(policies, steps, regime)
    run.config_json.write_text(json.dumps(dump_config(config)))
    writer = MetricsWriter(run.metrics_jsonl)
    for _, record in synthetic_stream(policies, steps):
        if isinstance(record, MetricsRecord | HeartbeatRecord):
            writer.write(record)
        if isinstance(record, MetricsRecord) and "eval/accuracy" in record.values:
            _write_evaluation(run, record)
    writer.close()
    samples = SampleWriter(run.rollouts)
    for sample in _samples(NAMES[:policies], steps):
        samples.write(sample)
    return folder


def _write_evaluation(run: RunFolder, record: MetricsRecord) -> None:
    per_task = {task: {"accuracy": record.values[f"eval/accuracy/{task}"], "prompts": 128} for task in TASKS}
    result = {
        "policy": record.policy,
        "step": record.step,
        "accuracy": record.values["eval/accuracy"],
        "per_task": per_task,
        "answers": [],
    }
    (run.evaluation / f"{record.policy}-{record.step}.json").write_text(json.dumps(result))


@pytest.fixture
def make_config() -> Callable[..., RunConfig]:
    """`synthetic_config`."""
    return synthetic_config


@pytest.fixture
def make_stream() -> Callable[..., Iterator[tuple[float, TelemetryRecord]]]:
    """`synthetic_stream`."""
    return synthetic_stream


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a synthetic run below the test's folder and returns it."""
    return lambda **how: write_synthetic_run(tmp_path / "run", **how)
