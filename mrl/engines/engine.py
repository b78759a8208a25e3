"""What every engine offers to a rollout worker."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

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
    finished: bool


@dataclass(frozen=True, slots=True)
class Installed:
    """What an update of the weights cost and how well the canary agreed."""

    version: Version
    gap_nats: float
    seconds: float


class Engine(Protocol):
    """An engine serves one version at a time and knows which."""

    @property
    def version(self) -> Version | None:
        """The version that is served, None before the first install."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """All answers of all requests, in the order of the requests."""

    def install(self, manifest_path: Path) -> Installed:
        """Serve the version of this manifest. Raises WeightsError, and serves nothing, when its canary fails."""
