"""Placement and number format of a model's parameters: whole on every rank, or sharded block by block (FSDP2).

The ranks form a mesh of replicas x shards. Forward and backward gather one block at a time. Gradients are summed, never
averaged: every component of the loss is divided by a denominator of all ranks, which is known before (`loss`). The
shards of a replica lie on one host where `shard_size` does not say otherwise; then only gradients travel between hosts,
once for each update.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from mrl.config.policy_tables import LearnerTable
from mrl.errors import ConfigError, ModelFolderError
from mrl.learner.activation_offload import OffloadedInputs
from mrl.learner.forward import enter_by_answers
from mrl.learner.ranks.world import World
from mrl.models.compiled_blocks import compile_blocks
from mrl.models.load_policy import load_policy, policy_without_values
from mrl.models.row_attention import use_row_attention


def read_policy(folder: Path, table: LearnerTable, world: World) -> nn.Module:
    """Return the model that this rank brings to `place`: the policy of a folder, or, where the first rank deals out the
    values, its shapes alone.

    Raises ModelFolderError as `load_policy`.
    """
    return load_policy(folder) if world.is_first or table.num_shards == 1 else policy_without_values(folder)


def place(model: nn.Module, table: LearnerTable, world: World) -> nn.Module:
    """Put a model on the devices of all ranks, as its table says, ready for packed rows; changes it in place.

    Ranks with shards get the values of the first rank: the models of the others bring the same shapes alone.

    Raises ConfigError when the device lacks the number format or the host a compiler, ModelFolderError when the model
    has no known blocks, or an attention that cannot be exchanged, or adapters over weights that would be cut off.
    """
    use_row_attention(model, "varlen" if table.attention_kernel == "varlen" else "rows")
    if table.precision == "bfloat16" and world.device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        raise ConfigError(
            "learner.precision: this GPU does not support bfloat16",
            got=torch.cuda.get_device_name(world.device),
            cure='set learner.precision = "float32"',
        )
    if table.parameter_dtype == "bfloat16":
        _keep_in_bfloat16(model, has_values=world.is_first or table.num_shards == 1, has_adapters=bool(table.lora))
    # Parameters in another format than the arithmetic are converted block by block, as they are gathered.
    wrapped = table.sharding == "shard" or "bfloat16" in (table.precision, table.parameter_dtype)
    if not (wrapped or table.activation_checkpointing or table.compile):
        return nn.Module.to(model, world.device)
    blocks = transformer_blocks(model)
    if table.compile:
        compile_blocks(blocks)
    if table.activation_checkpointing:
        checkpoint_blocks(blocks, OffloadedInputs() if table.activation_offload else None)
    return _wrap(model, blocks, table, world) if wrapped else nn.Module.to(model, world.device)


def checkpoint_blocks(blocks: Sequence[nn.Module], offloaded: OffloadedInputs | None = None) -> None:
    """Have blocks keep only their inputs, on the device or `offloaded`, and run again in the backward pass."""
    for block in blocks:
        # Inside the gathering of the block's parameters, which the backward pass repeats before it runs this again.
        forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        block.forward = functools.partial(_with_hooks, offloaded, forward) if offloaded is not None else forward


def _with_hooks(offloaded: OffloadedInputs, forward: Callable[..., Any], *arguments: Any, **keys: Any) -> Any:
    with offloaded.hooks():
        return forward(*arguments, **keys)


def is_wrapped(model: nn.Module) -> bool:
    """Whether FSDP2 wraps the model: all ranks take part in every forward, and the backward pass sums gradients."""
    return isinstance(model, FSDPModule)


def sum_over_replicas(model: nn.Module, *, is_due: bool) -> None:
    """Have the next backward pass sum gradients over replicas too, or, until that is due, within each replica alone.

    The sum over replicas is due in the last pass of an update; gradients of the passes before are added to it.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(is_due)


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks, by the class that transformers names for the model's family."""
    names = getattr(model, "_no_split_modules", None) or ()
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise ModelFolderError(
            "the transformer blocks of this model are not known",
            got=type(model).__name__,
            cure='set learner.sharding = "replicate"',
        )
    return blocks


@torch.no_grad()
def _keep_in_bfloat16(model: nn.Module, *, has_values: bool, has_adapters: bool) -> None:
    """Round parameters to the nearest bfloat16, one by one; without values they get uninitialised memory.

    Adapters keep their format, as in peft. Of the weights below them nothing may be cut off: no update would bring it
    back, and engines and exports read these weights from their folder. Buffers stay as well.
    """
    for name, parameter in model.named_parameters():
        if has_adapters and parameter.requires_grad:
            continue
        kept = parameter.to(torch.bfloat16) if has_values else torch.empty_like(parameter, dtype=torch.bfloat16)
        if has_adapters and has_values and not torch.equal(kept.to(parameter.dtype), parameter):
            raise ModelFolderError(
                "learner.parameter_dtype: bfloat16 would round the weights under the adapters",
                got=f"{name} in a format with more precision than bfloat16",
                wanted="a model folder with bfloat16 weights",
                cure='set learner.parameter_dtype = "float32"',
            )
        parameter.data = kept


def _wrap(model: nn.Module, blocks: list[nn.Module], table: LearnerTable, world: World) -> nn.Module:
    compute = None if table.precision == table.parameter_dtype == "float32" else getattr(torch, table.precision)
    # The input of a block comes from such parameters and has their format; where it has another, that is meant.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = _mesh(table.num_shards, world)
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()} if world.is_first else {}
    for module in (*blocks, model):
        # The outermost part is resharded too: else its parameters stay gathered after a pass without gradient, and a
        # list of the model's parameters then has those copies in place of the shards.
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot sum what is multiplied before
            if table.parameter_dtype == "bfloat16":
                _sum_in_float32(module)
    if table.num_shards > 1:
        _fill_from_first(model, whole)
    enter_by_answers(model)
    return model


def _sum_in_float32(module: FSDPModule) -> None:
    """Keep gradients of bfloat16 parameters in float32, in which they are summed over ranks and passes.

    FSDP2 would round each pass's sum to the format of the parameters, and add the rounded sums: over many passes small
    ones are lost. torch 2.13 has no public switch for it (pytorch/pytorch#170648), though its parameters have one.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        trained = [one.sharded_param for one in group.fsdp_params if one.sharded_param.requires_grad]
        if all(parameter.dtype == torch.float32 for parameter in trained):
            continue
        for parameter in trained:
            parameter.grad_dtype = torch.float32
        group._init_mp_dtypes = functools.partial(_with_float32_sums, group, group._init_mp_dtypes)  # type: ignore[method-assign]


def _with_float32_sums(group: Any, decide: Callable[[], None]) -> None:
    decide()
    group._orig_dtype = torch.float32


@torch.no_grad()
def _fill_from_first(model: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Give every rank its shards of the first rank's values, tensor by tensor, so that few are whole at once."""
    _check_alike(model)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        value = whole[name] if whole else torch.empty(parameter.shape, dtype=parameter.dtype)
        shards = distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
        parameter.to_local().copy_(shards.to_local())
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def _check_alike(model: nn.Module) -> None:
    """Raises ModelFolderError on every rank when ranks differ in parameters.

    The weights that the first rank reads may have a head of its own where the shapes of config.json have a tied one.
    """
    shapes = repr([(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()])
    digest = int.from_bytes(hashlib.sha256(shapes.encode()).digest()[:7], "big")
    own = torch.tensor([digest], device=next(model.parameters()).device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    if len({int(one) for one in found}) > 1:
        raise ModelFolderError(
            "the weights do not have the names and shapes of config.json",
            wanted="a separate output head only with tie_word_embeddings = false",
            cure='correct config.json, or set learner.sharding = "replicate"',
        )


def _mesh(shards: int, world: World) -> DeviceMesh:
    """Return the mesh of replicas x shards; neighbouring ranks hold one replica. A lone process is a group of one."""
    if not dist.is_initialized():
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    replicas = world.size // shards
    if replicas == 1:
        return init_device_mesh(world.device.type, (shards,), mesh_dim_names=("shard",))
    mesh = init_device_mesh(world.device.type, (replicas, shards), mesh_dim_names=("replicate", "shard"))
    if world.patience is not None:
        # The groups of a mesh wait for ten minutes on NCCL, however long the first rank may take to write a version.
        for group in mesh.get_all_groups():
            _set_pg_timeout(world.patience, group)
    return mesh
