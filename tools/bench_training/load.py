"""Loads that both sides train, and the files that describe them to either side."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from bench_training.answers import Float64s, fixed_stops, long_tailed_stops
from bench_training.policy import make_policy, make_tokenizer
from mrl.config.load import load_config
from mrl.config.schema import RunConfig
from mrl.tasks.pool import TaskPool, build_pool

PROMPTS_PER_STEP, GROUP_SIZE = 16, 8
ANSWERS_PER_STEP = PROMPTS_PER_STEP * GROUP_SIZE
MICROBATCH_TOKENS = 1024
"""Tokens in a pass of mrl's learner, tuned by hand: 12 % less CPU than the default of 8192, thanks to the caches."""
LR = 1e-6
"""Learning rate, TRL's default: the policies, and with them the lengths of their answers, stay as they are."""
SEED = 1
TASK = "letter_counting"
POOL = {"train_prompts": 160, "held_out_prompts": 8, "seed": 17}
TASKS = {
    TASK: {
        "source": "reasoning_gym",
        "dataset": "letter_counting",
        "options": {"min_words": 1, "max_words": 1},
        "max_prompt_chars": 72,
    }
}


@dataclass(frozen=True)
class Load:
    """Policies that are trained at once, and the lengths of their answers."""

    name: str
    title: str
    policies: tuple[str, ...]
    limit_tokens: int
    stops: Float64s
    samples_at_least: float
    """Required ratio of mrl's to TRL's samples per CPU second, from prompt to update."""
    trained_at_least: float | None = None
    """Required ratio of mrl's to TRL's trained tokens per CPU second of the training alone."""


LOADS = (
    Load("fixed", "64 tokens each", ("a",), 64, fixed_stops(64), 1.1, 1.1),
    Load("long-tail", "long tail, one policy", ("a",), 192, long_tailed_stops(192), 2.5),
    Load("two", "long tail, two policies at once", ("a", "b"), 192, long_tailed_stops(192), 2.5),
)


@dataclass(frozen=True)
class Task:
    """A prompt as TRL's dataset has it. `answer` is the answer that the verifier accepts."""

    prompt: str
    answer: str


class Workplace:
    """The files of one load: `policies/NAME` and `prompts.jsonl`, which both sides read, and a folder per run."""

    def __init__(self, folder: Path, load: Load) -> None:
        """Write the prompts and make the policies."""
        self.folder, self.load = folder, load
        config = self.config("prompts", steps=1)
        pool = build_pool(config.tasks, config.pool, order_seed=config.run.seed)
        tasks = [_task(pool, place) for place in range(len(pool))]
        self.prompts.write_text("".join(json.dumps(task.__dict__) + "\n" for task in tasks), encoding="utf-8")
        for index, name in enumerate(load.policies):
            tokenizer = make_tokenizer([task.prompt for task in tasks])
            make_policy(self.policy(name), tokenizer, load.stops, seed=SEED + index)

    @property
    def prompts(self) -> Path:
        """File with the prompts in the order of training, which TRL reads."""
        return self.folder / "prompts.jsonl"

    def policy(self, name: str) -> Path:
        """Folder with the initial weights and the tokenizer of a policy."""
        return self.folder / "policies" / name

    def config_file(self, run: str, *, steps: int, lr: float = LR) -> Path:
        """Write a configuration for `mrl train` and return its file."""
        file = self.folder / f"{run}.toml"
        file.write_text(tomli_w.dumps(run_tables(self, run, steps=steps, lr=lr)), encoding="utf-8")
        return file

    def config(self, run: str, *, steps: int, lr: float = LR) -> RunConfig:
        """Write and load a configuration for `mrl train`; its models are folders already."""
        return load_config(self.config_file(run, steps=steps, lr=lr))


def run_tables(place: Workplace, run: str, *, steps: int, lr: float) -> dict[str, object]:
    """Tables of the configuration of an asynchronous run of mrl; keys that are not set have their defaults."""
    policy = {
        # The plain term of TRL's loss "grpo" with scale_rewards "none".
        "objective": {"method": "grpo", "advantage": "group_mean", "correction": {"level": "off"}},
        "rollout": {"group_size": GROUP_SIZE, "max_new_tokens": place.load.limit_tokens},
        "learner": {
            "prompts_per_step": PROMPTS_PER_STEP,
            "lr": lr,
            "checkpoint_every": 0,
            "microbatch_tokens": MICROBATCH_TOKENS,
        },
    }
    return {
        "run": {"name": run, "folder": str(place.folder / "runs"), "seed": SEED, "steps": steps},
        "pool": POOL,
        "tasks": TASKS,
        "policies": {name: policy | {"model": str(place.policy(name))} for name in place.load.policies},
        "evaluation": {"every": 0},
    }


def _task(pool: TaskPool, place: int) -> Task:
    """Task of the prompt at a place, with the line end that mrl renders where there is no chat template."""
    prompt = pool.prompt_at(place)
    return Task(prompt.text + "\n", _right_answer(pool, prompt.prompt_id, range(10)))


def _right_answer(pool: TaskPool, prompt_id: str, numbers: Sequence[int]) -> str:
    """First of the numbers that the verifier accepts as the answer."""
    verdicts = pool.submit([(prompt_id, f"<answer>{n}</answer>") for n in numbers]).result()
    return next(str(n) for n, verdict in zip(numbers, verdicts, strict=True) if verdict.reward == 1.0)
