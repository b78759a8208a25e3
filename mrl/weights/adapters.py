"""Adapters alone as a published version: a folder as peft writes it, and what says to which weights they belong."""

from collections.abc import Iterable
from pathlib import Path

from mrl.config.policy_tables import LoraTable
from mrl.models.lora import describe_adapters
from mrl.models.tensor_file import read_folder


class AdapterFormat:
    """How the adapters of one policy are published."""

    def __init__(self, table: LoraTable, model_folder: Path) -> None:
        """The policy's folder is read once. Raises WeightsError when it cannot be."""
        self._table, self._model_folder = table, model_folder
        self.base = read_folder(model_folder)
        """Name -> digest of the tensors below the adapters, which never change."""

    def describe(self, folder: Path, names: Iterable[str]) -> None:
        """Write what peft reads beside adapters of these names. Raises OSError."""
        describe_adapters(folder, self._table, names, str(self._model_folder))
