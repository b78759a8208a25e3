"""The supervised training that gives a small policy its skills.

Practice comes first: short prompts on which every operation is equally likely, until the policy executes all of them.
Then come task prompts, whose operation is drawn from the policy's skewed prior, mixed with further practice.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

PRACTICE_PHASE = 0.5
"""Share of the steps that show practice prompts only."""
PRACTICE_ROWS_FACTOR = 1.5
"""Rows of a step in the practice phase, as a multiple of `Schedule.rows`: practice prompts are short."""
PRACTICE_SHARE = 0.4
"""Share of practice prompts after the first phase."""
RAMP_STEPS = 30
FLOOR = 0.05
"""The learning rate ends at this share of its peak."""
IGNORED = -100


EncodedTurn = tuple[list[int], list[int]]
"""Token ids that are given, and the ids after them that are imitated."""


class Text(Protocol):
    """A supervised example."""

    @property
    def turns(self) -> Sequence[tuple[str, str]]:
        """(prompt, completion) of each turn, of which the completions are imitated; one turn outside of episodes."""
        ...


class Examples(Protocol):
    """Source of examples."""

    def draw(self, rng: random.Random, *, practice: bool) -> Text:
        """Draw one example; with `practice`, one under the neutral prompt."""
        ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """Length and size of a warm start."""

    steps: int
    rows: int
    peak_lr: float


def warm_start(
    model: PreTrainedModel,
    encode: Callable[[Text], Sequence[EncodedTurn]],
    examples: Examples,
    schedule: Schedule,
    *,
    rng: random.Random,
    on_step: Callable[[int, float], None],
) -> None:
    """Train `model` in place, on the device where it is; `encode` gives the ids of each turn, with EOS.

    The loss is the mean negative log-likelihood of completion tokens. `on_step(step, loss)` is called after every step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.peak_lr * lr_factor(step, schedule.steps)
        drawn = draw_rows(examples, step, schedule, rng)
        loss = completion_loss(model, *pad_rows([encode(one) for one in drawn], model.device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        on_step(step, float(loss.detach()))
    model.eval()


def lr_factor(step: int, num_steps: int) -> float:
    """Return the learning rate as a share of its peak: a linear ramp over the first steps, and a cosine to FLOOR."""
    cosine = 0.5 * (1.0 + math.cos(math.pi * step / num_steps))
    return min(1.0, (step + 1) / RAMP_STEPS) * (FLOOR + (1.0 - FLOOR) * cosine)


def draw_rows(examples: Examples, step: int, schedule: Schedule, rng: random.Random) -> list[Text]:
    """Draw the examples of one step."""
    if step < PRACTICE_PHASE * schedule.steps:
        return [examples.draw(rng, practice=True) for _ in range(round(PRACTICE_ROWS_FACTOR * schedule.rows))]
    return [examples.draw(rng, practice=rng.random() < PRACTICE_SHARE) for _ in range(schedule.rows)]


def pad_rows(rows: Sequence[Sequence[EncodedTurn]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return input ids and targets, both [R, T] int64: padded on the right, targets only where an imitated token
    follows.
    """
    width = max(sum(len(given) + len(imitated) for given, imitated in turns) for turns in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    targets = torch.full((len(rows), width), IGNORED, dtype=torch.int64)
    for row, turns in enumerate(rows):
        end = 0
        for given, imitated in turns:
            begin, end = end + len(given), end + len(given) + len(imitated)
            ids[row, begin - len(given) : end] = torch.tensor(given + imitated)
            targets[row, begin - 1 : end - 1] = torch.tensor(imitated)
    return ids.to(device), targets.to(device)


def completion_loss(model: PreTrainedModel, ids: Tensor, targets: Tensor) -> Tensor:
    """Return the mean negative log-likelihood in nats of the targets; right padding is harmless to causal attention."""
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    wanted = targets != IGNORED
    logits = model.get_output_embeddings()(hidden[wanted])
    return cross_entropy(logits.float(), targets[wanted])
