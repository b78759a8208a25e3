"""Memory of a pass through the model, found by running the pass with tensors that have no data.

Passes over models of two and of three blocks show the need of one block, and so that of any number of blocks. Nothing
is known of the family beside its configuration: its own code runs, and the memory that the code allocates is counted.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mrl.config.policy_tables import LoraTable
from mrl.learner.activation_offload import OffloadedInputs, locked_bytes
from mrl.learner.forward import CHUNK_LOGITS, AnswerValues, ForwardSettings, answer_values
from mrl.learner.packing import COLUMNS, PackedBatch
from mrl.learner.sharding import checkpoint_blocks, transformer_blocks
from mrl.memory_plan.fake_context_group import FakeContextGroup
from mrl.models.number_formats import EmulatedPrecision, NumberFormat
from mrl.models.row_attention import RowLayout, use_row_attention
from mrl.models.scoring import beside_likeliest, last_logprobs, next_token_logprobs, rows_at_once
from mrl.models.size import Microbatch, PassPeaks
from mrl.models.skeleton import PreTrainedConfig, PreTrainedModel, once_per_model, skeleton

AWAY = torch.device("meta")
"""Device that stands for the host of a GPU, where offloaded inputs wait."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations made inside and that are still held."""

    def __init__(self, given: Iterable[Tensor] = ()) -> None:
        """Count nothing for the tensors that were `given`, or for views of them: a model's parameters and buffers."""
        super().__init__()
        self._bytes = self._peak = self.offloaded = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in given}

    def take_peak(self) -> int:
        """Return the most bytes at once since the last call."""
        peak, self._peak = self._peak, self._bytes
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the tensors that it returns."""
        made = _run(func, args, kwargs or {})
        for one in tree_leaves(made):
            if isinstance(one, Tensor) and one.device == AWAY:
                self.offloaded += locked_bytes(one.untyped_storage().nbytes())
            elif isinstance(one, Tensor):
                self._count(one.untyped_storage())
        self._peak = max(self._peak, self._bytes)
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            self._sizes[key] = size
            self._bytes += size
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self._bytes -= self._sizes.pop(key)


@once_per_model
def pass_peaks(
    config: PreTrainedConfig,
    *,
    precision: str,
    batch: Microbatch,
    with_entropy: bool = False,
    checkpointing: bool = False,
    offload: bool = False,
    lora: LoraTable | None = None,
    chunk_logits: int = CHUNK_LOGITS,
    context_parallel: int = 1,
) -> PassPeaks:
    """Return the peaks of one microbatch, whose head has `chunk_logits` logits at once in memory.

    Gradients of parameters count until they are added to the sum of earlier passes. With `offload` the inputs of
    checkpointed blocks are on another device. Where `context_parallel` ranks share a pass, `batch` is the part of one
    rank. Raises ModelFolderError as `skeleton`.
    """
    dtype = getattr(torch, precision)
    how = {"checkpointing": checkpointing, "offload": offload}
    context = FakeContextGroup(size=context_parallel) if context_parallel > 1 else None
    settings = ForwardSettings(1.0, chunk_logits=chunk_logits, context=context)
    two, three = (
        _traced(skeleton_of, batch, settings, with_entropy=with_entropy, **how)
        for skeleton_of in (partial(skeleton, config, blocks, dtype, lora) for blocks in (2, 3))
    )
    return two.extrapolated(three, config.num_hidden_layers - 3)


@once_per_model
def scoring_peak(
    config: PreTrainedConfig, *, dtype: str, rows: int, tokens: int, number_format: NumberFormat | None = None
) -> int:
    """Return the most bytes that scoring rows of `tokens` tokens needs at once, beyond parameters of type `dtype`.

    With a `number_format` it is a learner's scoring of a canary for engines in that format (`mrl.weights.canary`). No
    block keeps anything, so that two blocks need as much as many. Raises ModelFolderError as `skeleton`.
    """
    weights: NumberFormat | None = "float32" if number_format == "tf32" else number_format
    passes: list[tuple[int, AbstractContextManager[Any]]] = [(rows, nullcontext())]
    if number_format is not None and weights is not None:
        halved = EmulatedPrecision(number_format, weights=number_format)
        passes = [(rows, EmulatedPrecision("float32", weights=weights)), ((rows + 1) // 2, halved)]
    model = skeleton(config, 2, getattr(torch, dtype))
    with FakeTensorMode(), torch.no_grad():
        without_data(model)
        live, peaks = LiveBytes([*model.parameters(), *model.buffers()]), []
        for count, computing in passes:
            at_once = min(count, rows_at_once(tokens, config.vocab_size))
            with live, computing:
                next_token_logprobs(model, torch.zeros(at_once, tokens, dtype=torch.int64))
            peaks.append(live.take_peak())
    return max(peaks)


@once_per_model
def given_text_peak(config: PreTrainedConfig, *, dtype: str, tokens: int) -> int:
    """Return the most bytes that scoring one given text of `tokens` tokens needs, beyond parameters of type `dtype`.

    Raises ModelFolderError as `skeleton`.
    """
    return _peak_of_row(config, dtype, tokens, beside_likeliest)


@once_per_model
def answer_peak(config: PreTrainedConfig, *, dtype: str, prompt_tokens: int, answer_tokens: int) -> int:
    """Return the most bytes that scoring a peer's answer needs, after its prompt, in one forward."""
    count = answer_tokens
    score = partial(last_logprobs, count=count, temperature=1.0, max_logits=count * config.vocab_size)
    return _peak_of_row(config, dtype, prompt_tokens + count, score)


def _peak_of_row(
    config: PreTrainedConfig, dtype: str, tokens: int, score: Callable[[PreTrainedModel, Tensor], object]
) -> int:
    model = skeleton(config, 2, getattr(torch, dtype))
    with FakeTensorMode(), torch.no_grad():
        without_data(model)
        live = LiveBytes([*model.parameters(), *model.buffers()])
        with live:
            score(model, torch.zeros(1, tokens, dtype=torch.int64))
        return live.take_peak()


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation. For products of experts, torch 2.13 knows the result's shape in bfloat16
    alone.
    """
    if func is not torch.ops.aten._grouped_mm.default or not isinstance(args[0], FakeTensor):
        return func(*args, **kwargs)
    left, right = args[:2]
    ends = args[2] if len(args) > 2 else kwargs["offs"]
    groups = [len(ends)] if left.ndim == right.ndim else []
    return left.new_empty([*groups, left.shape[-2], right.shape[-1]])


def _traced(
    make_model: Callable[[], PreTrainedModel],
    batch: Microbatch,
    settings: ForwardSettings,
    *,
    with_entropy: bool,
    checkpointing: bool,
    offload: bool,
) -> PassPeaks:
    peaks: list[int] = []
    model = make_model()
    use_row_attention(model)
    with FakeTensorMode():
        without_data(model)
        for parameter in (one for one in model.parameters() if one.requires_grad):
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        blocks = transformer_blocks(model)
        if checkpointing:
            checkpoint_blocks(blocks, OffloadedInputs(AWAY) if offload else None)
        live = LiveBytes([*model.parameters(), *model.buffers()])

        def close_window(_gradient: Tensor | None = None) -> None:
            peaks.append(live.take_peak())

        _at_gradient(model.get_decoder(), close_window)
        _at_gradient(blocks[0], close_window)
        with live:
            packed = _rows_without_data(batch)
            loss = _sum_of(answer_values(model, packed, settings, with_entropy=with_entropy))
            close_window()
            loss.backward()
            close_window()
    forward, head, of_blocks, bottom = peaks
    return PassPeaks(forward, head, of_blocks, bottom, live.offloaded)


def _sum_of(values: AnswerValues) -> Tensor:
    loss = values.logprobs_T.sum()
    return loss if values.entropy_T is None else loss + values.entropy_T.sum()


def without_data(model: nn.Module) -> None:
    """Give a model of the meta device tensors of the CPU, in place, inside a FakeTensorMode; tied tensors stay tied."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor not in made:
                    like = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(like, tensor.requires_grad) if is_parameter else like
                if tensor is not None:
                    held[name] = made[tensor]  # type: ignore[assignment]


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _at_gradient(module: nn.Module, act: Callable[[Tensor], None]) -> None:
    """Have `act` called when the gradient of the module's output has been computed."""

    def watch(_module: nn.Module, _arguments: Any, output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        if hidden.requires_grad and hidden.grad_fn is not None:
            hidden.register_hook(act)

    module.register_forward_hook(watch)


def _rows_without_data(batch: Microbatch) -> PackedBatch:
    places_L = torch.zeros(batch.places, dtype=torch.int64)
    places_R = torch.zeros(batch.rows * batch.row_tokens, dtype=torch.int64)
    shared = (places_R, torch.zeros_like(places_L)) if len(places_L) < len(places_R) else ()
    layout = RowLayout((batch.row_tokens,) * batch.rows, *shared)
    columns = {name: torch.zeros(batch.rows * batch.answer_tokens, dtype=dtype) for name, dtype in COLUMNS.items()}
    return PackedBatch(input_ids_L=places_L, position_ids_L=torch.zeros_like(places_L), rows=layout, **columns)
