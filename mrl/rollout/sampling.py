"""One batch of work: generate all answers, verify them, and put the results into scored groups."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mrl.engines.engine import Engine, Generation, GenerationRequest
from mrl.engines.sampling import answer_seeds
from mrl.records.codec import pack_array
from mrl.records.rollouts import Answer, ScoredGroup, WorkItem
from mrl.tasks.pool import TaskPool


@dataclass(frozen=True)
class Sampler:
    """What turns prompts into scored answers for one policy."""

    policy: str
    run_seed: int
    engine: Engine
    pool: TaskPool
    prompt_token_ids: Callable[[str], npt.NDArray[np.int32]]
    """Text of a prompt -> ids under the policy's tokenizer."""
    completion_bytes: Callable[[npt.NDArray[np.int32]], bytes]
    """Sampled ids -> bytes, special tokens having none."""
    answers_at_once: int = 0
    """Answers in one batch of the engine, at least a group; 0 for all."""

    def sample(self, items: Sequence[WorkItem]) -> list[ScoredGroup]:
        """Scored groups for all items, in their order."""
        prompts = [self.prompt_token_ids(self.pool.prompt(item.prompt_id).text) for item in items]
        requests = [
            GenerationRequest(ids, answer_seeds(self.run_seed, self.policy, item.prompt_id, item.step, item.group_size))
            for ids, item in zip(prompts, items, strict=True)
        ]
        generations = self.generate(requests)
        prompt_ids = [item.prompt_id for item, answers in zip(items, generations, strict=True) for _ in answers]
        scored = iter(self.score_answers(prompt_ids, [one for answers in generations for one in answers]))
        return [
            self._group(item, ids, [next(scored) for _ in answers])
            for item, ids, answers in zip(items, prompts, generations, strict=True)
        ]

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """The answers of all requests, in order, in batches of whole groups that the engine can hold."""
        return [answers for batch in batches(requests, self.answers_at_once) for answers in self.engine.generate(batch)]

    def _group(self, item: WorkItem, prompt_ids: npt.NDArray[np.int32], answers: list[Answer]) -> ScoredGroup:
        return ScoredGroup(
            ticket=item.ticket,
            prompt_id=item.prompt_id,
            task=self.pool.prompt(item.prompt_id).task,
            prompt_token_ids=pack_array(prompt_ids, "i4"),
            answers=answers,
        )

    def score_answers(self, prompt_ids: Sequence[str], generations: Sequence[Generation]) -> list[Answer]:
        """Verified answers, in order. A text cut in mid-character is verified with a replacement mark in its place."""
        completions = [self.completion_bytes(generation.token_ids) for generation in generations]
        texts = [completion.decode("utf-8", errors="replace") for completion in completions]
        verdicts = self.pool.verify_all(list(zip(prompt_ids, texts, strict=True)))
        return [
            Answer(
                token_ids=pack_array(generation.token_ids, "i4"),
                logprobs=pack_array(generation.logprobs, "f4"),
                versions=generation.versions,
                completion=completion,
                finish_reason=generation.finish_reason,
                reward=verdict.reward,
            )
            for generation, completion, verdict in zip(generations, completions, verdicts, strict=True)
        ]


def batches(requests: Sequence[GenerationRequest], answers_at_once: int) -> list[list[GenerationRequest]]:
    """`requests` in order, cut where a batch would exceed so many answers; 0 cuts nowhere."""
    found: list[list[GenerationRequest]] = []
    room = 0
    for request in requests:
        if not found or (answers_at_once and request.seeds.size > room):
            found.append([])
            room = answers_at_once
        found[-1].append(request)
        room -= request.seeds.size
    return found
