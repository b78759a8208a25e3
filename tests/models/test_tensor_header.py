"""What the header of a file of weights tells, and the first numbers behind it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mrl.models.tensor_header import finer_than_bfloat16, read_header

TENTHS = torch.full((3, 2), 0.1)


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        ({"a": TENTHS.bfloat16(), "b": TENTHS}, "b"),
        ({"a": torch.cat([torch.zeros(3, 2), TENTHS]).half()}, "a"),
        ({"a": TENTHS.bfloat16()}, ""),
        ({"a": TENTHS.bfloat16().float(), "b": torch.ones(2, 2).half()}, ""),
        ({"inv_freq": torch.full((8,), 0.1), "empty": torch.zeros(0, 2)}, ""),
    ],
)
def test_weights_that_bfloat16_does_not_hold_are_found(tmp_path: Path, weights: dict[str, torch.Tensor], found: str):
    """By their numbers, whatever format these are saved in; vectors may be what a model computes."""
    file = tmp_path / "model.safetensors"
    save_file(weights, file)
    assert finer_than_bfloat16(file) == found
    assert read_header(file).num_elements == sum(tensor.numel() for tensor in weights.values())
    assert read_header(file).file_bytes == file.stat().st_size
