"""Measures what a whole rollout worker gets out of a vLLM server on a CPU, beside vLLM's own benchmark of one.

Both load the same kind of server (0.9 M parameters, float32, one thread) with 1024 answers of 71 tokens at most, 64 at
once, each with a seed and its log-probabilities: `vllm bench serve`, with prompts and answers of as many tokens as the
worker's have on average, and a worker as in a run. The worker follows published weights, has its answers verified,
gives them to the exchange and delivers groups to a learner's books, in processes of their own (`lone_worker.py`); only
training is left out. A round of it lasts from the first grant to the arrival of the last group. The benchmark's server
turns text into tokens and back, beside the engine's core, which is what both keep busy; the worker's takes and gives
tokens. They take turns; the best round of each counts, in answer tokens per second of the wall clock. The embedded
engine samples the same load in this process, for comparison.

    mrl engine-env vllm --cpu      # once
    .venv/bin/python tools/bench_server.py [--rounds N]

Prints a table; the last line is JSON. Ends with 1 when the worker gets less than 95 % of what vLLM's benchmark gets.
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
from bench_rollout import GROUP_SIZE, VOCAB, make_model
from bench_row import Row
from lone_worker import LoneWorker, make_policy, run_tables
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from mrl.engines.dialect import Launch
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Engine, GenerationRequest, Sampling, generate_all
from mrl.engines.environment import engine_python
from mrl.engines.server_process import ServerProcess, free_port
from mrl.engines.vllm_launch import command, environment
from mrl.records.version import Version

ANSWER_TOKENS, AT_ONCE, NUM_PROMPTS = 71, 64, 128
NUM_ANSWERS = NUM_PROMPTS * GROUP_SIZE
REFERENCE, WORKER = "vLLM, its own benchmark", "a worker over vLLM"
REQUIRED = ">=0.95"
START_S, BENCH_S = 300.0, 300.0
# What the worker's own server goes without, and vLLM's benchmark needs: prompts as text.
WITHOUT_TEXT = ("--tokens-only", "--skip-tokenizer-init", "--enable-scale-out")

Round = Callable[[], float]
"""One pass over the load; returns seconds per token."""


def make_folder(folder: Path) -> Path:
    """The model of `bench_rollout.py` with a tokenizer of one word per token."""
    make_model().save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return folder


def launch_of(folder: Path, port: int) -> Launch:
    """How the server is started that vLLM's benchmark loads; the worker starts its own in the same way."""
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


def engine_round(engine: Engine, prompt_tokens: int) -> Round:
    """The load through an engine of ours."""
    engine.label(Version(0, 0))
    rng = np.random.default_rng(1)
    numbers = iter(range(1_000_000))

    def run() -> float:
        requests = [
            GenerationRequest(
                str(next(numbers)),
                rng.integers(3, VOCAB, prompt_tokens).astype(np.int32),
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
        return seconds / (NUM_ANSWERS * ANSWER_TOKENS)

    return run


def bench_serve_round(launch: Launch, prompt_tokens: int, answer_tokens: int) -> Round:
    """The load by `vllm bench serve`."""
    folder = launch.model_folder
    words = f"""bench serve --backend openai --host {launch.host} --port {launch.port} --model {folder}
        --served-model-name policy --dataset-name random --random-input-len {prompt_tokens}
        --random-output-len {answer_tokens} --random-range-ratio 0 --ignore-eos --temperature 1 --logprobs 0
        --extra-body {{"seed":1}} --num-prompts {NUM_ANSWERS} --max-concurrency {AT_ONCE} --num-warmups 0 --disable-tqdm
        --ready-check-timeout-sec 0 --save-result --result-dir {folder} --result-filename result.json""".split()
    argv = [str(launch.python), "-m", "vllm.entrypoints.cli.main", *words]

    def run() -> float:
        done = subprocess.run(
            argv, env=os.environ | environment(launch), capture_output=True, text=True, timeout=BENCH_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"vllm bench serve ended with {done.returncode}:\n{done.stderr[-2000:]}")
        found = json.loads((folder / "result.json").read_text())
        if (found["completed"], found["total_output_tokens"]) != (NUM_ANSWERS, NUM_ANSWERS * answer_tokens):
            raise RuntimeError(f"{found['completed']} answers, {found['total_output_tokens']} tokens")
        return float(found["duration"]) / found["total_output_tokens"]

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


def worker_round(worker: LoneWorker) -> Round:
    """The load through a whole worker; how many tokens it is differs from round to round."""

    def run() -> float:
        groups, seconds = worker.round()
        return seconds / sum(len(answer.token_ids) // 4 for group in groups for answer in group.answers)

    return run


def measure(folder: Path, num_rounds: int) -> dict[str, list[float]]:
    """Tokens per second of every way, round by round."""
    model, prompts = make_model(), NUM_PROMPTS * (num_rounds + 1)
    places = folder / "runs", folder / "policy"
    tables = run_tables(*places, group_size=GROUP_SIZE, max_new_tokens=ANSWER_TOKENS, at_once=AT_ONCE, prompts=prompts)
    make_policy(folder / "policy", model, tables)
    with ExitStack() as stack:
        worker = stack.enter_context(closing(LoneWorker(tables, model, groups_a_round=NUM_PROMPTS)))
        first, _ = worker.round()  # its server is up, and has its first weights
        prompt_tokens = round(np.mean([len(group.prompt_token_ids) // 4 for group in first]))
        answer_tokens = round(np.mean([len(answer.token_ids) // 4 for group in first for answer in group.answers]))
        launch = launch_of(make_folder(folder / "text"), free_port("127.0.0.1"))
        stack.callback(start_with_text(launch, folder / "text.log").end)
        embedded = stack.enter_context(
            closing(
                EmbeddedEngine(launch.model_folder, Sampling(1.0, ANSWER_TOKENS, ()), device="cpu", max_running=AT_ONCE)
            )
        )
        ways = {
            REFERENCE: bench_serve_round(launch, prompt_tokens, answer_tokens),
            WORKER: worker_round(worker),
            "embedded engine": engine_round(embedded, prompt_tokens),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(num_rounds):
            for name, run in ways.items():
                rates[name].append(1 / run())
            print(f"round {number + 1}: " + ", ".join(f"{name} {rates[name][-1]:.0f}" for name in ways), flush=True)
        return rates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="rounds of every way")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-server-") as folder:
        best = {name: max(rates) for name, rates in measure(Path(folder), arguments.rounds).items()}
    rows = [
        Row(name, rate, "tokens/s", REFERENCE, rate / best[REFERENCE], REQUIRED if name == WORKER else None)
        for name, rate in best.items()
    ]
    for row in rows:
        verdict = f"   required {row.required}: {'ok' if row.ok else 'MISSED'}" if row.required else ""
        print(f"{row.name:26}{row.value:8.0f} tokens/s   {row.ratio:.2f}{verdict}")
    print(json.dumps({"bench": "server", "rows": [row.fields for row in rows]}))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
