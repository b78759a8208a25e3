"""Safetensors files as a stream: the same files that the library writes and reads, and every broken one refused."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.errors import WeightsError
from mrl.models.tensor_file import _digest_by_way_of, digest, read_folder, read_tensors, write_tensors

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.tensor(7, dtype=torch.int64),
}


def raw_file(path: Path, header: dict, data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin: int, end: int, shape: list[int]) -> dict:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def test_the_library_reads_what_is_written_here(tmp_path):
    """Types, shapes and values, a tensor without dimensions included."""
    with (tmp_path / "x.safetensors").open("wb", buffering=0) as file:
        digests = write_tensors(file, TENSORS)

    found = load_file(tmp_path / "x.safetensors")
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
    )
    assert digests == {name: digest(tensor) for name, tensor in TENSORS.items()}


def test_what_the_library_writes_is_read_into_its_places(tmp_path):
    """With the same digests; what has no place is checked all the same."""
    save_file(TENSORS, tmp_path / "x.safetensors")
    places = {"a": torch.zeros(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16)}

    found = read_folder(tmp_path, lambda name, dtype, shape: places.get(name))

    assert found == {name: digest(tensor) for name, tensor in TENSORS.items()}
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in places.items())


@pytest.mark.parametrize("room_bytes", [1, 7, 24, 1000])
def test_what_comes_piece_by_piece_has_the_digest_of_the_whole(room_bytes: int) -> None:
    """As from a GPU; each piece is hashed once it is there."""
    waits = []
    for tensor in (*TENSORS.values(), TENSORS["a"].T, torch.empty(0, 4), torch.tensor([True, False])):
        waits.clear()
        room = torch.empty(room_bytes, dtype=torch.uint8)
        assert _digest_by_way_of(room, tensor, lambda: waits.append(1)) == digest(tensor)
        assert len(waits) == max(1, -(-tensor.nbytes // room_bytes))


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"a": entry(0, 8, [2])}, bytes(7), "truncated: 1 bytes are missing"),
        ({"a": entry(0, 8, [2])}, bytes(9), "longer than its header says"),
        ({"a": entry(0, 4, [2])}, bytes(4), "a has 4 bytes"),
        ({"a": entry(0, 8, [2]), "b": entry(12, 16, [1])}, bytes(16), "not stored contiguously"),
        ({"a": entry(4, 8, [1])}, bytes(8), "not stored contiguously"),
        ({"a": {"dtype": "F12", "shape": [1], "data_offsets": [0, 4]}}, bytes(4), "invalid safetensors header"),
        ([], b"", "invalid safetensors header"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, header, data, words):
    """Each in its own words; nothing is left half read under a right name."""
    path = raw_file(tmp_path / "x.safetensors", header, data)

    with pytest.raises(WeightsError, match=words):
        list(read_tensors(path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "invalid safetensors header: 0 bytes, too few for a header"),
        (b"12345", "invalid safetensors header: 5 bytes, too few for a header"),
        ((500).to_bytes(8, "little") + b"{", "invalid safetensors header: truncated within its header, after 9 bytes"),
        ((9).to_bytes(8, "little") + b"not found", "invalid safetensors header: its header is not JSON"),
    ],
)
def test_a_file_without_a_whole_header_is_refused_in_plain_words(tmp_path, content, words):
    """As a copy to another host leaves it that was cut off."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)

    with pytest.raises(WeightsError) as refused:
        list(read_tensors(path))

    assert str(refused.value) == f"{path}: {words}"


def test_an_empty_folder_has_no_weights(tmp_path):
    """And one that cannot be opened says why."""
    with pytest.raises(WeightsError, match="no \\*\\.safetensors"):
        read_folder(tmp_path)
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(WeightsError, match="cannot be read"):
        read_folder(tmp_path)
