"""Piece of a tensor that a rank holds: all of it, or some of its rows."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of a tensor, or the whole of it."""

    local: Tensor
    """Shares its memory with the tensor."""
    first_row: int
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    is_first_copy: bool
    """False where a rank before this one holds the same rows."""


def dcp_metadata(pieces: Mapping[str, Piece]) -> dict[str, str]:
    """Return the places of pieces in their tensors, as torch.distributed.checkpoint reads them in a file's header."""
    offsets = {
        name: {"saved_offsets": [piece.first_row, *[0] * (len(piece.shape) - 1)] if piece.shape else []}
        for name, piece in pieces.items()
    }
    return {"DCP_SHARDING_INFO": json.dumps(offsets)}


def held_piece(tensor: Tensor, rank: int) -> Piece:
    """Return this rank's piece of a tensor. Shards are consecutive rows, dealt as by `torch.chunk` (FSDP2's layout)."""
    if not isinstance(tensor, DTensor):
        return Piece(tensor.detach(), 0, tuple(tensor.shape), rank == 0)
    axes = dict(zip(tensor.placements, range(tensor.device_mesh.ndim), strict=True))
    assert axes.keys() <= {Replicate(), Shard(0)}, f"shards are rows, not {tensor.placements}"
    replica = tensor.device_mesh.get_local_rank(axes[Replicate()]) if Replicate() in axes else 0
    shard, num_shards = 0, 1
    if Shard(0) in axes:
        shard, num_shards = tensor.device_mesh.get_local_rank(axes[Shard(0)]), tensor.device_mesh.size(axes[Shard(0)])
    first_row = min(tensor.shape[0], shard * -(-tensor.shape[0] // num_shards)) if tensor.ndim else 0
    return Piece(tensor.to_local().detach(), first_row, tuple(tensor.shape), replica == 0)
