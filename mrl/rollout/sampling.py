"""What one policy samples: prompts become requests, finished answers become verified ones, and those scored groups."""

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

    def request(self, item: WorkItem, request_id: str) -> GenerationRequest:
        """What the engine is asked for."""
        prompt = self.prompt_token_ids(self.pool.prompt(item.prompt_id).text)
        seeds = answer_seeds(self.run_seed, self.policy, item.prompt_id, item.step, item.group_size)
        return GenerationRequest(request_id, prompt, seeds)

    def group(self, item: WorkItem, prompt_token_ids: npt.NDArray[np.int32], answers: Sequence[Answer]) -> ScoredGroup:
        """The scored group of a finished item."""
        return ScoredGroup(
            ticket=item.ticket,
            prompt_id=item.prompt_id,
            task=self.pool.prompt(item.prompt_id).task,
            prompt_token_ids=pack_array(prompt_token_ids, "i4"),
            answers=list(answers),
        )

    def verified(self, prompt_ids: Sequence[str], generations: Sequence[Generation]) -> list[Answer]:
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
