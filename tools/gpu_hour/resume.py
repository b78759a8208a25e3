"""kill -9 of a learner in mid-run: whether a resume gives the same parameters, and how the supervisor restarts it.

Synchronous runs give the same parameters and moments for the same seed, so that a run which was broken and resumed is
compared with one that was not, tensor by tensor; and an unbroken run with another one, should the device itself not
give the same bits twice.
"""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import tomli_w
from chaos_drill.trial import Trial, resume, train

from gpu_hour.bench import Bench
from mrl.metrics.jsonl import each_metrics

POLL_S = 0.1
KILLED_AT = 3
"""Step after which the learner is killed."""
LEARNER = "learner/a"
NOISES = 3
"""Factor by which a resumed run may differ more than two unbroken runs do from each other."""
RECIPE = {
    "architecture": "qwen3",
    "tokenizer": "byte_level",
    "vocab_size": 400,
    "hidden_size": 64,
    "num_layers": 2,
    "warm_start_steps": 20,
}


def resume_parts() -> dict[str, Callable[[Bench], None]]:
    """Parts of the stage: a resume for each place of the moments, and a learner's restart in an asynchronous run."""
    return {
        "moments on the device": partial(compare, "device"),
        "moments on the host": partial(compare, "host"),
        "restart": measure_restart,
    }


def compare(memory: str, bench: Bench) -> None:
    """Compare a run that was broken and resumed with an unbroken one.

    The noise of the device is measured by a second unbroken run; a CPU gives the same bits. Raises RuntimeError when
    the parameters differ by more than NOISES times that noise.
    """
    again = bench.of(True, False)
    config = write_config(bench, {"optimizer_memory": memory}, is_sync=True)
    broken = train(config, bench.scratch, f"broken-{memory}")
    _until(broken, lambda: last_step(broken) >= KILLED_AT, bench)
    _kill_learner(broken)
    _until(broken, lambda: broken.process is None or broken.process.poll() is not None, bench, may_end=True)
    steps = last_step(broken) + 2
    resumed = resume(broken)
    resumed.argv = (*resumed.argv, f"--run.steps={steps}")
    spent_s = _to_its_end(resumed, bench)
    bench.tell("resumed run", spent_s, "s", steps=steps)
    bench.tell("trained tokens of a step", _trained(resumed), "tokens")
    whole = [_unbroken(config, f"whole-{memory}-{number}", steps, bench) for number in range(1 + again)]
    gap = apart(_tensors(resumed, steps), _tensors(whole[0], steps))
    noise = apart(_tensors(whole[1], steps), _tensors(whole[0], steps)) if again else 0.0
    bench.tell("resumed, beside unbroken", gap, "max|a-b| / max|b|", is_same=gap == 0.0)
    if again:
        bench.tell("unbroken, beside unbroken", noise, "max|a-b| / max|b|", is_same=noise == 0.0)
    if gap > NOISES * noise:
        raise RuntimeError(f"a resumed run has other parameters: off by {gap:.1e}, an unbroken one by {noise:.1e}")


def measure_restart(bench: Bench) -> None:
    """Measure how soon the supervisor starts a killed learner again, and run to the end."""
    steps = bench.of(60, 10)
    run = train(write_config(bench, {}, is_sync=False), bench.scratch, "restart", f"--run.steps={steps}")
    _until(run, lambda: last_step(run) >= KILLED_AT, bench)
    killed, killed_at_s = _kill_learner(run), time.monotonic()
    _until(run, lambda: run.look().get(LEARNER, killed) != killed, bench)
    bench.tell("new process after the kill", time.monotonic() - killed_at_s, "s")
    before = last_step(run)
    _until(run, lambda: last_step(run) > before, bench)
    bench.tell("next step after the kill", time.monotonic() - killed_at_s, "s")
    _until(run, lambda: run.process is None or run.process.poll() is not None, bench, may_end=True)
    _check_code(run)
    bench.tell("steps", last_step(run), "steps", wanted=steps)


def write_config(bench: Bench, learner: dict[str, Any], *, is_sync: bool) -> Path:
    """Write the configuration of a run with one policy of half a million parameters; return its file."""
    policy = {
        "device": bench.device,
        "make": RECIPE,
        "rollout": {"max_new_tokens": 16, "group_size": 4},
        "objective": {"entropy_coefficient": 0.001},  # groups whose answers all fail are trained on too
        "learner": {"prompts_per_step": 8, "checkpoint_every": 1} | learner,
    }
    tables = {
        "run": {"steps": 100_000, "seed": 1, "sync": is_sync},
        "pool": {"train_prompts": 64, "held_out_prompts": 8},
        "tasks": {"trim": {"source": "words", "dataset": "trim", "operation": "trim"}},
        "evaluation": {"every": -1},
        "policies": {"a": policy},
    }
    path = bench.scratch / f"{bench.part.replace(' ', '-')}.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


def last_step(run: Trial) -> int:
    """Last step that the run's learner has reported; 0 before."""
    return max((one["step"] for one in _reports(run)), default=0)


def _trained(run: Trial) -> float:
    """Least number of trained tokens of a step.

    Raises RuntimeError where it is 0: equal parameters would then say nothing.
    """
    found = min(one["values"]["tokens/trained"] for one in _reports(run))
    if not found:
        raise RuntimeError("a step trained nothing")
    return found


def _reports(run: Trial) -> list[dict[str, Any]]:
    path = run.folder / "metrics.jsonl"
    records = list(each_metrics(path)) if path.exists() else []
    return [one for one in records if one["role"] == LEARNER and "tokens/trained" in one.get("values", {})]


def _unbroken(config: Path, name: str, steps: int, bench: Bench) -> Trial:
    run = train(config, config.parent, name, f"--run.steps={steps}")
    bench.tell("unbroken run", _to_its_end(run, bench), "s", steps=steps)
    return run


def _to_its_end(run: Trial, bench: Bench) -> float:
    began_s = time.monotonic()
    _until(run, lambda: run.process is not None and run.process.poll() is not None, bench, may_end=True)
    _check_code(run)
    return time.monotonic() - began_s


def _until(run: Trial, condition: Callable[[], bool], bench: Bench, *, may_end: bool = False) -> None:
    """Start the run if it has not started, and wait for a condition.

    Raises RuntimeError when the run ends, unless `may_end`, or the stage's time is used up.
    """
    if run.process is None:
        run.start()
    assert run.process is not None
    while not condition():
        if (run.process.poll() is not None and not may_end) or bench.left_s < 0:
            raise RuntimeError(f"the run ended or hangs: {_last_words(run)}")
        time.sleep(POLL_S)


def _kill_learner(run: Trial) -> int:
    pid = run.look().get(LEARNER, 0)
    if not pid:
        raise RuntimeError(f"there is no {LEARNER} to kill: {_last_words(run)}")
    os.kill(pid, signal.SIGKILL)
    return pid


def _check_code(run: Trial) -> None:
    assert run.process is not None
    if run.process.returncode:
        raise RuntimeError(f"the run ended with {run.process.returncode}: {_last_words(run)}")


def _last_words(run: Trial) -> str:
    return run.folder.with_suffix(".log").read_text(errors="replace")[-300:]


def _tensors(run: Trial, step: int) -> dict[str, Any]:
    return safetensors.torch.load_file(run.folder / "checkpoints" / "a" / f"step_{step}" / "rank_00000.safetensors")


def apart(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return max|a-b| / max|b|, the largest over all tensors. Raises RuntimeError where names differ."""
    if found.keys() != expected.keys():
        raise RuntimeError(f"tensors differ: {sorted(found.keys() ^ expected.keys())[:3]}")
    return max(
        float((found[name].double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30))
        for name, b in expected.items()
    )
