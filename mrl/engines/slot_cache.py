"""The key-value cache of continuous batching: transformers' cache classes over tensors that are never concatenated.

All rows write their newest token into the same column, so that a row of n tokens occupies the n columns up to that
column, as in a batch padded on the left. Any model that takes such a batch takes this cache, also with sliding windows.
Columns before the longest row are cut off. When the columns run out, the columns in use move to the front.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from mrl.errors import EngineError

KINDS = {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}
"""Layers of transformers that SlotLayer stands in for: they keep all keys and values, or those of a sliding window,
which here the attention mask cuts out."""

SPARE_COLUMNS = 64
"""Free columns, one for each step, that there are at least after the columns in use have moved."""


@dataclass(slots=True)
class Window:
    """The part of every layer's tensors that is in use: rows [0, rows) and columns [first, column)."""

    rows: int = 0
    first: int = 0
    column: int = 0
    """Column into which the next token of every row is written."""
    shape: tuple[int, int] = (0, 0)
    """Allocated (rows, columns)."""

    @property
    def width(self) -> int:
        """Number of columns in use."""
        return self.column - self.first


class SlotLayer(DynamicLayer):
    """[rows, heads, columns, head_dim] keys and values of one layer, written in place."""

    def __init__(self, window: Window) -> None:
        super().__init__()
        self._window = window

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values of one token of every row; return those of all columns in use, with that token."""
        window = self._window
        rows, end = slice(window.rows), window.column + 1
        keys, values = self._tensors_for(key_states, value_states)
        keys[rows, :, window.column : end] = key_states
        values[rows, :, window.column : end] = value_states
        return keys[rows, :, window.first : end], values[rows, :, window.first : end]

    def place(self, rows: Sequence[int], prompt_keys: Tensor, prompt_values: Tensor) -> None:
        """Write [heads, T, head_dim] keys and values of a prompt into each of the rows."""
        keys, values = self._tensors_for(prompt_keys[None], prompt_values[None])
        columns = slice(self._window.column - prompt_keys.shape[1], self._window.column)
        index = torch.tensor(rows, device=keys.device)
        keys[index, :, columns] = prompt_keys
        values[index, :, columns] = prompt_values

    def copied(self, row: int, columns: slice) -> tuple[Tensor, Tensor]:
        """Copies of the [heads, T, head_dim] keys and values of a row in use."""
        assert self.keys is not None is not self.values, "a row in use has keys and values"
        return self.keys[row, :, columns].clone(), self.values[row, :, columns].clone()

    def copy_row(self, source: int, target: int) -> None:
        """Copy the columns in use of one row to another."""
        columns = slice(self._window.first, self._window.column)
        for tensor in (self.keys, self.values):
            if tensor is not None:
                tensor[target, :, columns] = tensor[source, :, columns]

    def move(self, column: int, shape: tuple[int, int]) -> None:
        """Move the part in use so that it ends before `column`, into new tensors if `shape` (rows, columns) differs."""
        if self.keys is not None and self.values is not None:
            self.keys = self._moved(self.keys, column, shape)
            self.values = self._moved(self.values, column, shape)

    def get_seq_length(self) -> int:
        """Number of columns in use."""
        return self._window.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of columns that `update` returns, offset 0)."""
        return self._window.width + query_length, 0

    def _tensors_for(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Tensors of the layer, made to fit when these are its first keys and values."""
        if self.keys is None or self.values is None:
            self.keys, self.values = (self._empty(like, self._window.shape) for like in (keys, values))
            self.is_initialized = True
        return self.keys, self.values

    def _moved(self, old: Tensor, column: int, shape: tuple[int, int]) -> Tensor:
        window = self._window
        used = old[: window.rows, :, window.first : window.column]
        same = shape == window.shape
        new = old if same else self._empty(old, shape)
        # Within one tensor the two places may overlap.
        new[: window.rows, :, column - window.width : column] = used.clone() if same else used
        return new

    @staticmethod
    def _empty(like: Tensor, shape: tuple[int, int]) -> Tensor:
        """New tensor of zeros: a masked column has weight 0, and 0 times what lies in fresh memory may be NaN."""
        return like.new_zeros(shape[0], like.shape[1], shape[1], like.shape[3])


@dataclass(frozen=True, slots=True)
class PrefilledPrompt:
    """Keys and values of `num_tokens` tokens of a prompt: the last columns of one row of a batch."""

    layers: Sequence[tuple[Tensor, Tensor]]
    row: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CachedRow:
    """Keys and values of an answer that has ended, for its prompt and all sampled tokens but the last."""

    token_ids: npt.NDArray[np.int32]
    layers: Sequence[tuple[Tensor, Tensor]]
    """[heads, T, head_dim] keys and values of each layer."""

    def num_shared(self, token_ids: npt.NDArray[np.int32]) -> int:
        """Length of the common prefix of the row and these ids, in tokens."""
        shortest = min(self.token_ids.size, token_ids.size)
        differ = np.flatnonzero(self.token_ids[:shortest] != token_ids[:shortest])
        return int(differ[0]) if differ.size else shortest


class CachedRows:
    """Rows of conversations that wait for their next turn, by name; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._rows: OrderedDict[str, CachedRow] = OrderedDict()

    def keep(self, name: str, row: CachedRow) -> None:
        """Keep a row, in place of an earlier one of this name."""
        self.forget(name)
        self._rows[name] = row

    def find(self, name: str) -> CachedRow | None:
        """Return the row of this name, or None."""
        return self._rows.get(name)

    def forget(self, name: str) -> None:
        """Forget the row of this name, if there is one."""
        self._rows.pop(name, None)

    def leave_room(self, rows: int, tokens: int) -> None:
        """Forget the oldest rows until at most `rows` rows, and at most `tokens` tokens in all, are kept."""
        held = sum(row.token_ids.size for row in self._rows.values())
        while self._rows and (len(self._rows) > rows or held > tokens):
            _, gone = self._rows.popitem(last=False)
            held -= gone.token_ids.size

    def tensors(self) -> list[Tensor]:
        """Keys and values of all kept rows."""
        return [tensor for row in self._rows.values() for pair in row.layers for tensor in pair]


class SlotCache(Cache):
    """The cache of up to `max_rows` answers; rows in use are the first rows. Its tensors grow as they are needed."""

    def __init__(self, config: PreTrainedConfig, max_rows: int) -> None:
        """Raises EngineError for a model whose layers keep more than keys and values."""
        self._window, self._max_rows = Window(), max_rows
        self._starts = np.zeros(max_rows, dtype=np.int64)
        kinds = [type(layer) for layer in DynamicCache(config=config).layers]
        if strange := sorted({kind.__name__ for kind in kinds} - KINDS):
            raise EngineError(f"the embedded engine does not support {config.model_type}: its cache has {strange}")
        self._slots = [SlotLayer(self._window) for _ in kinds]
        super().__init__(layers=[*self._slots])

    @property
    def num_places(self) -> int:
        """Tokens for which the tensors have room: allocated rows times columns."""
        rows, columns = self._window.shape
        return rows * columns

    def tensors(self) -> list[Tensor]:
        """Keys and values of every layer that has any."""
        return [held for layer in self._slots for held in (layer.keys, layer.values) if held is not None]

    def mask(self, device: torch.device) -> Tensor:
        """[rows, columns] whether a column belongs to the row, with the column of its next token."""
        window = self._window
        columns = np.arange(window.first, window.column + 1)
        return torch.from_numpy(columns >= self._starts[: window.rows, None]).to(device)

    def place(self, prompt: PrefilledPrompt, rows: Sequence[int]) -> None:
        """Write a prompt into rows: rows in use, which it overwrites, or the next free rows behind them."""
        window = self._window
        self._reserve(max(window.rows, max(rows) + 1), prompt.num_tokens)
        if prompt.num_tokens:
            for layer, read in zip(self._slots, prompt.layers, strict=True):
                keys, values = (tensor[prompt.row, :, -prompt.num_tokens :] for tensor in read)
                layer.place(rows, keys, values)
        window.rows = max(window.rows, max(rows) + 1)
        self._starts[rows] = window.column - prompt.num_tokens
        self._cut()

    def copied(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """Copies of the [heads, T, head_dim] keys and values of a row, for every layer."""
        columns = slice(int(self._starts[row]), self._window.column)
        return [layer.copied(row, columns) for layer in self._slots]

    def drop(self, row: int) -> None:
        """Remove a row; the last row takes its place."""
        last = self._window.rows - 1
        if row != last:
            for layer in self._slots:
                layer.copy_row(last, row)
            self._starts[row] = self._starts[last]
        self._window.rows = last
        self._cut()

    def prepare(self) -> None:
        """Make room for the next token of every row."""
        self._reserve(self._window.rows, 0)

    def advance(self) -> None:
        """Note that the next token of every row has been written."""
        self._window.column += 1

    def _cut(self) -> None:
        window = self._window
        window.first = int(self._starts[: window.rows].min(initial=window.column))

    def _reserve(self, rows: int, columns_before: int) -> None:
        """Make room for `rows` rows, for the column of the next token, and for `columns_before` columns before it."""
        window = self._window
        allocated_rows, columns = window.shape
        if rows <= allocated_rows and columns_before <= window.column < columns:
            return
        column = max(window.width, columns_before)
        if rows > allocated_rows:
            allocated_rows = min(self._max_rows, max(rows, 2 * allocated_rows))
        if column + SPARE_COLUMNS > columns:
            columns = 2 * column + SPARE_COLUMNS
        shape = (allocated_rows, columns)
        for layer in self._slots:
            layer.move(column, shape)
        self._starts += column - window.column
        window.first, window.column, window.shape = column - window.width, column, shape
