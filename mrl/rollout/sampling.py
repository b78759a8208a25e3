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

    def sample(self, items: Sequence[WorkItem]) -> list[ScoredGroup]:
        """Scored groups for all items, in their order."""
        prompts = [self.prompt_token_ids(self.pool.prompt(item.prompt_id).text) for item in items]
        requests = [
            GenerationRequest(ids, answer_seeds(self.run_seed, self.policy, item.prompt_id, item.step, item.group_size))
            for ids, item in zip(prompts, items, strict=True)
        ]
        generations = self.engine.generate(requests)
        return [self._score(item, ids, answers) for item, ids, answers in zip(items, prompts, generations, strict=True)]

    def _score(self, item: WorkItem, prompt_ids: npt.NDArray[np.int32], answers: list[Generation]) -> ScoredGroup:
        return ScoredGroup(
            ticket=item.ticket,
            prompt_id=item.prompt_id,
            task=self.pool.prompt(item.prompt_id).task,
            prompt_token_ids=pack_array(prompt_ids, "i4"),
            answers=[self.score_answer(item.prompt_id, answer) for answer in answers],
        )

    def score_answer(self, prompt_id: str, generation: Generation) -> Answer:
        """Verify one answer. A text cut in mid-character is verified with a replacement mark in its place."""
        completion = self.completion_bytes(generation.token_ids)
        verdict = self.pool.verify(prompt_id, completion.decode("utf-8", errors="replace"))
        return Answer(
            token_ids=pack_array(generation.token_ids, "i4"),
            logprobs=pack_array(generation.logprobs, "f4"),
            versions=generation.versions,
            completion=completion,
            finished=generation.finished,
            reward=verdict.reward,
        )
