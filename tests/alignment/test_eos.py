"""Which ids end an own answer."""

import json
from pathlib import Path

import pytest

from mrl.alignment.tokenizer_file import read_tokenizer_file
from mrl.alignment.tokenizer_folder import find_eos
from mrl.errors import ModelFolderError


@pytest.fixture
def folder(folders, tmp_path) -> Path:
    """A folder with a tokenizer and no configuration."""
    (tmp_path / "tokenizer.json").write_bytes((folders["byte_level"] / "tokenizer.json").read_bytes())
    return tmp_path


def found(folder: Path, **files: object) -> tuple[int, ...]:
    """The EOS ids of the folder with these configuration files added."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return find_eos(folder, read_tokenizer_file(folder))


def test_files_are_asked_in_order(folder):
    """How answers are generated goes before how the model is built, and that before Mistral's parameters."""
    assert found(folder, params={"eos_token_id": 3}) == (3,)
    assert found(folder, config={"eos_token_id": 4}) == (4,)
    assert found(folder, generation_config={"eos_token_id": [5, 6]}) == (5, 6)
    assert found(folder, generation_config={"eos_token_id": None}) == (4,)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no EOS token is declared"),
        ({"tokenizer_config": {"eos_token": "<|nowhere|>"}}, "no EOS token is declared"),
        ({"config": {"eos_token_id": 123_456_789}}, r"not an id of the tokenizer; got 123456789"),
        ({"config": {"eos_token_id": [4, -1]}}, r"not an id of the tokenizer; got -1"),
    ],
)
def test_an_end_that_is_not_there_is_refused(folder, files, words):
    """One line that names the file and what is wrong."""
    with pytest.raises(ModelFolderError, match=words):
        found(folder, **files)
