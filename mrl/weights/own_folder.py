"""The manifest of a policy that nobody trains: its own folder is what was published, once and for all."""

from pathlib import Path
from typing import Any

from mrl.models.load import load_policy
from mrl.models.tensor_file import read_folder
from mrl.records.version import Version
from mrl.weights.canary import canary_sequences, make_canary
from mrl.weights.manifest import Manifest


def describe_folder(folder: Path, policy: str, version: Version) -> Manifest:
    """What an engine that serves this folder has to prove; its canary is that of transformers on the CPU, in float32.

    The model is in memory meanwhile. Raises ModelFolderError, WeightsError.
    """
    model = load_policy(folder)
    embedding: Any = model.get_input_embeddings()
    canary = make_canary(model, canary_sequences(embedding.weight.shape[0]))
    return Manifest(policy=policy, version=version, tensors=read_folder(folder), canary=canary)
