"""Command line of `gpu_hour.sh`."""

import argparse
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gpu_hour.carry import FOLDER, PYTHON, ROOT, carry, install

STAGES = {
    "contact": "versions and memory, the GPU tests, the noise of one set of weights, a whole quickstart; 10 minutes",
    "learner": "the Trainer at 0.6B, 1.7B and 8B: tokens/s, MFU, peak memory beside the plan's; 10 minutes",
    "weights": "the way of new weights part by part, in bytes/s, beside plain copies; 3 minutes",
    "run": "a whole run of two policies in the shapes of Qwen3-1.7B and SmolLM2-360M; 5 minutes",
    "resume": "kill -9 of a learner: the same parameters after a resume; the supervisor's restart; 6 minutes",
    "vllm": "a vLLM server beside a learner's model: start, tokens/s, new weights, restart; 5 minutes",
}
ALL = "all"
MODULES = (
    "torch",
    "transformers",
    "zmq",
    "msgspec",
    "pydantic",
    "structlog",
    "tomli_w",
    "setproctitle",
    "xxhash",
    "psutil",
)
"""Modules without which no stage begins."""


def main(argv: list[str]) -> int:
    """Run the command. Return 0 when no part failed, 1 when some did, 2 for a mistake that the caller can cure."""
    asked = arguments(argv)
    if asked.carry is not None:
        return carry(Path(asked.carry), asked.python)
    if not asked.stage:
        for name, about in STAGES.items():
            print(f"{name:9}{about}")
        print(f"{ALL:9}these, in order; with --cpu on a CPU with tiny shapes: a few minutes together")
        return 0
    install(argv)
    if missing := [name for name in MODULES if importlib.util.find_spec(name) is None]:
        cure = (
            "bash tools/setup.sh; without network: bash tools/gpu_hour.sh --carry where there is one, and take it along"
        )
        print(f"gpu_hour: {sys.executable} lacks {', '.join(missing)}; {cure}", file=sys.stderr)
        return 2
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if asked.cpu:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    return run(asked.stage, "cpu" if asked.cpu else "cuda", Path(asked.out))


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/gpu_hour.sh", description="What mrl does on a GPU, in stages.")
    stages = f"{', '.join(STAGES)} or {ALL}; STAGE/PART for one part; nothing prints what there is"
    parser.add_argument("stage", nargs="?", default="", help=stages)
    parser.add_argument("--cpu", action="store_true", help="run on a CPU, with tiny shapes")
    out = os.environ.get("OUT") or str(ROOT / "runs" / "gpu_hour")
    parser.add_argument(
        "--out", default=out, metavar="FOLDER", help="folder for figures and logs (default: $OUT, or %(default)s)"
    )
    parser.add_argument("--carry", nargs="?", const=str(FOLDER), metavar="FOLDER", help="fetch wheels to take along")
    parser.add_argument(
        "--python", default=PYTHON, help="Python of the machine that the wheels are for (default: %(default)s)"
    )
    asked = parser.parse_args(argv)
    if asked.stage and asked.stage.partition("/")[0] not in (*STAGES, ALL):
        parser.error(f"no stage {asked.stage!r}; wanted {stages}")
    return asked


def run(wanted: str, device: str, folder: Path) -> int:
    """Run a stage, all stages, or a part of a stage, as `wanted` says; return the exit code."""
    from gpu_hour.bench import Bench
    from gpu_hour.contact import contact_parts
    from gpu_hour.learner import learner_parts
    from gpu_hour.parts import Part, asked, run_stage
    from gpu_hour.resume import resume_parts
    from gpu_hour.run import run_parts
    from gpu_hour.vllm import vllm_parts
    from gpu_hour.weights import weights_parts

    parts_of: dict[str, Callable[[], dict[str, Part]]] = {
        "contact": contact_parts,
        "learner": learner_parts,
        "weights": weights_parts,
        "run": run_parts,
        "resume": resume_parts,
        "vllm": vllm_parts,
    }
    stage, _, part = wanted.partition("/")
    parts = {name: parts_of[name]() for name in (STAGES if stage == ALL else [stage])}
    if part:
        parts = {name: {one: act for one, act in found.items() if one == part} for name, found in parts.items()}
        if not any(parts.values()):
            print(f"gpu_hour: {stage} has no part {part!r}; wanted {', '.join(parts_of[stage]())}", file=sys.stderr)
            return 2
    name = asked(_gpu_name) if device == "cuda" else "cpu"
    if not name:
        print("gpu_hour: torch sees no GPU; make one visible, or use --cpu", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # ends children, removes files
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench("", "", device, name, folder.absolute(), folder, time.monotonic(), os.dup(1))
    ended_well = [run_stage(stage, found, bench) for stage, found in parts.items()]
    return int(not all(ended_well))


def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
