"""`examples/mutual_rl.py` beside a synchronous run of mrl: same seeds, same answers, same rescues, same parameters.

Both have the same two policies: transformers' models with tokenizers of mrl, which the example itself has shown half of
the task. Both have the prompts of mrl's pool in its order. The example samples by itself, and draws every token with
the number that mrl hashes from the run's seed: nothing that the run sampled, scored or trained is given to it.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import mrl
from mrl.config.policy_tables import MakeTable
from mrl.config.schema import RunConfig
from mrl.engines.token_sampling import answer_seeds, uniforms
from mrl.models.architectures import init_model
from mrl.models.tokenizers import TOKENIZERS
from mrl.tasks.pool import build_pool
from tests.support.one_file_example import FILE, load_example

pytestmark = pytest.mark.system
POLICIES = {"qwen": ("qwen3", "byte_level", "abc"), "llama": ("llama", "metaspace", "def")}
"""Name -> architecture, tokenizer, and how the words begin that it was shown."""
STEPS, PROMPTS, SEED, LR = 3, 12, 5, 2e-4
TOLERANCE = 1e-5
"""Of gradients, as a part of the largest one. A parameter whose gradient is near AdamW's epsilon moves by more."""
AS_IT_IS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def lecture():
    """The example as a module."""
    return load_example()


class Logprobs(nn.Module):
    """A model of transformers as a network of the example."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_NL: Tensor) -> Tensor:
        return self.model(ids_NL).logits.log_softmax(-1)


class Pieces:
    """A tokenizer of transformers as a vocabulary of the example."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer, self.end = tokenizer, tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids[: ids.index(self.end)] if self.end in ids else ids)


def make_policy(lecture, folder: Path, name: str):
    """A policy of the example that knows some of the words, saved as the folder that mrl trains from."""
    architecture, kind, first = POLICIES[name]
    words = [word for word in lecture.WORDS if word[0] in first]
    tokenizer = TOKENIZERS[kind]([lecture.prompt_of(word) + word.upper() + " =" for word in lecture.WORDS], 400)
    tokenizer.chat_template = AS_IT_IS
    recipe = MakeTable(architecture=architecture, tokenizer=kind, hidden_size=48, num_layers=2)
    model = init_model(recipe, vocab_size=len(tokenizer), eos_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id)
    lecture.Policy(name, Pieces(tokenizer), Logprobs(model), lr=4e-3).show(words, steps=60)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    return lecture.Policy(name, Pieces(tokenizer), Logprobs(model.eval()), lr=LR)


def configuration(lecture, folder: Path) -> RunConfig:
    """The run that does what the example does."""
    rows = [{"prompt": lecture.prompt_of(word), "reference": word} for word in lecture.WORDS]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = {"source": "jsonl", "dataset": str(folder / "words.jsonl"), "verifier": "mutual_rl:verify"}
    policy = {
        "rollout": {"group_size": lecture.GROUP_SIZE, "max_new_tokens": lecture.MAX_NEW_TOKENS},
        "learner": {"prompts_per_step": PROMPTS, "lr": LR, "max_grad_norm": 1e6, "checkpoint_every": 1}
        | {"keep_checkpoints": STEPS},
    }
    tables = {
        "run": {"name": "beside", "folder": str(folder / "runs"), "seed": SEED, "steps": STEPS, "sync": True}
        | {"modules": str(FILE.parent)},
        "sharing": {"regime": "sgt", "sgt": {"lambda": lecture.RESCUE_WEIGHT}},
        "pool": {"train_prompts": 0, "held_out_prompts": 0},
        "tasks": {"words": words},
        "evaluation": {"every": 0},
        "policies": {name: policy | {"model": str(folder / name)} for name in POLICIES},
    }
    return mrl.load(tables)


def values_of(policy) -> Tensor:
    """All parameters, in one line."""
    return nn.utils.parameters_to_vector(policy.network.parameters()).detach().clone()


def asked_at(config: RunConfig, step: int) -> list[tuple[int, str, str]]:
    """(position, prompt id, word) of the prompts of a step, in the order of mrl's pool."""
    pool = build_pool(config.tasks, config.pool, order_seed=config.run.seed)
    try:
        places = range(step * PROMPTS, (step + 1) * PROMPTS)
        return [(place, (prompt := pool.prompt_at(place)).prompt_id, prompt.text[:3]) for place in places]
    finally:
        pool.close()


def sample_group(lecture, policy, step: int, asked: tuple[int, str, str]):
    """The example's own answers, each token drawn with the number that mrl has for it."""
    place, prompt_id, word = asked
    seeds_N = answer_seeds(SEED, policy.name, prompt_id, step, lecture.GROUP_SIZE, position=place)
    return policy.sample(word, uniforms(seeds_N[:, None], np.arange(lecture.MAX_NEW_TOKENS)))


def told(policy, rows, groups) -> tuple[list, list]:
    """What the example trained on in the terms of a run's samples: own answers and rescues, sorted."""
    own = [(word, one.text, one.reward) for word, group in groups.items() for one in group]
    spelled = policy.vocabulary.decode
    return sorted(own), sorted((spelled(row.prompt)[:3], spelled(row.answer)) for row in rows if row.is_rescue)


def kept(run: mrl.Run, name: str, step: int) -> tuple[list, list]:
    """The same of a run."""
    samples = list(run.samples(name, step=step))
    own = [(row["prompt"][:3], row["completion"], row["reward"]) for row in samples if row["kind"] == "rollout"]
    rescues = [row for row in samples if row["kind"] == "rescue"]
    assert {row["source"] for row in rescues} <= POLICIES.keys() - {name}
    return sorted(own), sorted((row["prompt"][:3], row["completion"]) for row in rescues)


def assert_as_trained(policy, run: mrl.Run, step: int) -> None:
    """Every parameter to 3e-5; its mean gradient to 1e-5 of the largest one, since Adam hides a factor of the loss."""
    file = run.path / "checkpoints" / policy.name / f"step_{step}" / "rank_00000.safetensors"
    tensors = safetensors.torch.load_file(file)
    parameters = dict(policy.network.model.named_parameters())
    assert parameters.keys() == {key.removeprefix("model/") for key in tensors if key.startswith("model/")}
    gradients = {name: policy.optimizer.state[tensor]["exp_avg"] for name, tensor in parameters.items()}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in parameters.items():
        apart = float((parameter.detach() - tensors[f"model/{name}"]).abs().max())
        assert apart < 3 * TOLERANCE, f"{name} of {policy.name} after step {step}"
        apart = float((gradients[name] - tensors[f"optimizer/exp_avg/{name}"]).abs().max())
        assert apart < TOLERANCE * largest, f"gradient of {name} of {policy.name} in step {step}"


@pytest.fixture
def one_thread():
    """As a learner has: sums are rounded alike."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_its_first_steps_are_those_of_a_synchronous_run(lecture, tmp_path):
    """Answers and rewards, rescues, parameters and gradients of three steps."""
    policies = [make_policy(lecture, tmp_path, name) for name in POLICIES]
    config = configuration(lecture, tmp_path)
    run = mrl.train(config, on_line=lambda line: None)

    num_rescues = dict.fromkeys(POLICIES, 0)
    for step in range(STEPS):
        asked = asked_at(config, step)
        groups = [{one[2]: sample_group(lecture, policy, step, one) for one in asked} for policy in policies]
        before = [values_of(policy) for policy in policies]
        trained = lecture.train_step(policies, groups, seed=step)
        for policy, own, rows, old in zip(policies, groups, trained, before, strict=True):
            answers, rescues = told(policy, rows, own)
            assert (answers, rescues) == kept(run, policy.name, step + 1)
            assert_as_trained(policy, run, step + 1)
            assert (values_of(policy) - old).abs().max() > 10 * TOLERANCE, "a step is longer than what is tolerated"
            num_rescues[policy.name] += len(rescues)
    assert min(num_rescues.values()) > 0
