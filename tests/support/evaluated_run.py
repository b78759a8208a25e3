"""Checkpoints of policies that nobody trained, for commands that read them."""

from pathlib import Path

import torch

from mrl.config.run_folder import RunFolder
from mrl.models.load_policy import load_policy
from mrl.models.parameters import named_weights
from mrl.weights.checkpoint_store import CheckpointStore
from mrl.weights.tensor_pieces import Piece
from mrl.weights.training_state import training_tensors


def checkpoint(folder: RunFolder, policy: str, model_folder: Path, step: int) -> None:
    """Write a checkpoint of the policy of `model_folder`, with other weights at every step."""
    model = load_policy(model_folder)
    with torch.no_grad():
        for tensor in named_weights(model).values():
            tensor.mul_(1 + step / 100)
    store = CheckpointStore(folder.checkpoints(policy), policy)
    tensors = training_tensors(model, torch.optim.AdamW(model.parameters()))
    pieces = {name: Piece(one, 0, tuple(one.shape), is_first_copy=True) for name, one in tensors.items()}
    store.write_pieces(step, pieces, rank=0, life=0)
    store.complete(step, b"{}", life=0)
