"""Adapters alone as a published version: a folder as peft writes it, and what says to which weights they belong."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from mrl.config.policy_tables import LoraTable
from mrl.models.lora import FILE, describe_adapters
from mrl.models.tensor_file import read_folder, write_tensors

OpenFile = Callable[[Path], AbstractContextManager[BinaryIO]]


class AdapterFormat:
    """How the adapters of one policy are published."""

    def __init__(self, table: LoraTable, model_folder: Path) -> None:
        """The policy's folder is read once. Raises WeightsError when it cannot be."""
        self._table, self._model_folder = table, model_folder
        self.base = read_folder(model_folder)
        """Name -> digest of the tensors below the adapters, which never change."""

    def write(self, folder: Path, adapters: Iterable[tuple[str, Tensor]], open_file: OpenFile) -> dict[str, str]:
        """Write adapters, named as in peft's files, into `folder`; returns name -> digest. Raises OSError."""
        tensors = {name: tensor.detach().cpu() for name, tensor in adapters}
        describe_adapters(folder, self._table, tensors, str(self._model_folder))
        with open_file(folder / FILE) as file:
            return write_tensors(file, tensors)
