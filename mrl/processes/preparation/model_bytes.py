"""Sizes of a configuration's models, for limits that follow from them; a model that is not there yet is guessed."""

import re
from collections.abc import Iterator
from pathlib import Path

from mrl.config.policy_tables import PolicyTable
from mrl.config.schema import RunConfig
from mrl.errors import UserError
from mrl.models.tensor_header import files_of_weights, read_header
from mrl.processes.preparation.model_folder import weight_files

BYTES_PER_PARAMETER = 2
"""Bytes of a parameter in released weights."""


def named_parameters(policy: PolicyTable) -> int:
    """Return the number of parameters that the name of a policy's model tells ("8B", "135M"), or 0."""
    name = policy.source or Path(policy.model).name
    found = re.search(r"(?<![\w.])(\d+(?:\.\d+)?)([BM])\b", name, re.IGNORECASE)
    return int(float(found[1]) * (1e9 if found[2] in "Bb" else 1e6)) if found else 0


def parameters(config: RunConfig) -> dict[str, int]:
    """Return policy -> number of parameters, by the headers of its weights or by its model's name; 0 for made policies.

    A policy whose model is not there and whose name tells no size is left out.
    """
    found = {name: _parameters(policy) for name, policy in config.policies.items()}
    return {name: size for name, size in found.items() if size or not config.policies[name].model}


def size_notes(config: RunConfig) -> Iterator[str]:
    """Yield notes about the sizes of models that are not there yet."""
    known = parameters(config)
    for name, policy in config.policies.items():
        if name not in known:
            what = "learning rate, answer length, time limits and memory depend on it, so check again after the fetch"
            yield f"policies.{name}: the model is not here yet, and its name does not tell its size; {what}"
        elif policy.model and not Path(policy.model).exists():
            size = f"{known[name] / 1e9:g}B parameters"
            yield f"policies.{name}: the model is not here yet; assuming {size}, as its name says"


def _parameters(policy: PolicyTable) -> int:
    if not policy.model:
        return 0
    try:
        return sum(read_header(file).num_elements for file in weight_files(Path(policy.model), "", ""))
    except (UserError, OSError, ValueError):  # no such folder yet, or one that the check of folders refuses
        return named_parameters(policy)


def weights_bytes(config: RunConfig) -> dict[str, int]:
    """Return policy -> bytes of its weights, by its folder or its model's name; 0 for (small) made policies."""
    return {name: _weights_bytes(policy) for name, policy in config.policies.items()}


def _weights_bytes(policy: PolicyTable) -> int:
    if not policy.model:
        return 0
    here = sum(file.stat().st_size for file in files_of_weights(Path(policy.model)))
    return here or BYTES_PER_PARAMETER * named_parameters(policy)
