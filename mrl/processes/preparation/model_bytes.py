"""How large the models of a configuration are, for limits that follow from it; one that is not there yet is guessed."""

import re
from pathlib import Path

from mrl.config.policy_tables import PolicyTable
from mrl.config.schema import RunConfig
from mrl.errors import UserError
from mrl.models.tensor_header import read_header
from mrl.processes.preparation.model_folder import weight_files

BYTES_PER_PARAMETER = 2
"""Of released weights."""


def named_parameters(policy: PolicyTable) -> int:
    """The number in the name of a policy's source ("8B"), or of its model, or 0."""
    found = re.search(r"(\d+(?:\.\d+)?)B\b", policy.source or policy.model)
    return int(float(found[1]) * 1e9) if found else 0


def parameters(config: RunConfig) -> dict[str, int]:
    """Policy -> parameters by the headers of its folder's weights, or by the name of its source; of made ones none."""
    return {name: _parameters(policy) for name, policy in config.policies.items()}


def _parameters(policy: PolicyTable) -> int:
    if not policy.model:
        return 0
    try:
        return sum(read_header(file).num_elements for file in weight_files(Path(policy.model), "", ""))
    except (UserError, OSError, ValueError):  # no such folder yet, or one that the check of folders refuses
        return named_parameters(policy)


def weights_bytes(config: RunConfig) -> dict[str, int]:
    """Policy -> bytes of the weights in its folder, or of one that its source names; made ones are small."""
    return {name: _weights_bytes(policy) for name, policy in config.policies.items()}


def _weights_bytes(policy: PolicyTable) -> int:
    if not policy.model:
        return 0
    here = sum(file.stat().st_size for file in Path(policy.model).glob("*.safetensors"))
    return here or BYTES_PER_PARAMETER * named_parameters(policy)
