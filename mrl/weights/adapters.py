"""Adapters alone as a published version: a folder as peft writes it, and digests of the weights below them."""

from collections.abc import Iterable
from pathlib import Path

from mrl.config.policy_tables import LoraTable
from mrl.models.lora import describe_adapters
from mrl.models.tensor_file import read_folder


class AdapterFormat:
    """Format in which the adapters of one policy are published."""

    def __init__(self, table: LoraTable, model_folder: Path) -> None:
        """Read the policy's folder once. Raises WeightsError when it cannot be read."""
        self._table, self._model_folder = table, model_folder
        self.base = read_folder(model_folder)
        """Name -> digest of the tensors below the adapters, which never change."""

    def describe(self, folder: Path, names: Iterable[str]) -> None:
        """Write the files that peft reads beside adapters of these names. Raises OSError."""
        describe_adapters(folder, self._table, names, str(self._model_folder))
