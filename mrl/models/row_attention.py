"""Attention of packed rows: no row sees another, and rows of one prompt share the prompt's cost.

A pass holds places: every prompt once, its answers after it. All that a model does place by place is done once per
place. Only in attention does every answer get its prompt back, and is attended to as the whole row that it is.
transformers calls this as any other attention (its `AttentionInterface`), for every family alike.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, groupby
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from mrl.errors import ModelFolderError
from mrl.models.varlen_attention import attend_at_once

Kernel = Literal["rows", "varlen"]
"""`rows`: one call for neighbouring rows of equal length, on any device; `varlen`: one call for all rows (see
`varlen_attention`)."""
NAMES: dict[Kernel, str] = {"rows": "mrl_rows", "varlen": "mrl_rows_varlen"}
"""Kernel -> its name in transformers."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Positions of the rows of a pass among its L places.

    All rows laid end to end, each with its prompt, take R >= L positions.
    """

    lengths: tuple[int, ...]
    """Tokens of each row, prompts included; their sum is R."""
    places_R: Tensor | None = None
    """The place of every position; None when no prompt is shared, and places and positions are the same."""
    positions_L: Tensor | None = None
    """For every place, one of its positions: the states of a shared prompt are the same in all of its rows."""

    @property
    def num_places(self) -> int:
        """L, the places of the pass."""
        return sum(self.lengths) if self.positions_L is None else len(self.positions_L)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(rows, length) of neighbouring rows of equal length, which are attended to in one call."""
        return [(len([*same]), length) for length, same in groupby(self.lengths)]

    def bounds_on(self, device: torch.device) -> Tensor:
        """Return [rows + 1] int32: where rows begin among the R positions, and where the last row ends."""
        return _bounds(self.lengths, device)

    def to(self, device: torch.device) -> "RowLayout":
        """Return the layout with its tensors on another device."""
        if self.places_R is None or self.positions_L is None:
            return self
        return RowLayout(self.lengths, self.places_R.to(device), self.positions_L.to(device))


class PlaceExchange(Protocol):
    """Exchange between C ranks that hold l of the L places of a pass each, and attend over all places with H / C heads
    each.
    """

    def by_heads(self, states_lHD: Tensor, num_places: int) -> Tensor:
        """Return [L, H / C, D] from [l, H, D]: this rank's heads at all places."""

    def by_places(self, states_LHD: Tensor) -> Tensor:
        """Return [l, H, D] from [L, H / C, D]: all heads at this rank's places."""


def use_row_attention(model: nn.Module, kernel: Kernel = "rows") -> None:
    """Let a model take `packed_rows`, a RowLayout given to its decoder; without it, every sequence is a row.

    No other mask is applied: sequences may be padded on the right alone. Raises ModelFolderError for a family whose
    attention transformers cannot exchange, or is in chunks, and for layers that carry a state along a row.
    """
    model.set_attn_implementation(NAMES[kernel])  # type: ignore[operator]
    text_config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    if getattr(text_config, "attention_chunk_size", None):
        raise _unknown(f"{type(model).__name__} with attention_chunk_size")
    if _implementation(model) != NAMES[kernel]:
        raise _unknown(type(model).__name__)
    if stateful := _stateful(model, text_config):
        raise ModelFolderError(
            "layers of this model carry a state from token to token, which would leak between the rows of a pass",
            got=f"{type(model).__name__} with {stateful}",
            wanted="causal attention in every layer",
            cure="use a model of another family",
        )


def _stateful(model: nn.Module, text_config: Any) -> str:
    """Return the names of parts that carry something along a row beside attention; "" where there are none."""
    kinds = {"linear_attention", "hybrid"} & set(getattr(text_config, "layer_types", None) or ())
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    layers = getattr(decoder, "layers", decoder)  # beside them a model of audio has convolutions of sound
    convolutions = {type(one).__name__ for one in layers.modules() if isinstance(one, nn.Conv1d)}
    return ", ".join(sorted(kinds | convolutions))


def _unknown(got: str) -> ModelFolderError:
    return ModelFolderError(
        "the attention of this model cannot be replaced",
        got=got,
        wanted="causal attention by transformers' attention interface, at most with sliding windows or a soft cap",
        cure="use a model of another family",
    )


def take(states: Tensor, places: Tensor) -> Tensor:
    """Return states[places], where places may come more than once: with the same bits in every backward pass.

    On a CPU only `index_select` adds up in a fixed order, whatever the threads; on a GPU only indexing does.
    """
    return states.index_select(0, places) if states.device.type == "cpu" else states[places]


@contextmanager
def attention_of_transformers(model: nn.Module) -> Iterator[None]:
    """Inside, which is for passes without gradient, use the attention and masks that the family comes with, however
    slow.
    """
    before = _implementation(model)
    model.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]


def _implementation(model: nn.Module) -> str:
    return model.config._attn_implementation  # type: ignore[union-attr, return-value]


def row_attention(
    module: nn.Module,
    query_NHLD: Tensor,
    key_NKLD: Tensor,
    value_NKLD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    packed_rows: RowLayout | None = None,
    place_exchange: PlaceExchange | None = None,
    kernel: Kernel = "rows",
    **others: Any,
) -> tuple[Tensor, None]:
    """Return causal attention within rows, [N, L, H, D]; K key-value heads serve H heads.

    `sliding_window` w lets a token see itself and the w - 1 tokens before it; `softcap` bounds the scores' size (Gemma
    2, arXiv 2408.00118, section 2). With a `place_exchange` the states are those of this rank's places. Raises
    ModelFolderError for attention with sinks, with a mask of the family's own, or with a window that is nowhere but in
    a mask.
    """
    hides_window = "sliding_window" not in others and getattr(getattr(module, "config", None), "sliding_window", None)
    if attention_mask is not None or others.get("s_aux") is not None or hides_window:
        raise _unknown(type(module).__name__)
    heads = _Heads(scaling, others.get("sliding_window"), softcap)
    if packed_rows is None:
        return heads.attend(query_NHLD, key_NKLD, value_NKLD).transpose(1, 2), None
    states_of = [states[0].transpose(0, 1) for states in (query_NHLD, key_NKLD, value_NKLD)]
    if place_exchange is not None:
        states_of = [place_exchange.by_heads(states, packed_rows.num_places) for states in states_of]
    query_RHD, key_RKD, value_RKD = (_end_to_end(states, packed_rows) for states in states_of)
    attend = heads.attend_at_once if kernel == "varlen" else heads.attend_by_length
    attended_RHD = attend(query_RHD, key_RKD, value_RKD, packed_rows)
    taken = attended_RHD if packed_rows.positions_L is None else take(attended_RHD, packed_rows.positions_L)
    if place_exchange is not None:
        taken = place_exchange.by_places(taken)
    return taken.unsqueeze(0), None


def register_row_attention(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda attention: attention,
) -> None:
    """Register row attention with transformers under the names of its kernels, with `wrap` around it."""
    for kernel, name in NAMES.items():
        AttentionInterface.register(name, wrap(partial(row_attention, kernel=kernel)))


register_row_attention()


@lru_cache(maxsize=4)
def _bounds(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return `RowLayout.bounds_on`, kept for all blocks of a model: a transfer to a GPU would have to be waited for."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _end_to_end(states_LHD: Tensor, layout: RowLayout) -> Tensor:
    """Return [R, H, D] states of the positions."""
    return states_LHD if layout.places_R is None else take(states_LHD, layout.places_R)


def _by_length(states_RHD: Tensor, runs: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return [rows, H, length, D] states of every run of rows of equal length."""
    parts: Sequence[Tensor] = states_RHD.split([count * length for count, length in runs])
    return [part.unflatten(0, run).transpose(1, 2) for part, run in zip(parts, runs, strict=True)]


@dataclass(frozen=True, slots=True)
class _Heads:
    scaling: float | None
    sliding_window: int | None
    softcap: float | None

    def attend_by_length(self, query_RHD: Tensor, key_RKD: Tensor, value_RKD: Tensor, layout: RowLayout) -> Tensor:
        """Return [R, H, D], with one call for each run of rows of equal length."""
        parts = (_by_length(states, layout.runs) for states in (query_RHD, key_RKD, value_RKD))
        attended = [self.attend(*rows).transpose(1, 2).flatten(0, 1) for rows in zip(*parts, strict=True)]
        return torch.cat(attended)

    def attend_at_once(self, query_RHD: Tensor, key_RKD: Tensor, value_RKD: Tensor, layout: RowLayout) -> Tensor:
        """Return [R, H, D], with one call for all rows."""
        return attend_at_once(
            query_RHD,
            key_RKD,
            value_RKD,
            layout.bounds_on(query_RHD.device),
            longest=max(layout.lengths),
            scaling=self.scaling,
            sliding_window=self.sliding_window,
        )

    def attend(self, query_NHLD: Tensor, key_NKLD: Tensor, value_NKLD: Tensor) -> Tensor:
        """Return [N, H, L, D], causal attention within sequences of equal length."""
        length = query_NHLD.shape[2]
        is_windowed = self.sliding_window is not None and self.sliding_window < length
        if self.softcap is not None:
            return self._attend_by_scores(query_NHLD, key_NKLD, value_NKLD)
        if not is_windowed:
            return functional.scaled_dot_product_attention(
                query_NHLD, key_NKLD, value_NKLD, is_causal=True, scale=self.scaling, enable_gqa=True
            )
        # Heads of their own for every query: with a mask, torch's fast kernels know no shared ones.
        key_NHLD, value_NHLD = (_of_every_head(states, query_NHLD) for states in (key_NKLD, value_NKLD))
        visible_LL = self._visible(length, query_NHLD.device)
        return functional.scaled_dot_product_attention(
            query_NHLD, key_NHLD, value_NHLD, attn_mask=visible_LL, scale=self.scaling
        )

    def _attend_by_scores(self, query_NHLD: Tensor, key_NKLD: Tensor, value_NKLD: Tensor) -> Tensor:
        """Attend with soft-capped scores, for which torch has no kernel."""
        assert self.softcap is not None
        key_NHLD, value_NHLD = (_of_every_head(states, query_NHLD) for states in (key_NKLD, value_NKLD))
        scale = query_NHLD.shape[-1] ** -0.5 if self.scaling is None else self.scaling
        scores_NHLL = self.softcap * torch.tanh(query_NHLD @ key_NHLD.mT * scale / self.softcap)
        unseen_LL = ~self._visible(query_NHLD.shape[2], query_NHLD.device)
        weights_NHLL = scores_NHLL.masked_fill(unseen_LL, -torch.inf).softmax(-1, dtype=torch.float32)
        return weights_NHLL.to(value_NHLD.dtype) @ value_NHLD

    def _visible(self, length: int, device: torch.device) -> Tensor:
        earlier_LL = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        return earlier_LL if self.sliding_window is None else earlier_LL.triu(1 - self.sliding_window)


def _of_every_head(states_NKLD: Tensor, query_NHLD: Tensor) -> Tensor:
    """Return [N, H, L, D] keys or values, repeated for every query head that shares them."""
    return states_NKLD.repeat_interleave(query_NHLD.shape[1] // states_NKLD.shape[1], 1)
