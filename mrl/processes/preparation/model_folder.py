"""Check a model folder before anything starts: whole files, an architecture that can be trained, a tokenizer, an EOS.

Only JSON, the headers of the weights, and the beginnings of some tensors are read, without torch. Loading would find
the same faults only after a minute, in a process of the run.
"""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.errors import ModelFolderError
from mrl.hub_names import download
from mrl.models.tensor_header import INDEX, WEIGHTS, finer_than_bfloat16, read_header
from mrl.tasks.jsonl_rows import relative_to

LFS_POINTER = b"version https://git-lfs"
LONGROPE, ORIGINAL = "longrope", "original_max_position_embeddings"
ENCODERS = frozenset(
    (*("bert", "roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "xlm-roberta", "camembert"),
     *("modernbert", "mpnet", "nomic_bert", "t5", "mt5", "umt5", "bart", "mbart", "pegasus", "clip", "siglip", "vit"))
)  # fmt: skip
"""Kinds of models (`model_type`) that write no text from left to right, whatever architecture config.json names."""
STATEFUL = frozenset(
    (*("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2"),
     *("lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_text"),
     *("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"),
     *("inkling_text", "inkling2_text", "lfm3", "qwen4_exp", "qwen4_exp_text", "zaya"))
)  # fmt: skip
"""Kinds of models with layers that carry a state from token to token; used where config.json lists no layer types."""
SINKS = frozenset(("gpt_oss", "mimo_v2_flash"))
"""Kinds of models whose attention has a sink."""
ATTENTION = frozenset(("attention", "full_attention", "sliding_attention"))
"""Kinds of layers that let a learner pack several rows into one pass."""
IN_CHUNKS = frozenset(("llama4", "llama4_text"))
WRITES_TEXT = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForImageTextToText")
"""Ends of the names of architectures that write text."""


def check_model_folder(
    folder: Path, *, key: str, source: str = "", anew: str = "", is_trained: bool = True, is_embedded: bool = False
) -> None:
    """Raises ModelFolderError unless `folder` holds a whole causal language model in Hugging Face form.

    A model that `is_trained` needs weights of 16 or 32 bits, and a kind whose rows a learner can pack. One that
    `is_embedded` has the embedded engine, which keeps no states of layers beside keys and values. The tokenizer is
    read as every process of the policy reads it, which refuses one that cannot be used (TokenizerRefused) and one that
    declares no EOS. `key` is the key of the configuration that names the folder, `anew` the command that fetches the
    folder again.
    """
    from mrl.alignment.receiver import load_receiver
    from mrl.alignment.tokenizer_folder import saving_command

    where = f"{key} = {str(folder)!r}"
    save = (
        "download the model into this folder, or save it there: in transformers, "
        f"model.save_pretrained({str(folder)!r}) and the same for its tokenizer"
    )
    anew = anew or (download(source, folder) if source else save)
    if not folder.is_dir():
        raise ModelFolderError(
            ("no such folder" if not folder.exists() else "not a folder") + relative_to(folder),
            where=where,
            wanted="a Hugging Face model folder",
            cure=anew,
        )
    _check_pointers(folder, where, anew)
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            cure = anew if source or name != "tokenizer.json" else saving_command(folder)
            raise ModelFolderError(f"{name} is missing", where=where, wanted="a Hugging Face model folder", cure=cure)
    described = read_described(folder, where)
    _check_architecture(described, where)
    if is_trained:
        _check_quantized(described, where)
        _check_rows(described, where)
    elif is_embedded:
        _check_states(described, where, key.removesuffix(".model"))
    for file in weight_files(folder, where, anew):
        _check_whole(file, where, anew)
    load_receiver(folder)


def read_described(folder: Path, where: str) -> Mapping[str, Any]:
    """Return the content of a folder's config.json. Raises ModelFolderError."""
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"config.json cannot be read ({error})", where=where) from None
    if not isinstance(described, dict) or "model_type" not in described:
        raise ModelFolderError("config.json has no model_type", where=where, wanted="a Hugging Face model folder")
    return described


def context_tokens(folder: Path) -> int:
    """Return the tokens that the model can read at once, by its config.json; 0 where that names no limit."""
    described = read_described(folder, str(folder))
    text = text_part(described)
    found = text.get("max_position_embeddings") or text.get("n_positions")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kinds = rope.get("rope_type"), rope.get("type")
    if LONGROPE in kinds or "short_factor" in rope:  # as in mrl.models.skeleton.most_positions
        found = text.get(ORIGINAL) or rope.get(ORIGINAL) or found
    return found if isinstance(found, int) else 0


def text_part(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json about the language model: all of it, or its own table beside those of images."""
    text = described.get("text_config")
    return text if isinstance(text, dict) else described


def weight_files(folder: Path, where: str, anew: str) -> list[Path]:
    """Return the files that hold the weights. Raises ModelFolderError where one is missing or none can be named."""
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
            files = [folder / str(name) for name in names]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"{INDEX} cannot be read"
            raise ModelFolderError(what, where=where, got=f"{type(error).__name__}: {error}", cure=anew) from None
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            what = f"{len(missing)} of {len(files)} weight files are missing"
            raise ModelFolderError(what, where=where, got=f"no {missing[0]}", wanted=f"all files of {INDEX}", cure=anew)
        return files
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    others = sorted(file.name for pattern in ("*.safetensors", "*.bin", "*.gguf") for file in folder.glob(pattern))
    cure = anew
    if others and not others[0].endswith(".safetensors"):
        cure = "save the model as safetensors (transformers: model.save_pretrained)"
    raise ModelFolderError(
        "no weights found",
        where=where,
        got=", ".join(others[:4]),
        wanted=f"{WEIGHTS}, or {INDEX} and its files",
        cure=cure,
    )


def check_below_adapters(folder: Path, *, key: str) -> None:
    """Raises ModelFolderError for weights that a learner with adapters would have to round to bfloat16.

    A model that also reads images or sound is not checked: its files hold more weights than a learner loads.
    """
    described = read_described(folder, key)
    for file in weight_files(folder, key, "") if text_part(described) is described else ():
        if name := finer_than_bfloat16(file):
            raise ModelFolderError(
                f"{key}.parameter_dtype: bfloat16 would round the weights under the adapters",
                where=str(file),
                got=f"{name} in a format with more precision than bfloat16",
                wanted="a model folder with bfloat16 weights",
                cure=f'set {key}.parameter_dtype = "float32"',
            )


def _check_pointers(folder: Path, where: str, anew: str) -> None:
    for file in sorted(folder.iterdir()):
        if file.suffix not in (".json", ".safetensors", ".model", ".jinja") or not file.is_file():
            continue
        with file.open("rb") as stream:
            if stream.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ModelFolderError(
                    f"{file.name} is a Git LFS pointer, not the file itself",
                    where=where,
                    got=f"{file.stat().st_size} bytes",
                    wanted="the content of the file",
                    cure=f"git -C {folder} lfs pull, or {anew}",
                )


def _check_whole(file: Path, where: str, anew: str) -> None:
    try:
        header = read_header(file)
    except (OSError, ValueError) as error:
        what, wanted = f"{file.name} is not a safetensors file", "a whole safetensors file"
        reason = " ".join(str(error).split())
        raise ModelFolderError(what, where=where, got=reason, wanted=wanted, cure=anew) from None
    if file.stat().st_size != header.file_bytes:
        found = file.stat().st_size
        what = f"{file.name} is " + ("truncated" if found < header.file_bytes else "longer than its header says")
        got, wanted = f"{found:,} bytes", f"{header.file_bytes:,} bytes, as its header says"
        raise ModelFolderError(what, where=where, got=got, wanted=wanted, cure=anew)


def _check_architecture(described: Mapping[str, Any], where: str) -> None:
    kind, named = str(described["model_type"]), described.get("architectures")
    architectures = [str(name) for name in named] if isinstance(named, list) else []
    auto_map = described.get("auto_map")
    if not _is_known(kind):
        if auto_map:
            raise ModelFolderError(
                "the model needs custom code, which mrl never runs",
                where=where,
                got=f"model_type {kind!r} with auto_map in config.json",
                wanted="an architecture that is part of transformers",
                cure="choose another model, or install a version of transformers that has this architecture",
            )
        raise ModelFolderError(
            "transformers does not know this architecture",
            where=where,
            got=f"model_type {kind!r}",
            wanted="an architecture of the installed transformers",
            cure="check config.json, or install a newer transformers",
        )
    if architectures and any(name.endswith(WRITES_TEXT) for name in architectures) and kind not in ENCODERS:
        _check_has_causal(kind, architectures, where)
        return
    if kind in ENCODERS or architectures:
        raise ModelFolderError(
            "the model is not a causal language model, so it cannot be a policy",
            where=where,
            got=", ".join(architectures) or f"model_type {kind!r}",
            wanted="a causal language model (...ForCausalLM in config.json)",
            cure="choose a causal language model",
        )


def _check_has_causal(kind: str, architectures: list[str], where: str) -> None:
    """Raises ModelFolderError for a model of images or sound without a causal language model in transformers.

    No learner can load such a model.
    """
    if architectures[0].endswith(("ForCausalLM", "LMHeadModel")):
        return
    from mrl.models.load_policy import has_causal_model

    if not has_causal_model(kind):
        raise ModelFolderError(
            "transformers has no text-only model for this architecture, and mrl trains no other",
            where=where,
            got=f"{architectures[0]} (model_type {kind!r})",
            wanted="a ...ForCausalLM in config.json",
            cure="choose a text-only release of this model, or another model",
        )


def _check_quantized(described: Mapping[str, Any], where: str) -> None:
    """Raises ModelFolderError for weights rounded to few bits: no learner trains or publishes such weights."""
    for part in (described, text_part(described)):
        for key in ("quantization_config", "compression_config"):
            if settings := part.get(key):
                method = settings.get("quant_method") if isinstance(settings, dict) else None
                raise ModelFolderError(
                    "the weights are quantized, and a learner trains only weights of 16 or 32 bits",
                    where=where,
                    got=f"{key} in config.json" + f": {method}" * bool(method),
                    wanted="a release of the model in bfloat16, float16 or float32",
                    cure="choose such a release, or save a dequantized copy of the model",
                )


def _check_rows(described: Mapping[str, Any], where: str) -> None:
    """Raises ModelFolderError for a kind of model whose rows would see one another in one pass of a learner."""
    kind, layers = str(described["model_type"]), text_part(described).get("layer_types")
    others = sorted(map(str, set(layers) - ATTENTION)) if isinstance(layers, list) else []
    why, teacher = "", "with frozen = true"
    if kind in IN_CHUNKS:
        why = "chunked attention"
    elif kind in SINKS:
        why = "attention sinks"
    elif others or (kind in STATEFUL and not isinstance(layers, list)):
        why = "layers that are neither full nor sliding-window attention"
        if kind in STATEFUL:
            why = "recurrent layers, whose state would leak between the rows that are packed into one pass"
        teacher += " and a server as its engine"
    if why:
        raise ModelFolderError(
            f"a learner cannot train this model: it has {why}",
            where=where,
            got=f"model_type {kind!r}" + f" with layers of {', '.join(others)}" * bool(others),
            wanted="full or sliding-window causal attention in every layer",
            cure=f"choose a model of another family, or use this one only as a teacher, {teacher}",
        )


def _check_states(described: Mapping[str, Any], where: str, policy: str) -> None:
    """Raises ModelFolderError for a kind of model with states that the embedded engine does not keep.

    `policy` is the key of the policy's table.
    """
    kind, layers = str(described["model_type"]), text_part(described).get("layer_types")
    if kind in STATEFUL and (not isinstance(layers, list) or set(layers) - ATTENTION):
        raise ModelFolderError(
            "the embedded engine cannot run this model: it has layers that carry a state from token to token",
            where=where,
            got=f"model_type {kind!r}",
            wanted="attention in every layer, or a server as its engine",
            cure=f'set {policy}.rollout.engine = "vllm" or "sglang"',
        )


def _is_known(model_type: str) -> bool:
    """Whether transformers has the architecture; its long list is loaded only if no folder of it has that name."""
    found = importlib.util.find_spec("transformers")
    package = Path(found.origin).parent if found is not None and found.origin is not None else None
    name = model_type.replace("-", "_")
    if package is not None and name.isidentifier() and (package / "models" / name).is_dir():
        return True
    from mrl.models.load_policy import knows_model_type

    return knows_model_type(model_type)
