"""Low-rank adapters through peft: put into a model, switched off, merged, written (LoRA, arXiv 2106.09685).

    y = W x + alpha / rank * B A x        A [rank, in] random, B [out, rank] zero at the start; W is not trained

The model object stays the same; its adapted layers hold W as `base_layer` and have `lora_A` and `lora_B` beside it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mrl.config.policy_tables import LoraTable
from mrl.errors import ConfigError, MissingError, WeightsError
from mrl.hub_names import parse_name

ADAPTER = "default"
"""The name that peft gives the only adapter of a model."""
BASE, FIRST, SECOND = ".base_layer.", f".lora_A.{ADAPTER}.", f".lora_B.{ADAPTER}."
FILE = "adapter_model.safetensors"
WRAPPED = "base_model.model."
"""Prefix of the names in peft's files."""


def add_adapters(model: nn.Module, table: LoraTable, *, seed: int) -> None:
    """Put adapters into a model, in place, and freeze all else; equal seeds give equal adapters.

    torch's global generator is left as it was. Raises ConfigError for target modules that the model lacks, MissingError
    without peft.
    """
    try:
        from peft import inject_adapter_in_model
    except ImportError:
        raise MissingError(
            "the peft package is not installed", where="learner.lora", cure="pip install 'mrl[lora]'"
        ) from None
    layers = _linear_layers(model)
    linear = set(layers.values())
    if not set(table.target_modules) <= linear:  # peft is content when one of them is there
        raise ConfigError(
            "learner.lora.target_modules: the model has no linear layers of these names",
            got=", ".join(sorted(set(table.target_modules) - linear)),
            wanted="some of " + ", ".join(sorted(linear)),
        )
    targets = [name for name, last in layers.items() if last in (table.target_modules or linear)]
    # Where peft sees a mixture's configuration it also adapts experts, which are no layers, and cannot be merged here.
    without_config = nn.ModuleList([model])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(_peft_config(table, targets), without_config)


def is_adapter(name: str) -> bool:
    """Whether a weight of this name is part of an adapter."""
    return FIRST in name or SECOND in name


def name_without_adapter(name: str) -> str:
    """Return the name of a weight in the model without adapters."""
    return name.replace(BASE, ".")


def adapted_modules(model: nn.Module) -> dict[str, Any]:
    """Return name -> layer of the layers with an adapter."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def merged(
    model: nn.Module, name: str, weights: Mapping[str, Tensor], weight_OI: Tensor, whole: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return W + alpha / rank * B A for the weight of an adapted layer, and any other weight as it is.

    `whole` gathers a tensor from its shards.
    """
    module_name, _, kind = name.partition(BASE)
    if kind != "weight":
        return weight_OI
    first_RI, second_OR = (whole(weights[f"{module_name}{part}weight"]) for part in (FIRST, SECOND))
    layer: Any = model.get_submodule(module_name)
    return torch.addmm(weight_OI.to(second_OR.dtype), second_OR, first_RI, alpha=layer.scaling[ADAPTER])


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes as it did before it got adapters."""
    # peft's own switch also turns gradients off, of which a sharded model takes note once and for all.
    modules = adapted_modules(model).values()
    for module in modules:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module in modules:
            module._disable_adapters = False


def name_in_file(name: str) -> str:
    """Return the name of an adapter's weight in peft's files."""
    return WRAPPED + name.replace(f".{ADAPTER}.", ".")


def write_adapters(folder: Path, table: LoraTable, weights: Mapping[str, Tensor], model_name: str) -> None:
    """Write adapters as peft does, in a folder that peft, vLLM and SGLang load beside the model. Raises OSError.

    `model_name` is a folder, or ID or ID@REVISION of the hub.
    """
    folder.mkdir(parents=True)
    tensors = {name_in_file(name): tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    describe_adapters(folder, table, tensors, model_name)


def describe_adapters(folder: Path, table: LoraTable, names: Iterable[str], model_name: str) -> None:
    """Write the configuration that peft reads beside a file whose tensors have these names. Raises OSError."""
    targets = {name.rpartition(".lora_A.")[0].rpartition(".")[2] for name in names} - {""}
    described = _peft_config(table, sorted(targets))
    name = None if Path(model_name).exists() else parse_name(model_name)  # a folder of this machine may be called so
    described.base_model_name_or_path = name.id if name else model_name
    described.revision = (name.revision if name else "") or None
    described.inference_mode = True
    described.save_pretrained(folder)


def read_scale(folder: Path) -> float:
    """Return alpha / rank of written adapters. Raises WeightsError when the folder does not say it."""
    try:
        described = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        return float(described["lora_alpha"] / described["r"])
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise WeightsError(f"{folder}: cannot read adapter_config.json: {error}") from error


def _peft_config(table: LoraTable, targets: list[str]) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=table.rank,
        lora_alpha=table.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )


def _linear_layers(model: nn.Module) -> dict[str, str]:
    """Return name -> its last part, of the language model's linear layers.

    The head is left out, since the learner takes its weight as it is, and so are layers for images, which no row
    reaches.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    of_text = set(model.get_decoder().modules())  # type: ignore[operator]
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return {name: name.rpartition(".")[2] for name, module in layers if module in of_text and module is not head}
