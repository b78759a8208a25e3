"""Measures what mrl gets out of a vLLM server on a CPU, beside vLLM's own benchmark of the same server.

Both load the same kind of server (0.9 M parameters, float32, one thread) with 256 answers of 71 tokens to prompts of
20, log-probabilities included, at most 64 at once: vLLM's `bench serve`, and the engine of a rollout worker over HTTP.
They take turns; the best round of each counts, in answer tokens per second of the wall clock. The embedded engine
samples the same load in this process, for comparison.

    bash tools/engine_env.sh vllm --cpu      # once
    .venv/bin/python tools/bench_server.py [--rounds N]

Prints a table; the last line is JSON. Ends with 1 when mrl gets less than 95 % of what vLLM's own benchmark gets.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
from bench_rollout import GROUP_SIZE, NUM_PROMPTS, VOCAB, make_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from mrl.engines.dialect import Launch
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Engine, GenerationRequest, Sampling, generate_all
from mrl.engines.environment import engine_python
from mrl.engines.server import ServerEngine
from mrl.engines.server_process import ServerProcess, free_port
from mrl.engines.vllm import VLLM
from mrl.engines.vllm_launch import command, environment
from mrl.records.version import Version

PROMPT_TOKENS, ANSWER_TOKENS, AT_ONCE = 20, 71, 64
NUM_TOKENS = NUM_PROMPTS * GROUP_SIZE * ANSWER_TOKENS
REQUIRED_SHARE = 0.95
START_S, BENCH_S = 300.0, 300.0
# What the worker's own server goes without, and vLLM's benchmark needs: prompts as text.
WITHOUT_TEXT = ("--tokens-only", "--skip-tokenizer-init", "--enable-scale-out")

Round = Callable[[], float]
"""One pass over the load; returns seconds."""


def make_folder(folder: Path) -> Path:
    """The model of `bench_rollout.py` with a tokenizer of one word per token."""
    make_model().save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return folder


def launch_of(folder: Path, port: int) -> Launch:
    """How both servers are started."""
    return Launch(
        python=engine_python("vllm", device="cpu"),
        model_folder=folder,
        host="127.0.0.1",
        port=port,
        device="cpu",
        dtype="float32",
        threads=1,
        max_running=AT_ONCE,
        max_context_tokens=256,
        seed=1,
    )


def engine_round(engine: Engine) -> Round:
    """The load through an engine of ours."""
    engine.label(Version(0, 0))
    rng = np.random.default_rng(1)
    numbers = iter(range(1_000_000))

    def run() -> float:
        requests = [
            GenerationRequest(
                str(next(numbers)),
                rng.integers(3, VOCAB, PROMPT_TOKENS).astype(np.int32),
                rng.integers(0, 2**63, GROUP_SIZE, dtype=np.uint64),
            )
            for _ in range(NUM_PROMPTS)
        ]
        began_s = time.perf_counter()
        answers = generate_all(engine, requests)
        seconds = time.perf_counter() - began_s
        lengths = {answer.token_ids.size for group in answers for answer in group}
        if lengths != {ANSWER_TOKENS}:
            raise RuntimeError(f"answers have {lengths} tokens, wanted {ANSWER_TOKENS}")
        return seconds

    return run


def bench_serve_round(launch: Launch, folder: Path) -> Round:
    """The load by `vllm bench serve`."""
    words = f"""bench serve --backend openai --host {launch.host} --port {launch.port} --model {folder}
        --served-model-name policy --dataset-name random --random-input-len {PROMPT_TOKENS}
        --random-output-len {ANSWER_TOKENS} --random-range-ratio 0 --ignore-eos --temperature 1 --logprobs 0
        --num-prompts {NUM_PROMPTS * GROUP_SIZE} --max-concurrency {AT_ONCE} --num-warmups 0 --disable-tqdm
        --ready-check-timeout-sec 0 --save-result --result-dir {folder} --result-filename result.json""".split()
    argv = [str(launch.python), "-m", "vllm.entrypoints.cli.main", *words]

    def run() -> float:
        done = subprocess.run(
            argv, env=os.environ | environment(launch), capture_output=True, text=True, timeout=BENCH_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"vllm bench serve ended with {done.returncode}:\n{done.stderr[-2000:]}")
        found = json.loads((folder / "result.json").read_text())
        if (found["completed"], found["total_output_tokens"]) != (NUM_TOKENS // ANSWER_TOKENS, NUM_TOKENS):
            raise RuntimeError(f"{found['completed']} answers, {found['total_output_tokens']} tokens")
        return float(found["duration"])

    return run


def start_with_text(launch: Launch, log: Path) -> ServerProcess:
    """The same server, which takes prompts as text."""
    words = [word for word in command(launch) if word not in WITHOUT_TEXT]
    server = ServerProcess(words, environment(launch), log)
    deadline_s = time.monotonic() + START_S
    while "Application startup complete" not in log.read_text(errors="replace"):
        if server.exit_code() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"the server did not come up:\n{server.tail()}")
        time.sleep(0.5)
    return server


def measure(folder: Path, num_rounds: int) -> dict[str, float]:
    """Best tokens per second of every way."""
    sampling = Sampling(1.0, ANSWER_TOKENS, ())
    with ExitStack() as stack:
        launch = launch_of(folder, free_port("127.0.0.1"))
        stack.callback(start_with_text(launch, folder / "text.log").end)
        server = stack.enter_context(
            closing(ServerEngine(VLLM(), sampling, launch=launch_of(folder, 0), log=folder / "tokens.log"))
        )
        embedded = stack.enter_context(closing(EmbeddedEngine(folder, sampling, device="cpu", max_running=AT_ONCE)))
        ways = {
            "vLLM, its own benchmark": bench_serve_round(launch, folder),
            "vLLM through mrl": engine_round(server),
            "embedded engine": engine_round(embedded),
        }
        seconds = {name: [run()] for name, run in ways.items()}
        for _ in range(num_rounds - 1):
            for name, run in ways.items():
                seconds[name].append(run())
        return {name: NUM_TOKENS / min(taken) for name, taken in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="rounds of every way")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-server-") as folder:
        rates = measure(make_folder(Path(folder)), arguments.rounds)
    reference = next(iter(rates))
    rows = []
    for name, rate in rates.items():
        ratio = rate / rates[reference]
        required = REQUIRED_SHARE if name == "vLLM through mrl" else None
        is_ok = required is None or ratio >= required
        rows.append(
            {"name": name, "value": round(rate), "unit": "tokens/s", "against": reference, "ratio": round(ratio, 2),
             "required": required, "ok": is_ok}
        )  # fmt: skip
        verdict = f"   required {required}: {'ok' if is_ok else 'MISSED'}" if required else ""
        print(f"{name:26}{rate:8.0f} tokens/s   {ratio:.2f}{verdict}")
    print(json.dumps({"bench": "server", "rows": rows}))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
