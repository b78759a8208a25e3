"""The embedded engine: transformers in the worker's own process, with a key-value cache.

Batched `generate` over left-padded prompts. Every prompt is read once, and its cache is repeated for the answers of its
group. Weights change only between batches, so all tokens of an answer carry one version.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel

from mrl.engines.engine import Generation, GenerationRequest, ScoringRequest
from mrl.engines.sampling import SeededSampler
from mrl.errors import WeightsError
from mrl.models.parameters import replace_weights
from mrl.models.scoring import score_answers, score_tokens
from mrl.records.finish import FinishReason
from mrl.records.version import Version, VersionSpan


class EmbeddedEngine:
    """One model, one version at a time. Not thread-safe."""

    def __init__(
        self, model: PreTrainedModel, *, eos_ids: Sequence[int], max_new_tokens: int, temperature: float
    ) -> None:
        """Any of `eos_ids` ends an answer; `max_new_tokens` bounds it."""
        self._model = model.eval()
        # Defaults that a model folder ships (repetition penalty, suppressed tokens ...) would change the sampling
        # distribution behind the learner's back, so they are dropped.
        self._model.generation_config = GenerationConfig()
        self._eos_ids = torch.tensor(sorted(eos_ids))
        self._pad_id, self._max_new_tokens, self._temperature = eos_ids[0], max_new_tokens, temperature
        self._config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(eos_ids),
            pad_token_id=self._pad_id,
            use_cache=True,
        )
        self._version: Version | None = None

    @property
    def version(self) -> Version | None:
        """The version that is served; None before the first release and from a load until the release after it."""
        return self._version

    def load(self, weights: dict[str, Tensor]) -> None:
        """Take over a whole set of weights. Raises WeightsError, changing nothing, when they do not fit."""
        replace_weights(self._model, weights)
        self._version = None

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities in nats of every token after the first under the loaded weights, at temperature 1."""
        return score_tokens(self._model, token_ids)

    def score_answers(self, request: ScoringRequest) -> list[npt.NDArray[np.float32]]:
        """[T] log-probabilities of each answer, at the sampling temperature. Raises WeightsError as `generate` does."""
        if self._version is None:
            raise WeightsError("the engine has no verified weights to score with")
        return score_answers(self._model, request.prompt_token_ids, request.answers, temperature=self._temperature)

    def release(self, version: Version) -> None:
        """The loaded weights are verified: serve them as `version`."""
        self._version = version

    @torch.inference_mode()
    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """All answers of all requests. Raises WeightsError when no version is installed."""
        if self._version is None:
            raise WeightsError("the engine has no verified weights to sample from")
        if not requests:
            return []
        group_sizes = torch.tensor([request.seeds.size for request in requests])
        prompts, mask = self._left_padded(requests)
        cache = self._read_prompts(prompts, mask, group_sizes)
        sampler = SeededSampler(np.concatenate([r.seeds for r in requests]), self._max_new_tokens, self._temperature)
        rows = prompts.repeat_interleave(group_sizes.to(prompts.device), 0)
        output = self._model.generate(
            rows,
            attention_mask=mask.repeat_interleave(group_sizes.to(mask.device), 0),
            past_key_values=cache,
            generation_config=self._config,
            logits_processor=LogitsProcessorList([sampler]),
        )
        return self._split(output[:, prompts.shape[1] :].cpu(), torch.stack(sampler.logprobs, 1), group_sizes.tolist())

    def _left_padded(self, requests: Sequence[GenerationRequest]) -> tuple[Tensor, Tensor]:
        width = max(request.prompt_token_ids.size for request in requests)
        ids = np.full((len(requests), width), self._pad_id, dtype=np.int64)
        mask = np.zeros((len(requests), width), dtype=np.int64)
        for row, request in enumerate(requests):
            ids[row, width - request.prompt_token_ids.size :] = request.prompt_token_ids
            mask[row, width - request.prompt_token_ids.size :] = 1
        device = self._model.device
        return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)

    def _read_prompts(self, prompts: Tensor, mask: Tensor, group_sizes: Tensor) -> DynamicCache | None:
        """The cache of all prompt tokens but the last, repeated for the rows of each group."""
        if prompts.shape[1] < 2:
            return None
        cache = DynamicCache(config=self._model.config)
        positions = (mask.cumsum(-1) - 1).clamp_(min=0)
        self._model(
            input_ids=prompts[:, :-1],
            attention_mask=mask[:, :-1],
            position_ids=positions[:, :-1],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        index = torch.arange(len(prompts)).repeat_interleave(group_sizes).to(prompts.device)
        cache.batch_select_indices(index)
        return cache

    def _split(self, tokens: Tensor, logprobs: Tensor, group_sizes: list[int]) -> list[list[Generation]]:
        ended = torch.isin(tokens, self._eos_ids)
        finished = ended.any(1)
        lengths = torch.where(finished, ended.int().argmax(1) + 1, tokens.shape[1])
        version = self._version
        assert version is not None
        rows = [
            Generation(
                tokens[row, :length].numpy().astype(np.int32),
                logprobs[row, :length].numpy().astype(np.float32),
                [VersionSpan(length, version)],
                FinishReason.STOP if done else FinishReason.LENGTH,
            )
            for row, (length, done) in enumerate(zip(lengths.tolist(), finished.tolist(), strict=True))
        ]
        starts = np.cumsum([0, *group_sizes])
        return [rows[start:end] for start, end in itertools.pairwise(starts)]
