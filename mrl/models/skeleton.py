"""Policies without their weights: the configuration of a model, and models that have shapes and no data."""

import copy
import math
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from mrl.config.policy_tables import LoraTable, MakeTable, PolicyTable
from mrl.errors import ModelFolderError
from mrl.models.architectures import init_model
from mrl.models.lora import adapted_modules, add_adapters
from mrl.models.parameters import named_weights, released
from mrl.models.size import ModelSize

MIDDLING_BLOCKS, MIDDLING_HEAD_DIM = 24, 64
LONGROPE = "longrope"
"""Type of rotary embedding with two sets of frequencies, for short rows and for long ones (Phi 3 and Phi 4 mini)."""
ROTARY = r"rotary_emb\.inv_freq$"
"""Pattern of a weight that folders of long ago hold (Llama 2); the model computes it."""
_Asked = ParamSpec("_Asked")
_Found = TypeVar("_Found")


def once_per_model(
    find: Callable[Concatenate[PreTrainedConfig, _Asked], _Found],
) -> Callable[Concatenate[PreTrainedConfig, _Asked], _Found]:
    """Keep the results of a function of a model's configuration: a trace takes a second, and is asked for often."""
    known: dict[tuple[str, str | None, str], _Found] = {}

    @wraps(find)
    def found(config: PreTrainedConfig, *args: _Asked.args, **more: _Asked.kwargs) -> _Found:
        attention = config._attn_implementation  # not in its JSON
        key = config.to_json_string(use_diff=False), attention, repr((args, sorted(more.items())))
        if key not in known:
            known[key] = find(config, *args, **more)
        return known[key]

    return found


def config_of_folder(folder: Path) -> PreTrainedConfig:
    """Return the configuration of a folder's config.json. Raises ModelFolderError where transformers does not know or
    accept it.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except StrictDataclassError as error:  # its first line names the key, the last one also what is there
        raise _unusable(folder, str(error).splitlines()[-1].strip()) from error
    except (OSError, ValueError, KeyError) as error:
        raise _unusable(folder, str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    return config.get_text_config()


def _unusable(folder: Path, reason: str) -> ModelFolderError:
    return ModelFolderError("config.json cannot be used", where=str(folder), got=reason)


def head_dim(config: PreTrainedConfig) -> int:
    """Return the width of one attention head; where layers differ (Gemma 4), the largest."""
    widths = [getattr(layer, "head_dim", None) for layer in _layers(config)]
    return max((width for width in widths if width), default=0) or config.hidden_size // config.num_attention_heads


def most_cached_heads(config: PreTrainedConfig) -> int:
    """Return the heads of keys and values of a layer; where layers differ, the most."""
    heads: int = config.num_attention_heads
    return max(getattr(layer, "num_key_value_heads", None) or heads for layer in _layers(config))


def most_positions(config: PreTrainedConfig) -> int:
    """Return the most tokens that the model can read at once; a very large number where its configuration names no
    limit.

    With longrope, the limit is that of the first set of frequencies. For a longer row transformers turns all rows of
    its pass by the other set, and vLLM every row, short ones too, as soon as one may be longer.
    """
    most = getattr(config, "max_position_embeddings", None) or sys.maxsize
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == LONGROPE:
        return min(most, rope.get("original_max_position_embeddings") or most)
    return most


def _layers(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return the configuration of each layer, or one for all alike: where layers differ, transformers refuses to name a
    common value.
    """
    return list(config.per_layer_config) if config.is_heterogeneous else [config]


def episode_row_tokens(table: PolicyTable, config: PreTrainedConfig) -> int:
    """Return the most tokens of a prompt and its episode: as many as the engine can read, and a pass of the learner
    holds.
    """
    room = most_positions(config)
    if table.rollout.engine != "embedded":
        room = min(room, table.rollout.server.context_tokens)
    return room if table.frozen else min(room, table.learner.microbatch_tokens)


def config_of_recipe(recipe: MakeTable) -> PreTrainedConfig:
    """Return the configuration of the policy that a recipe makes."""
    with torch.device("meta"):
        return init_model(recipe, vocab_size=recipe.vocab_size, eos_id=0, pad_id=0).config


def config_of_number(parameters: int) -> PreTrainedConfig:
    """Return a middling transformer's configuration with about so many parameters, for a policy of which no more is
    known.
    """
    width = max(1, round(math.sqrt(parameters / 12 / MIDDLING_BLOCKS) / MIDDLING_HEAD_DIM)) * MIDDLING_HEAD_DIM
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=MIDDLING_BLOCKS,
        num_attention_heads=width // MIDDLING_HEAD_DIM,
    )


def skeleton(
    config: PreTrainedConfig, num_blocks: int, dtype: torch.dtype, lora: LoraTable | None = None
) -> PreTrainedModel:
    """Make the model of a configuration with `num_blocks` blocks, and adapters if any, all on the meta device.

    Raises ModelFolderError for a family that transformers has no causal language model of, and for a configuration that
    names something transformers does not have; as `add_adapters` for adapters that cannot be.
    """
    short: Any = copy.deepcopy(config)
    short.num_hidden_layers = num_blocks
    if getattr(short, "layer_types", None):  # a model may have fewer blocks than are asked for
        short.layer_types = (num_blocks * short.layer_types)[-num_blocks:]
    if num_blocks < config.num_hidden_layers and getattr(short, "num_kv_shared_layers", 0):
        short.num_kv_shared_layers = 0  # too few are left to share with: each counts with keys and values of its own
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                short, dtype=dtype, trust_remote_code=False
            ).eval()
    except KeyError as error:  # of rotary frequencies, say
        what, got = "config.json has a value that transformers does not support", config.model_type
        raise ModelFolderError(what, where=config.name_or_path or "", got=f"{error} of {got}") from error
    except ValueError as error:
        raise ModelFolderError("the model is not a causal language model", got=config.model_type) from error
    if lora is not None:
        add_adapters(model, lora, seed=0)
    return model


@once_per_model
def model_size(config: PreTrainedConfig, lora: LoraTable | None = None) -> ModelSize:
    """Count a model's parameters on skeletons of two and of three blocks; all further blocks are taken to be like the
    third.
    """
    two, three = (skeleton(config, blocks, torch.float32, lora) for blocks in (2, 3))
    (fewer, fewer_trained), (more, more_trained) = _counted(two), _counted(three)
    beyond = config.num_hidden_layers - 3
    heads, cached_heads = config.num_attention_heads, most_cached_heads(config)
    return ModelSize(
        parameters=more + beyond * (more - fewer),
        trained=more_trained + beyond * (more_trained - fewer_trained),
        block=more - fewer,
        num_blocks=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        cached_per_token=2 * config.num_hidden_layers * cached_heads * head_dim(config),
        query_heads_per_cached=heads // cached_heads,
        has_experts=any(parameter.ndim > 2 for parameter in three.parameters()),
        head=_own_head(three),
    )


def published_names(config: PreTrainedConfig) -> list[str]:
    """Return the names under which a learner publishes the weights. Raises as `skeleton`."""
    model = skeleton(config, config.num_hidden_layers, torch.float32)
    return [name for name, _ in released(model, named_weights(model).items())]


def ignored_weights(config: PreTrainedConfig) -> list[str]:
    """Return patterns of weight names that a folder of such a model may hold and transformers does not load.

    Raises as `skeleton`.
    """
    own = skeleton(config, 1, torch.float32)._keys_to_ignore_on_load_unexpected
    return [ROTARY, *(own or ())]


def adapted_layers(config: PreTrainedConfig, lora: LoraTable) -> tuple[str, ...]:
    """Return the last names of the layers that get an adapter. Raises as `skeleton`."""
    model = skeleton(config, config.num_hidden_layers, torch.float32, lora)
    return tuple(sorted({name.rpartition(".")[2] for name in adapted_modules(model)}))


def _own_head(model: PreTrainedModel) -> int:
    """Return the parameters that training changes in the head alone."""
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert isinstance(head, torch.Tensor)
    return head.numel() if head is not embedding and head.requires_grad else 0


def _counted(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of all parameters and of those that are trained."""
    trained = (parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return sum(parameter.numel() for parameter in model.parameters()), sum(trained)
