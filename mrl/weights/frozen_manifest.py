"""Manifest of a frozen policy: its own folder is the only version, published once and for all."""

from collections.abc import Sequence
from pathlib import Path

from mrl.models.load_policy import load_policy
from mrl.models.number_formats import NumberFormat
from mrl.models.tensor_file import read_folder
from mrl.records.version import Version
from mrl.weights.canary import make_canary
from mrl.weights.manifest import Manifest


def describe_folder(
    folder: Path,
    policy: str,
    version: Version,
    token_ids: Sequence[Sequence[int]],
    number_format: NumberFormat = "float32",
) -> Manifest:
    """Return the manifest that an engine serving this folder in `number_format` has to prove; texts scored on the CPU.

    The model is in memory meanwhile. Raises ModelFolderError, WeightsError.
    """
    canary = make_canary(load_policy(folder), token_ids, number_format)
    return Manifest(policy=policy, version=version, tensors=read_folder(folder), canary=canary)
