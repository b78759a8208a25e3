"""Parameters and optimizer state as named tensors, and back into a model with any layout of ranks.

Names: "model/PARAMETER", "optimizer/STATE/PARAMETER".
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mrl.errors import CheckpointError
from mrl.models.lora import FIRST, SECOND
from mrl.models.parameters import trained_weights
from mrl.weights.checkpoint_store import Checkpoint
from mrl.weights.tensor_pieces import held_piece

MODEL, OPTIMIZER = "model/", "optimizer/"


def training_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return all weights that training changes, and the optimizer's state of them, as this rank holds them.

    For a model with adapters these are the adapters; the weights below them are those of its folder.
    """
    tensors = {MODEL + name: tensor for name, tensor in trained_weights(model).items()}
    for name, parameter in _trained_parameters(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{OPTIMIZER}{key}/{name}"] = torch.as_tensor(value)
    return tensors


def restore_training(model: nn.Module, optimizer: Optimizer, checkpoint: Checkpoint) -> None:
    """Fill this rank's part of model and optimizer from a checkpoint; hyperparameters stay those of `optimizer`.

    Raises CheckpointError when the checkpoint belongs to another model; nothing is changed then.
    """
    restore_weights(model, checkpoint)
    keys = {name.split("/")[1] for name in checkpoint.tensors if name.startswith(OPTIMIZER)}
    for name, parameter in _trained_parameters(model):
        saved = {key: full for key in keys if (full := f"{OPTIMIZER}{key}/{name}") in checkpoint.tensors}
        _restore_state(optimizer.state[parameter], parameter, saved, checkpoint)
    checkpoint.close()


@torch.no_grad()
def restore_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Fill this rank's part of the model alone. Raises CheckpointError as `restore_training` does."""
    weights = trained_weights(model)
    _check_same_model(weights, checkpoint)
    for name, tensor in weights.items():
        _fill(tensor, checkpoint, MODEL + name)


def saved_weights(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's weights in a checkpoint, one by one and whole, under their own names."""
    for name in checkpoint.tensors:
        if name.startswith(MODEL):
            yield name.removeprefix(MODEL), checkpoint.read(name)


def _trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the trained parameters with their names, in the order in which the optimizer has them."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _check_same_model(weights: dict[str, Tensor], checkpoint: Checkpoint) -> None:
    saved = {name.removeprefix(MODEL) for name in checkpoint.tensors if name.startswith(MODEL)}
    idle = _idle_adapters(saved - weights.keys(), checkpoint)
    if saved - idle != weights.keys():
        raise _other_model(checkpoint, f"different names {sorted((saved - idle) ^ weights.keys())[:5]}")
    for full_name in checkpoint.tensors:
        name, shape = full_name.partition("/")[2], checkpoint.shape(full_name)
        if full_name.startswith(OPTIMIZER):
            name = name.partition("/")[2]
        if name in idle:
            continue
        wanted = tuple(weights[name].shape) if name in weights else None
        if shape != wanted and not (full_name.startswith(OPTIMIZER) and shape == ()):
            raise _other_model(checkpoint, f"{full_name} has shape {shape}, wanted {wanted}")


def _idle_adapters(names: set[str], checkpoint: Checkpoint) -> set[str]:
    """Return the names that belong to adapters that add nothing, their second factor being zero.

    Of a model that also sees, earlier checkpoints have such adapters in layers that no row passes.
    """
    seconds = {name for name in names if SECOND in name and not checkpoint.read(MODEL + name).any()}
    return seconds | {name.replace(SECOND, FIRST) for name in seconds}


def _other_model(checkpoint: Checkpoint, what: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.folder}: is a checkpoint of another model: {what}; "
        "cure: restore the policy's model as it was when the run began, or start a new run (--clean)"
    )


@torch.no_grad()
def _restore_state(state: dict[str, Any], parameter: Tensor, saved: dict[str, str], checkpoint: Checkpoint) -> None:
    """Fill an optimizer's state of a parameter, `saved` under names: in its place, else beside the parameter."""
    for key, name in saved.items():
        if key not in state:
            is_scalar = checkpoint.shape(name) == ()
            state[key] = torch.zeros((), device=parameter.device) if is_scalar else torch.zeros_like(parameter)
        _fill(state[key], checkpoint, name)


def _fill(tensor: Tensor, checkpoint: Checkpoint, name: str) -> None:
    piece = held_piece(tensor, 0)
    piece.local.copy_(checkpoint.read(name, piece.first_row, len(piece.local) if piece.local.ndim else None))
