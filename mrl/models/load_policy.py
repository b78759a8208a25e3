"""Loading of a Hugging Face folder as a causal language model and a tokenizer; an error of one line says why it fails.

Nothing is ever fetched: a policy is a local folder.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights
from transformers.utils import logging

from mrl.alignment.tokenizer_folder import saving_command
from mrl.errors import ModelFolderError
from mrl.models.device_memory import PLAN, check_device, enough_memory, lacks_memory
from mrl.models.parameters import named_weights, parts_of

REMAKE = "`mrl policies make CONFIG` makes policies that have a recipe, `mrl fetch CONFIG` downloads models of the hub"
REPAIR = "download the folder again, or correct its config.json"
SAVE = "download the folder again, or save the model there (transformers: model.save_pretrained)"


def load_policy(folder: Path, device: str = "cpu", *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the model of a folder on `device`, in evaluation mode.

    Raises ModelFolderError when the folder is missing or unusable, DeviceError where the device is missing or lacks
    memory.
    """
    check_folder(folder)
    check_device(device)
    with enough_memory(
        "while loading the model", where=str(folder), cure=f"use a smaller model or more memory; {PLAN}"
    ):
        model = _loaded(folder, dtype)
        torch.nn.Module.to(model, device)
        return model.eval()


def _loaded(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if lacks_memory(error):
            raise
        raise _unusable("the model cannot be loaded", folder, error) from error
    model: PreTrainedModel
    model, loading = loaded
    if loading["missing_keys"]:  # transformers fills them with random numbers
        raise ModelFolderError(
            "the model folder lacks weights",
            where=str(folder),
            got=f"no weights for {', '.join(sorted(loading['missing_keys'])[:3])}",
            wanted="weights for every layer that config.json names",
            cure=REPAIR,
        )
    model.__dict__.pop("_weight_conversions", None)  # weights are published by names that ranks without the folder know
    _leave_file(model)
    return model


def _leave_file(model: PreTrainedModel) -> None:
    """Copy tensors that lie in the mapped file: experts are joined outside of it, but it stays in memory while another
    tensor lies in it.
    """
    weights = named_weights(model)
    apart = [tensor for name, tensor in weights.items() if len(parts_of(model, name, tensor)) == 1]
    for tensor in apart if len(apart) < len(weights) else ():
        tensor.data = tensor.data.clone()


def policy_without_values(folder: Path) -> PreTrainedModel:
    """Make the model that `load_policy` gives, without its values: its memory was never written to, and so takes no
    room.

    For a rank that is given its shards by another rank. Raises ModelFolderError as `load_policy`.
    """
    check_folder(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with no_init_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError) as error:
        raise _unusable("the model cannot be built", folder, error) from error
    model.tie_weights()
    return model.eval()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder. Raises ModelFolderError when it is missing or unusable."""
    check_folder(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        wanted = "a tokenizer that transformers can load"
        cure = "download the folder again, or save the tokenizer there (transformers: tokenizer.save_pretrained)"
        raise _unusable("the tokenizer cannot be loaded", folder, error, wanted=wanted, cure=cure) from error


def knows_model_type(model_type: str) -> bool:
    """Whether transformers itself has models of this type, without code from a folder."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def has_causal_model(model_type: str) -> bool:
    """Whether transformers has a causal language model of this type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def check_folder(folder: Path) -> None:
    """Raises ModelFolderError unless `folder` is a folder with a config.json, weights and a tokenizer."""
    where = str(folder)
    if not folder.is_dir():
        raise ModelFolderError("the model folder is missing", where=where, wanted="a Hugging Face folder", cure=REMAKE)
    if not any(folder.glob("*.safetensors")):
        raise ModelFolderError("the model folder has no weights", where=where, wanted="*.safetensors", cure=SAVE)
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            cure = SAVE if name == "config.json" else saving_command(folder)
            raise ModelFolderError("the model folder is incomplete", where=where, wanted=name, cure=cure)


def _unusable(
    what: str, folder: Path, error: Exception, *, wanted: str = "a causal language model", cure: str = REPAIR
) -> ModelFolderError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ModelFolderError(what, where=str(folder), got=reason, wanted=wanted, cure=cure)
