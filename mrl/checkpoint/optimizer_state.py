"""The state of a torch optimizer as named tensors, and back."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from mrl.errors import CheckpointError


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Every state tensor under "index/name", index counting parameters over all groups."""
    tensors: dict[str, Tensor] = {}
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            tensors[f"{index}/{name}"] = torch.as_tensor(value)
    return tensors


def restore_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put saved state tensors back; hyperparameters stay those of `optimizer`.

    Raises CheckpointError when the tensors belong to a model with other parameters.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, _, name = key.partition("/")
        shape = parameters[int(index)].shape if int(index) < len(parameters) else None
        if shape is None or (tensor.dim() > 0 and tensor.shape != shape):
            raise CheckpointError(f"optimizer state {key} has shape {tuple(tensor.shape)}, wanted {shape}")
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
