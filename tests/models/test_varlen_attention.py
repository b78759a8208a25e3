"""Attention to rows of many lengths in one call. Its kernel is for GPUs: `tests/gpu` has it; here is a slow twin."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from mrl.errors import ConfigError
from mrl.models import varlen_attention
from mrl.models.row_attention import NAMES, RowLayout, row_attention, use_row_attention
from mrl.models.varlen_attention import attend_at_once, check_varlen

LENGTHS = (3, 1, 7, 7, 4)


def slow_varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What torch says of its kernel, token by token."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == max_k == int(cu_seq_q.diff().max())
    left, right = window_size
    shared = query.shape[1] // key.shape[1]
    assert enable_gqa or shared == 1
    scale = 1 / math.sqrt(query.shape[2]) if scale is None else scale
    attended = []
    for begin, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        for place in range(begin, end):
            first = begin if left < 0 else max(begin, place - left)
            last = end if right < 0 else min(end, place + right + 1)
            heads = []
            for head in range(query.shape[1]):
                scores = key[first:last, head // shared] @ query[place, head] * scale
                heads.append(scores.softmax(0) @ value[first:last, head // shared])
            attended.append(torch.stack(heads))
    return torch.stack(attended)


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow twin in the place of the kernel."""
    monkeypatch.setattr(varlen, "varlen_attn", slow_varlen_attn)


def states(heads: int, length: int, seed: int) -> Tensor:
    """[1, heads, length, 16]."""
    made = torch.randn(1, heads, length, 16, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_()


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize("sliding_window", [None, 1, 3, 5, 100])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_one_call_attends_to_what_a_call_per_length_attends_to(sliding_window, scaling):
    """Values and gradients, with shared key-value heads, with windows and without."""
    total, layout, found = sum(LENGTHS), RowLayout(LENGTHS), {}
    for kernel in NAMES:
        query, key, value = states(4, total, 0), states(2, total, 1), states(2, total, 2)
        attended, _ = row_attention(
            torch.nn.Module(), query, key, value, None,
            scaling=scaling, packed_rows=layout, kernel=kernel, sliding_window=sliding_window,
        )  # fmt: skip
        (attended * torch.linspace(0.5, 1.5, attended.numel()).view_as(attended)).sum().backward()
        found[kernel] = (attended, query.grad, key.grad, value.grad)

    for one, other in zip(*found.values(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.usefixtures("twin")
def test_shared_prompts_are_attended_to_in_every_row():
    """Two answers behind one prompt of two places: eight positions on six places."""
    layout = RowLayout((4, 4), torch.tensor([0, 1, 2, 3, 0, 1, 4, 5]), torch.tensor([0, 1, 2, 3, 6, 7]))
    parts = (states(2, 6, 0), states(2, 6, 1), states(2, 6, 2), None)
    rows, at_once = (
        row_attention(torch.nn.Module(), *parts, packed_rows=layout, kernel=kernel, sliding_window=None)[0]
        for kernel in NAMES
    )
    assert torch.allclose(rows, at_once, atol=1e-6)


@pytest.mark.usefixtures("twin")
def test_a_model_attends_by_the_kernel_that_it_was_told(tiny_model, monkeypatch):
    """One call for each layer, whatever the lengths; sequences that are not packed go another way."""
    calls = []
    slow = attend_at_once
    monkeypatch.setattr("mrl.models.row_attention.attend_at_once", lambda *a, **k: calls.append(a) or slow(*a, **k))
    model = tiny_model()
    use_row_attention(model, "varlen")
    ids = torch.arange(sum(LENGTHS))[None]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    packed = model.get_decoder()(ids, position_ids=positions, packed_rows=RowLayout(LENGTHS)).last_hidden_state[0]
    alone = [model.get_decoder()(row[None]).last_hidden_state[0] for row in ids[0].split(LENGTHS)]

    assert len(calls) == model.config.num_hidden_layers
    assert torch.allclose(packed, torch.cat(alone), atol=1e-5)


def test_torch_takes_what_it_is_given():
    """Its own rules for shapes and for what goes with what, forward and backward; the tensors have no data."""
    query, key, value = (
        torch.empty(22, heads, 64, device="meta", dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2)
    )
    bounds = torch.empty(6, device="meta", dtype=torch.int32)
    attended = attend_at_once(query, key, value, bounds, longest=7, scaling=None, sliding_window=4)
    attended.sum().backward()

    assert (attended.shape, attended.dtype) == (query.shape, torch.bfloat16)
    assert [state.grad.shape for state in (query, key, value)] == [state.shape for state in (query, key, value)]


@pytest.mark.parametrize(
    ("capability", "head_size", "softcap", "words"),
    [
        (
            None,
            64,
            None,
            "needs an Ampere GPU or a newer one; got 'a CPU'; wanted compute capability >= 8.0; cure: .*= \"rows\"",
        ),
        ((7, 5), 64, None, "needs an Ampere GPU or a newer one; got 'Some GPU'"),
        ((8, 0), 64, 50.0, "not support soft-capped scores; got 50.0"),
        ((9, 0), 320, None, "not support this head size; got 320; wanted a multiple of 8, 256 at most"),
        ((9, 0), 60, None, "not support this head size; got 60"),
    ],
)
def test_what_the_kernel_is_not_written_for_is_refused(monkeypatch, capability, head_size, softcap, words):
    """In one line with the cure."""
    monkeypatch.setattr(varlen_attention.torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(varlen_attention.torch.cuda, "get_device_name", lambda device: "Some GPU")
    device = torch.device("cpu" if capability is None else "cuda")
    with pytest.raises(ConfigError, match=words):
        check_varlen(device, head_size=head_size, softcap=softcap)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_what_the_kernel_is_written_for_passes(monkeypatch, capability):
    """From Ampere on."""
    monkeypatch.setattr(varlen_attention.torch.cuda, "get_device_capability", lambda device: capability)
    check_varlen(torch.device("cuda"), head_size=128, softcap=None)
