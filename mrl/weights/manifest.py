"""Manifest of one published version: digests of its tensors, and the canary by which an engine proves it."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from mrl.errors import WeightsError, WeightsGone
from mrl.models.tensor_file import TensorShape
from mrl.records.version import Version

MANIFEST = "manifest.json"


class Canary(msgspec.Struct, frozen=True):
    """Texts in the policy's tokens, and the learner's log-probabilities in nats of these under this version.

    `logprobs[i]` scores `token_ids[i][1:]`, so it is one shorter; the other scores have the same shape.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    """The reference: weights in the engine's number format, arithmetic as exact as the learner's can be."""
    rounded: list[list[float]]
    """Scores by another kernel and in other batches, in the engine's number format: off as a healthy engine's are."""
    previous: list[list[float]] = []
    """As `logprobs`, under the version that was published before; empty where there is none to compare with."""
    previous_rounded: list[list[float]] = []
    """As `rounded`, under that version, for adapters in 16 bits, which keep less of a step than the reference."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One published version: this file in a Hugging Face folder, or alone where the tensors are broadcast."""

    policy: str
    version: Version
    tensors: dict[str, str]
    """Name -> XXH3-128 of the tensor's bytes, as `mrl.models.tensor_file.digest` gives it."""
    base: dict[str, str] = {}
    """Where `tensors` are adapters alone: digests of the policy's own folder, to whose weights they belong."""
    canary: Canary
    broadcast: list[TensorShape] = []
    """The tensors in the order in which they are broadcast; empty where they lie beside this file."""

    @property
    def served(self) -> dict[str, str]:
        """Digests of all tensors that an engine has to compute with."""
        return self.base | self.tensors


def read_manifest(path: Path) -> Manifest:
    """Read a manifest. Raises WeightsGone when it is missing, and WeightsError when it is malformed."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise WeightsGone(f"{path}: the manifest cannot be read: {error.strerror}") from error
    except OSError as error:
        raise WeightsError(f"{path}: the manifest cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise WeightsError(f"{path}: not a valid weight manifest: {error}") from error


def differing(manifest: Manifest, digests: Mapping[str, str]) -> list[str]:
    """Return the tensors whose digest differs from that in `digests`; a tensor that is missing there is not judged."""
    return [name for name, digest in manifest.served.items() if digests.get(name, digest) != digest]
