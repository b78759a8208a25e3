"""Speed of the embedded engine, for those who choose an engine, beside transformers' `generate` and vLLM on a CPU.

Compared are the embedded engine, transformers' batched `generate`, transformers' continuous batching, and vLLM.
All sample from a 0.9 M-parameter Qwen3 made in place, with one thread, and return the log-probabilities of sampled
tokens. Two loads of 256 answers (32 prompts of about 20 tokens, 8 answers each): short ones of about 8 tokens as in the
quickstart, and a long tail, log-normal of mean 71 and at most 192. The length of every answer is fixed beforehand, so
that all make the same useful tokens. Each way runs with several settings; its best round counts. Rates are per CPU
second of this process, so that other processes of the machine matter little; with one thread that is a second of an
idle machine. The embedded engine and `generate` take turns; continuous batching replaces the model's attention while it
is up, and has rounds of its own. So has a vLLM server on the CPU, of which all processes count; it is left out where
`mrl engine-env vllm --cpu` has not made its environment.

    .venv/bin/python tools/bench_rollout.py [--rounds N]

Prints a table; the last line is JSON. Ends with 1 when the embedded engine is less than twice as fast as the best
`generate` on the long tail.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from bench_peers.process import tree_cpu_s
from bench_row import Row, end, print_rows
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen3Config,
    Qwen3ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput
from vllm_load import VLLMLoad

from mrl.engines.continuous import ContinuousBatch, _Waiting
from mrl.engines.engine import GenerationRequest, Sampling
from mrl.engines.token_sampling import sample, uniforms
from mrl.errors import EngineError
from mrl.records.version import Version

NUM_PROMPTS, GROUP_SIZE, VOCAB, MAX_TOKENS = 32, 8, 512, 192
# (blocks, page size, tokens per batch): the best settings by hand for the short load, for both, and for the long tail.
CONTINUOUS = [(128, 16, 64), (512, 16, 128), (256, 32, 512)]
BATCH_ROWS = [256, 64]
EMBEDDED_ROWS = [256, 128]
VLLM_ROWS = [256, 64]
REQUIRED = ">=2"
KINDS = ("short", "long tail")

Round = Callable[[], int]


class StopAtLengths(StoppingCriteria):
    """Stopping criterion that ends every row of `generate` at its own length."""

    def __init__(self, prompt_tokens: int, lengths: torch.Tensor) -> None:
        self._prompt_tokens, self._lengths = prompt_tokens, lengths

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        """[rows] whether each row is done."""
        return self._lengths <= input_ids.shape[1] - self._prompt_tokens


class FixedLengths(ContinuousBatch):
    """The embedded engine's batch; answer i of all requests ends at `lengths[i]`."""

    lengths: np.ndarray

    def _begin(self, waiting: _Waiting, rows: list[int]) -> None:
        first = int(waiting.request.request_id) * GROUP_SIZE + waiting.begun
        super()._begin(waiting, rows)
        self._rows["limit"][rows] = self.lengths[first : first + len(rows)]


class Sampler(LogitsProcessor):
    """Logits processor that samples inside `generate` as the embedded engine does."""

    def __init__(self, num_rows: int, num_tokens: int) -> None:
        rows, places = np.ogrid[:num_rows, :num_tokens]
        self._uniforms = torch.from_numpy(uniforms(rows.astype(np.uint64), places))
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Sample from [rows, V] logits of the next token; return logits that are -inf but for the sampled token."""
        tokens, logprobs = sample(scores, self._uniforms[:, len(self.logprobs)], 1.0)
        self.logprobs.append(logprobs)
        return torch.full_like(scores, float("-inf")).scatter_(-1, tokens[:, None], 0.0)


def make_model() -> Qwen3ForCausalLM:
    """Make a Qwen3 of about a million parameters with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def make_load(kind: str) -> tuple[list[list[int]], np.ndarray]:
    """Make the 32 prompts and the 256 answer lengths of a load."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, VOCAB, rng.integers(16, 25)).tolist() for _ in range(NUM_PROMPTS)]
    num_rows = NUM_PROMPTS * GROUP_SIZE
    if kind == "short":
        return prompts, rng.integers(4, 13, num_rows)
    return prompts, long_tail(rng, num_rows)


def long_tail(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    """Draw answer lengths in tokens: log-normal of mean 71, at most MAX_TOKENS."""
    lengths = rng.lognormal(np.log(55), 0.8, num_rows).clip(4, MAX_TOKENS)
    return (lengths * (71 / lengths.mean())).clip(4, MAX_TOKENS).astype(int)


@torch.inference_mode()
def generate_batch(model: Qwen3ForCausalLM, prompts: list[list[int]], lengths: np.ndarray) -> int:
    """Run batched `generate`: every prompt is read once, its cache repeated for its answers. Return useful tokens."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp_(min=0)
    inputs = {"attention_mask": mask[:, :-1], "position_ids": positions[:, :-1], "past_key_values": cache}
    model(input_ids=ids[:, :-1], logits_to_keep=1, use_cache=True, **inputs)
    cache.batch_select_indices(torch.arange(len(prompts)).repeat_interleave(GROUP_SIZE))
    limit = int(lengths.max())
    model.generate(  # type: ignore[misc]  # no model fits the type of its `self`
        ids.repeat_interleave(GROUP_SIZE, 0),
        attention_mask=mask.repeat_interleave(GROUP_SIZE, 0),
        past_key_values=cache,
        generation_config=GenerationConfig(max_new_tokens=limit, do_sample=False, pad_token_id=0, use_cache=True),
        logits_processor=LogitsProcessorList([Sampler(len(lengths), limit)]),
        stopping_criteria=StoppingCriteriaList([StopAtLengths(width, torch.from_numpy(lengths))]),
    )
    return int(lengths.sum())


def generate_round(model: Qwen3ForCausalLM, prompts: list[list[int]], lengths: np.ndarray, rows: int) -> Round:
    """Make a round: one pass over the load with `generate`, in batches of `rows` answers."""
    groups = rows // GROUP_SIZE

    def run() -> int:
        return sum(
            generate_batch(model, prompts[start : start + groups], lengths[start * GROUP_SIZE :][:rows])
            for start in range(0, len(prompts), groups)
        )

    return run


def embedded_round(model: Qwen3ForCausalLM, prompts: list[list[int]], lengths: np.ndarray, rows: int) -> Round:
    """Make a round: one pass over the load through the embedded engine's batch, which lives from round to round."""
    batch = FixedLengths(model, Sampling(1.0, MAX_TOKENS, (-1,)), max_running=rows)
    batch.lengths = lengths
    batch.relabel(Version(0, 0))
    seeds = np.arange(len(lengths), dtype=np.uint64).reshape(-1, GROUP_SIZE)
    requests = [
        GenerationRequest(str(i), np.array(prompt, dtype=np.int32), seeds[i]) for i, prompt in enumerate(prompts)
    ]

    def run() -> int:
        batch.submit(requests)
        tokens = 0
        while batch.in_flight:
            tokens += sum(len(finished.generation.logprobs) for finished in batch.step())
        return tokens

    return run


@contextmanager
def continuous_round(
    model: Qwen3ForCausalLM, prompts: list[list[int]], lengths: np.ndarray, settings: tuple[int, int, int]
) -> Iterator[Round]:
    """Make a round: one pass over the load through a continuous-batching manager, which lives from round to round."""
    num_blocks, page_size, max_batch_tokens = settings
    config = ContinuousBatchingConfig(
        num_blocks=num_blocks, page_size=page_size, max_batch_tokens=max_batch_tokens, return_logprobs=True, seed=1
    )
    generation = GenerationConfig(do_sample=True, temperature=1.0, max_new_tokens=MAX_TOKENS, pad_token_id=0)
    generation.eos_token_id = -1
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config
    ) as manager:

        def run() -> int:
            for row, length in enumerate(lengths.tolist()):
                manager.add_request(prompts[row // GROUP_SIZE], max_new_tokens=length, eos_token_id=-1)
            return sum(len(_result(manager).logprobs) for _ in lengths)

        yield run


def _result(manager: ContinuousBatchingManager) -> GenerationOutput:
    for _ in range(600):
        output = manager.get_result(timeout=0.1)
        if output is not None:
            if output.error:
                raise RuntimeError(output.error)
            return output
    raise TimeoutError("continuous batching gave no result within 60 s")


def best_rates(
    ways: Mapping[str, Round], num_rounds: int, expected: int, cpu_s: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """Measure useful tokens per CPU second of every way, the best of `num_rounds`, in turns."""
    rates = dict.fromkeys(ways, 0.0)
    for _ in range(num_rounds):
        for name, run in ways.items():
            began_s = cpu_s()
            tokens = run()
            if tokens != expected:
                raise RuntimeError(f"{name} made {tokens} tokens, wanted {expected}")
            rates[name] = max(rates[name], tokens / (cpu_s() - began_s))
    return rates


def vllm_rates(model: Qwen3ForCausalLM, num_rounds: int) -> dict[str, dict[str, float]]:
    """Measure the rates of vLLM on both loads; empty where its environment is missing."""
    rates: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="bench-rollout-") as name:
        folder = Path(name)
        model.save_pretrained(folder / "model")
        for rows in VLLM_ROWS:
            try:
                server = VLLMLoad(folder / "model", folder / "log", at_once=rows)
            except EngineError as error:
                print(f"without vLLM: {error}", flush=True)
                return rates
            with closing(server):
                for kind in KINDS:
                    prompts, lengths = make_load(kind)
                    ways = {f"vLLM, {rows} rows": partial(server.sample, prompts, lengths, GROUP_SIZE)}
                    # One more round, since the server sets up some of its parts in the first.
                    rates[kind] |= best_rates(ways, num_rounds + 1, int(lengths.sum()), tree_cpu_s)
    return rates


def measure(model: Qwen3ForCausalLM, kind: str, num_rounds: int) -> dict[str, float]:
    """Measure the rates of all ways but vLLM on one load."""
    prompts, lengths = make_load(kind)
    continuous: dict[str, float] = {}
    for settings in CONTINUOUS:
        # A manager at a time: each starts a thread and replaces the model's attention while it is up.
        name = "continuous, {} blocks of {}, {} tokens".format(*settings)
        with ExitStack() as stack:
            run = stack.enter_context(continuous_round(model, prompts, lengths, settings))
            continuous |= best_rates({name: run}, num_rounds, int(lengths.sum()))
    in_turn = {f"generate, {rows} rows": generate_round(model, prompts, lengths, rows) for rows in BATCH_ROWS}
    in_turn |= {f"embedded, {rows} rows": embedded_round(model, prompts, lengths, rows) for rows in EMBEDDED_ROWS}
    return best_rates(in_turn, num_rounds, int(lengths.sum())) | continuous


def rows_of(kind: str, rates: dict[str, float]) -> list[Row]:
    """Rows of rates and ratios to the best `generate`, which the best embedded one has to reach on the long tail."""
    reference, best = (
        max((name for name in rates if name.startswith(way)), key=rates.__getitem__) for way in ("generate", "embedded")
    )
    rows = []
    for name, rate in rates.items():
        required = REQUIRED if kind == "long tail" and name == best else None
        unit, ratio = "useful tokens/CPU s", rate / rates[reference]
        rows.append(Row(f"{kind}: {name}", rate, unit, reference, ratio, required))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of every way")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = make_model()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"Qwen3, {num_parameters / 1e6:.2f} M parameters, 1 thread, {NUM_PROMPTS * GROUP_SIZE} answers a round",
        flush=True,
    )
    by_vllm = vllm_rates(model, arguments.rounds)
    rows = [row for kind in KINDS for row in rows_of(kind, measure(model, kind, arguments.rounds) | by_vllm[kind])]
    print_rows(rows)
    return end("rollout", rows)


if __name__ == "__main__":
    sys.exit(main())
