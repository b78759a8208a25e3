"""A learner that publishes, takes one step, and publishes again. Trainer, canary and publisher are those of runs."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from canary_check.cases import Case
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Qwen3Config, Qwen3ForCausalLM

from mrl.config.policy_tables import LearnerTable, LoraTable
from mrl.learner.ranks.world import World
from mrl.learner.references import CanaryReferences
from mrl.learner.step_order import StepOrder
from mrl.learner.trainer import Trainer, check_forward
from mrl.models.load_policy import load_policy
from mrl.models.parameters import adapter_sources, weight_sources
from mrl.models.scoring import score_tokens
from mrl.objectives.specs import Clipped
from mrl.records.version import Version
from mrl.sharing.regime import Component, TrainingExample
from mrl.weights.adapters import AdapterFormat
from mrl.weights.publish import Publisher

VOCAB_SIZE, HIDDEN_SIZE = 1024, 64
NUM_ROWS, PROMPT_TOKENS, ANSWER_TOKENS = 32, 16, 48
ROWS_OF_A_STEP = 32
"""Rows for which each row stands, as if the step had 64 thousand tokens: its canary has 2,048 of them."""
FIRST, SECOND = Version(0, 0), Version(0, 1)
OWN = Component("own", Clipped(0.2, 0.2), 1.0, "rows", "own")


@dataclass(frozen=True, slots=True)
class Published:
    """Folders of two consecutive versions of a policy."""

    start: Path
    """The folder that the learner began with."""
    first: Path
    second: Path


def publish_two(case: Case, folder: Path) -> Published:
    """Publish a random policy before and after a step; return the manifests."""
    start = _save(case, folder / "start")
    lora = LoraTable(rank=8) if case.adapters else None
    table = LearnerTable(precision=case.precision, lr=case.lr, max_grad_norm=1e9, lora=lora)
    world = World(0, 1, torch.device("cpu"))
    examples = _rows(case.num_layers, case.logit_std, case.is_released)
    trainer = Trainer(load_policy(start), table, (OWN,), temperature=1.0, seed=3, total_steps=10, world=world)
    prompts = [example.prompt_token_ids.tolist() for example in examples]
    references = CanaryReferences(trainer, prompts, engine_format=case.engine, sends_adapters=case.adapters)
    check_forward(trainer.model, references.texts, trainer.precision)
    adapters = AdapterFormat(lora, start) if lora else None
    publisher = Publisher(folder / "weights", "p", model_folder=start, adapters=adapters)

    def publish(version: Version) -> Path:
        sources = (adapter_sources if adapters else weight_sources)(trainer.model)
        whole = ((source.name, source.whole()) for source in sources)
        canary = references.make()
        assert canary is not None, "there is no other rank"
        return publisher.publish_weights(whole, version, canary)

    first = publish(FIRST)
    references.before_step(StepOrder(examples * ROWS_OF_A_STEP, {}))
    trainer.train(StepOrder(examples, {"own": float(NUM_ROWS)}), 0)
    return Published(start, first, publish(SECOND))


def _save(case: Case, folder: Path) -> Path:
    _policy(case.num_layers, case.logit_std, case.is_released).save_pretrained(folder)
    Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def _policy(num_layers: int, logit_std: float, is_released: bool) -> Qwen3ForCausalLM:
    torch.manual_seed(num_layers)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=3 * HIDDEN_SIZE,
        max_position_embeddings=512,
        initializer_range=0.06,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters() if is_released else ():
            parameter.copy_(parameter.to(torch.bfloat16))
        found = model(torch.randint(0, VOCAB_SIZE, (8, 32))).logits.std(-1).mean()
        model.lm_head.weight *= 2.0 ** float(torch.log2(logit_std / found))
    return model


@lru_cache(maxsize=1)
def _rows(num_layers: int, logit_std: float, is_released: bool) -> list[TrainingExample]:
    """Training examples of answers that the policy samples, with random advantages."""
    model, rng = _policy(num_layers, logit_std, is_released), np.random.default_rng(0)
    torch.manual_seed(1)
    prompts = torch.randint(0, VOCAB_SIZE, (NUM_ROWS, PROMPT_TOKENS))
    sampled: Any = model.generate(  # type: ignore[misc]  # no model fits the type of its `self`
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=ANSWER_TOKENS,
        min_new_tokens=ANSWER_TOKENS,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
    )
    logprobs = score_tokens(model, sampled.tolist())
    return [
        TrainingExample(
            prompt_token_ids=ids[:PROMPT_TOKENS].astype(np.int32),
            answer_token_ids=ids[PROMPT_TOKENS:].astype(np.int32),
            component="own",
            advantages=np.full(ANSWER_TOKENS, rng.normal(), np.float32),
            weights=np.full(ANSWER_TOKENS, 1.0 / ANSWER_TOKENS, np.float32),
            behaviour_logprobs=np.asarray(scored[PROMPT_TOKENS - 1 :], np.float32),
            prompt_id=f"p{number}",
            source="p",
        )
        for number, (ids, scored) in enumerate(zip(sampled.numpy(), logprobs, strict=True))
    ]
