"""What every engine offers to a rollout worker."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mrl.records.finish import FinishReason
from mrl.records.version import Version, VersionSpan


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Sample `seeds.size` answers to one prompt."""

    prompt_token_ids: npt.NDArray[np.int32]
    seeds: npt.NDArray[np.uint64]
    """[G] one seed per answer."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled answer of T tokens."""

    token_ids: npt.NDArray[np.int32]
    """[T], EOS included when `finished`."""
    logprobs: npt.NDArray[np.float32]
    """[T] of the sampling distribution, in nats."""
    versions: list[VersionSpan]
    finish_reason: FinishReason

    @property
    def finished(self) -> bool:
        """Whether the policy ended the answer itself."""
        return self.finish_reason is FinishReason.STOP


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """Say what these answers to a prompt are worth to the policy."""

    prompt_token_ids: npt.NDArray[np.int32]
    answers: Sequence[npt.NDArray[np.int32]]
    """[T] token ids of each, none empty."""


class Engine(Protocol):
    """An engine serves one version at a time and knows which."""

    @property
    def version(self) -> Version | None:
        """The version that is served; None before the first release and from a load until the release after it."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """All answers of all requests, in the order of the requests. Raises WeightsError when nothing is served."""

    def load(self, weights: dict[str, Tensor]) -> None:
        """Take over a whole set of weights. Raises WeightsError, changing nothing, when they do not fit."""

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities in nats of every token after the first under the loaded weights, at temperature 1."""

    def score_answers(self, request: ScoringRequest) -> list[npt.NDArray[np.float32]]:
        """[T] log-probabilities in nats of the tokens of each answer, at the sampling temperature.

        Equal requests to equal weights give equal bits. Raises WeightsError when nothing is served.
        """

    def release(self, version: Version) -> None:
        """The loaded weights are verified: serve them as `version`."""
