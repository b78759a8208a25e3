"""Kinds of tokenizers that the checks go through, each loaded when first asked for."""

from collections.abc import Mapping
from pathlib import Path

from mrl.alignment.receiver import Receiver, load_receiver
from mrl.alignment.tokenizer_file import read_tokenizer_file
from mrl.errors import ModelFolderError

BYTE_LEVEL = ("byte_level", "byte_level_nfc", "byte_level_prefix_space")
METASPACE = ("metaspace", "metaspace_prepend", "metaspace_first", "metaspace_always")
PREFIXED = METASPACE[1:]
"""Kinds that write every text with one phantom space in front."""
KINDS = (*BYTE_LEVEL, *METASPACE)
ENDLESS, SILENT = "byte_level without an EOS", "byte_level whose EOS is the letter y"


class Receivers(dict[str, Receiver]):
    """Kind -> receiver. A kind that is refused fails the check that asked for it."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        super().__init__()
        self.folders = folders

    def __missing__(self, kind: str) -> Receiver:
        try:
            self[kind] = self._load(kind)
        except ModelFolderError as error:
            raise AssertionError(f"{kind} is refused: {error}") from error
        return self[kind]

    def _load(self, kind: str) -> Receiver:
        if kind in (ENDLESS, SILENT):
            plain = read_tokenizer_file(self.folders["byte_level"])
            eos_ids = () if kind == ENDLESS else (plain.content["model"]["vocab"]["y"],)
            return Receiver(plain, eos_ids=eos_ids)
        return load_receiver(self.folders[kind])


def load(folders: Mapping[str, Path]) -> Receivers:
    """Return the receivers that the checks use."""
    return Receivers(folders)


def usual(receivers: Receivers) -> dict[str, Receiver]:
    """One receiver per kind, in a fixed order."""
    return {kind: receivers[kind] for kind in KINDS}


def can_write(kind: str, text: str) -> bool:
    """Whether a policy with this kind of tokenizer can write the text: metaspace kinds have no metaspace character."""
    return not (kind in METASPACE and "\u2581" in text)
