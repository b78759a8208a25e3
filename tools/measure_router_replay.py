"""How far a learner is from a bfloat16 engine on what that sampled, with routers replayed and without.

A random mixture samples on the embedded engine in bfloat16; the learner reads the same answers in float32 and in
bfloat16: its routers choose for themselves, are told the experts of sampled tokens, or those of prompts as well. Shown
are means over seeds and the largest ratio of probabilities. How far trained mixtures are apart it does not say.

    .venv/bin/python tools/measure_router_replay.py [--seeds N] [--scale S]

Takes a minute or two on one core. Prints a table.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mrl.config.policy_tables import LearnerTable
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Generation, GenerationRequest, Sampling, generate_all
from mrl.learner.forward import ForwardSettings, answer_logprobs
from mrl.learner.packing import pack
from mrl.learner.ranks.world import World
from mrl.learner.sharding import place
from mrl.models.load_policy import load_policy
from mrl.models.routing.router_replay import RouterReplay
from mrl.objectives.diagnostics import k3_nats
from mrl.objectives.specs import Clipped
from mrl.records.version import Version
from mrl.sharing.regime import Component, TrainingExample

VOCAB, PROMPTS, ANSWERS, PROMPT_TOKENS, ANSWER_TOKENS = 512, 8, 4, 64, 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 2, "intermediate_size": 512, "moe_intermediate_size": 128, "num_experts": 32,
    "num_experts_per_tok": 4, "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip
OWN = Component("own", Clipped(), 1.0, "rows", "own")


def save(folder: Path, scale: float, seed: int) -> None:
    """A mixture with random weights of this standard deviation."""
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, initializer_range=scale)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


def sample(folder: Path, seed: int) -> list[TrainingExample]:
    """Answers of the engine as rows, with their experts and those of their prompts."""
    sampling = Sampling(1.0, ANSWER_TOKENS, (), tells_experts=True)
    engine = EmbeddedEngine(folder, sampling, device="cpu", max_running=PROMPTS * ANSWERS, dtype="bfloat16")
    engine.label(Version(0, 0))
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, VOCAB, (PROMPTS, PROMPT_TOKENS)).astype(np.int32)
    seeds = rng.integers(0, 2**63, (PROMPTS, ANSWERS), dtype=np.uint64)
    asked = [GenerationRequest(f"{n}", prompts[n], seeds[n], tells_prompt=True) for n in range(PROMPTS)]
    return [row for n, one in enumerate(generate_all(engine, asked)) for row in rows_of(prompts[n], one)]


def rows_of(prompt: np.ndarray, answers: Sequence[Generation]) -> list[TrainingExample]:
    """Of one prompt, whose experts come with the first answer."""
    found, before = [], None
    for answer in answers:
        ids, experts = answer.token_ids, answer.experts
        assert experts is not None, "the engine tells"
        before = experts[: -ids.size] if before is None else before
        ones = np.ones(ids.size, np.float32)
        row = TrainingExample(prompt, ids, "own", ones, ones, answer.logprobs, "p", "me", experts=experts[-ids.size :])
        found.append(replace(row, prompt_experts=before))
    return found


def compare(folder: Path, rows: Sequence[TrainingExample], precision: str) -> tuple[float, float, float]:
    """k3 in nats, largest ratio, and the share of experts that the learner's routers would not have chosen."""
    table = LearnerTable.model_validate({"precision": precision})
    policy = load_policy(folder)
    replay = RouterReplay(policy)
    model = place(policy.eval(), table, World(0, 1, torch.device("cpu")))
    gaps, mismatches = [], []
    for batch in pack(rows, [OWN], microbatch_tokens=2048, routing=replay.shape):
        logprobs_T = answer_logprobs(model, batch, ForwardSettings(1.0)).detach()
        mismatches.append(k3_nats(logprobs_T, batch.behaviour_logprobs_T))
        gaps.append(logprobs_T - batch.behaviour_logprobs_T)
    told, other = replay.take_counts()
    gap_T = torch.cat(gaps)
    return float(torch.cat(mismatches).mean()), float(gap_T.abs().max().exp()), other / told if told else 0.0


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=0.06, help="standard deviation of the random weights")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for seed in range(chosen.seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            save(folder, chosen.scale, seed)
            told = sample(folder, seed)
            kinds = {
                "nothing": [replace(row, experts=None, prompt_experts=None) for row in told],
                "sampled tokens": [replace(row, prompt_experts=None) for row in told],
                "sampled tokens and prompts": told,
            }
            for precision in ("float32", "bfloat16"):
                for kind, rows in kinds.items():
                    found.setdefault((precision, kind), []).append(compare(folder, rows, precision))
    print("| learner | replayed | k3, nats | largest ratio | chosen otherwise |\n|---|---|--:|--:|--:|")
    for (precision, kind), values in found.items():
        k3, ratio, share = np.array(values).T
        otherwise = "" if kind == "nothing" else f"{share.mean():.2%}"
        print(f"| {precision} | {kind} | {k3.mean():.1e} | {ratio.max():.2f} | {otherwise} |")


if __name__ == "__main__":
    main()
