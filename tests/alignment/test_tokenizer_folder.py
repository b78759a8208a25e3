"""The tokenizer of a model folder, and files that are none."""

import json

import pytest

from mrl.alignment.receiver import load_receiver
from mrl.alignment.tokenizer_file import read_tokenizer_file
from mrl.errors import ModelFolderError, TokenizerRefused


def test_a_file_of_a_folder_can_be_named_itself(folders):
    """With the ends that the folder declares."""
    folder = folders["byte_level"]
    named, whole = load_receiver(folder / "tokenizer.json"), load_receiver(folder)
    assert (named.fingerprint, named.eos_ids) == (whole.fingerprint, whole.eos_ids)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("listed", "given"), [(5, 0), (-300, 0)], ids=["behind a gap", "below the vocabulary's size"])
def test_an_added_token_that_is_numbered_anew_is_refused(folders, tmp_path, special, listed, given):
    """What the library would emit for the token is not what the file says: ids could be mistaken for others.

    `listed`, `given`: ids, counted from the one that follows the vocabulary.
    """
    content = json.loads((folders["byte_level"] / "tokenizer.json").read_text())
    own_id = content["added_tokens"][-1]["id"]
    content["added_tokens"][-1] |= {"id": own_id + listed, "special": special}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    ids = f"id {own_id + listed} in the file, id {own_id + given} from the library"
    with pytest.raises(
        TokenizerRefused, match=rf"tokenizer\.json: .*<thïnk>.* an id that differs .*{ids}.*cure: put the token"
    ):
        load_receiver(tmp_path)


def test_a_path_that_is_no_folder_says_so(tmp_path):
    """Whether there is a file or nothing; a name on the hub is the most likely mistake."""
    (tmp_path / "weights.bin").write_bytes(b"")
    for path, what in ((tmp_path / "weights.bin", "not a folder"), (tmp_path / "org" / "model", "no such folder")):
        with pytest.raises(ModelFolderError, match=rf"{path}: {what}; wanted a model folder.*cure: give the path of a"):
            load_receiver(path)


def test_folders_without_a_tokenizer_say_so(tmp_path):
    """One line with the command that writes it: of older files where there are some."""
    with pytest.raises(
        ModelFolderError, match=r"tokenizer\.json is missing.*pretrained\('THE BASE MODEL.*save_pretrained"
    ):
        load_receiver(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\n")
    with pytest.raises(ModelFolderError, match=rf"tokenizer\.json is missing.*pretrained\('{tmp_path}'\)\.save_pre"):
        load_receiver(tmp_path)


def test_a_model_that_is_no_object_is_one_clear_line(tmp_path):
    """A broken file is the person's mistake, told as one."""
    (tmp_path / "tokenizer.json").write_text('{"model": [1, 2]}')
    with pytest.raises(ModelFolderError, match="the tokenizer's model is not a JSON object; got 'list'"):
        read_tokenizer_file(tmp_path)
