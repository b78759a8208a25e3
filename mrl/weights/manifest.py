"""The manifest of one published version: what lies in the file, and how an engine proves that it serves it."""

from pathlib import Path

import msgspec

from mrl.errors import WeightsError
from mrl.records.version import Version


class Canary(msgspec.Struct, frozen=True):
    """Fixed token sequences and the learner's log-probabilities of their tokens under this version.

    `logprobs[i]` scores `token_ids[i][1:]`, so it is one shorter. `tolerance_nats` bounds the largest difference.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    tolerance_nats: float


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One published version."""

    policy: str
    version: Version
    file: str
    """Name of the safetensors file beside the manifest."""
    blake2b: str
    """Hex digest of the whole file."""
    canary: Canary


def read_manifest(path: Path) -> Manifest:
    """Read a manifest. Raises WeightsError when it is missing or malformed."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise WeightsError(f"{path}: the manifest cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise WeightsError(f"{path}: not a weight manifest: {error}") from error
