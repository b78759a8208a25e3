"""Check that mrl and TRL compute the same, without which their speeds say nothing.

mrl's engine samples the answers of one step and its verifier judges them; both sides take one step on them. Compared
are the log-probabilities of the sampled tokens, the advantages, and the parameters after the step.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from bench_peers.process import end
from safetensors.torch import load_file
from torch import Tensor, nn

from bench_training.load import PROMPTS_PER_STEP, Workplace
from bench_training.trl_run import listen, start, write_job
from mrl.alignment.receiver import load_receiver
from mrl.config.policy_tables import LearnerTable
from mrl.config.schema import RunConfig
from mrl.engines.engine import generate_all
from mrl.learner.forward import ForwardSettings, frozen_logprobs
from mrl.learner.packing import pack
from mrl.learner.ranks.world import World
from mrl.learner.step_order import StepOrder
from mrl.learner.trainer import Trainer
from mrl.models.load_policy import load_policy
from mrl.processes.engines import build_embedded
from mrl.processes.worker import build_sampler
from mrl.records.codec import unpack_array
from mrl.records.rollouts import Answer, ScoredGroup, WorkItem
from mrl.records.version import Version
from mrl.sharing.context import SharingContext, sharing_context
from mrl.sharing.own_examples import own_examples
from mrl.sharing.regimes import build_regime
from mrl.tasks.pool import build_pool

LR = 1e-4
"""Learning rate of the compared step: at the rate of the runs, the rounding of the parameters itself would show."""
LOGPROB_NATS = 1e-4
STEP_SHARE = 1e-3
"""Largest difference of the updates, as a share of the length of TRL's. Adam's first step divides every gradient by
itself: where rounding decides over the sign of a gradient near zero, a parameter moves the other way."""


@dataclass(frozen=True)
class Gap:
    """The largest differences between both sides."""

    logprob_nats: float
    """Log-probability of one sampled token, between any two of mrl's engine, mrl's learner and TRL."""
    advantage: float
    """Advantage of one answer."""
    step_share: float
    """|mrl's update - TRL's update| / |TRL's update|, over all parameters as one vector."""

    @property
    def is_open(self) -> bool:
        """Whether speeds may be compared."""
        return self.logprob_nats <= LOGPROB_NATS and self.advantage <= 1e-6 and self.step_share <= STEP_SHARE


@dataclass(frozen=True)
class Learned:
    """One side's log-probabilities and advantages of the answers, and its parameters after the step."""

    logprobs_T: Tensor
    advantages_A: Tensor
    parameters: dict[str, Tensor]


def compare(place: Workplace, python: Path, core: str) -> Gap:
    """Take the step on both sides and return their differences. Raises RuntimeError when TRL fails."""
    config = place.config("gate", steps=1, lr=LR)
    policy = place.load.policies[0]
    groups = sample(config, policy)
    ours, theirs = learn(config, policy, groups), learn_by_trl(place, python, policy, groups, core)
    engine_T = torch.from_numpy(np.concatenate([unpack_array(answer.logprobs, "f4") for _, answer in _rows(groups)]))
    initial = parameters_of(load_policy(place.policy(policy)))
    seen = (ours.logprobs_T, theirs.logprobs_T, engine_T)
    return Gap(
        max(float((a - b).abs().max()) for a, b in itertools.combinations(seen, 2)),
        float((ours.advantages_A - theirs.advantages_A).abs().max()),
        step_gap(initial, ours.parameters, theirs.parameters),
    )


def step_gap(initial: dict[str, Tensor], ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """|(ours - initial) - (theirs - initial)| / |theirs - initial|, over all parameters as one vector."""
    apart = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in initial)
    moved = sum(float((theirs[name] - initial[name]).double().square().sum()) for name in initial)
    return (apart / moved) ** 0.5


def sample(config: RunConfig, policy: str) -> list[ScoredGroup]:
    """Sample and score the groups of the first step, as a worker makes them."""
    pool = build_pool(config.tasks, config.pool, order_seed=config.run.seed)
    sampler, _ = build_sampler(config, policy, pool, partial(build_embedded, config, policy))
    sampler.engine.label(Version(0, 0))
    size = config.policies[policy].rollout.group_size
    ids = [pool.prompt_at(place).prompt_id for place in range(PROMPTS_PER_STEP)]
    items = [
        WorkItem(ticket=f"0.{place}", position=place, prompt_id=prompt_id, group_size=size, step=0)
        for place, prompt_id in enumerate(ids)
    ]
    requests = [sampler.request(item, item.ticket) for item in items]
    groups = []
    for item, request, sampled in zip(items, requests, generate_all(sampler.engine, requests), strict=True):
        verdicts = sampler.verdicts(item.prompt_id, sampled, rank=0).result()
        groups.append(sampler.group(item, request.prompt_token_ids, sampler.answers(sampled, verdicts)))
    return groups


def learn(config: RunConfig, policy: str, groups: Sequence[ScoredGroup]) -> Learned:
    """Take one step of mrl's trainer."""
    table = config.policies[policy]
    context = sharing_context(config, policy, load_receiver(Path(table.model)))
    regime = build_regime(config.sharing, context)
    absorbed = regime.absorb(groups, step=0, rng=np.random.default_rng(0))
    trainer = Trainer(
        load_policy(Path(table.model)),
        table.learner,
        regime.components,
        temperature=table.rollout.temperature,
        seed=config.run.seed,
        total_steps=1,
        world=World(0, 1, torch.device("cpu")),
    )
    logprobs_T, advantages_A = score(trainer, table.learner, context, groups)
    trainer.train(StepOrder(absorbed.examples, absorbed.denominators, absorbed.expansion), 0)
    return Learned(logprobs_T, advantages_A, parameters_of(trainer.model))


def score(
    trainer: Trainer, table: LearnerTable, context: SharingContext, groups: Sequence[ScoredGroup]
) -> tuple[Tensor, Tensor]:
    """Return [T] log-probabilities and [A] advantages of all answers, also of those that a step leaves out as idle."""
    examples = own_examples(groups, context, keep_idle=True).examples
    components = [context.objective.component()]
    batches = pack(examples, components, microbatch_tokens=table.microbatch_tokens)
    packed_T = torch.cat(frozen_logprobs(trainer.model, batches, ForwardSettings(1.0)))
    in_order_T = torch.cat([batch.row_T for batch in batches]).argsort(stable=True)
    return packed_T[in_order_T], torch.tensor([float(example.advantages[0]) for example in examples])


def learn_by_trl(place: Workplace, python: Path, policy: str, groups: Sequence[ScoredGroup], core: str) -> Learned:
    """Take one step of TRL's trainer on the same ids. Raises RuntimeError when it fails."""
    rollouts = {
        "prompt_ids": [unpack_array(group.prompt_token_ids, "i4").tolist() for group, _ in _rows(groups)],
        "completion_ids": [unpack_array(answer.token_ids, "i4").tolist() for _, answer in _rows(groups)],
        "logprobs": [unpack_array(answer.logprobs, "f4").tolist() for _, answer in _rows(groups)],
    }
    file = place.folder / "rollouts.json"
    file.write_text(json.dumps(rollouts), encoding="utf-8")
    job = write_job(place, "gate-trl", policy, steps=1, lr=LR, rollouts=str(file))
    process = start(python, job, core)
    try:
        listen(process, job)
    finally:
        end(process)
    found = load_file(place.folder / "runs" / "gate-trl" / "result.safetensors")
    parameters = {name.partition(".")[2]: tensor for name, tensor in found.items() if name.startswith("parameters.")}
    return Learned(found["logprobs"], found["advantages"], parameters)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters of a model by name, without gradient."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _rows(groups: Sequence[ScoredGroup]) -> list[tuple[ScoredGroup, Answer]]:
    return [(group, answer) for group in groups for answer in group.answers]
