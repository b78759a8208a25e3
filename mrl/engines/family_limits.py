"""Model families that a server computes otherwise than transformers, which learners use: refused at the start.

The canary would find each family, at the first version and after every new start; this check tells a person at once.
Seen on vLLM 0.32 and SGLang 0.5.23 by tests/engines/test_families.py.
"""

from pathlib import Path
from typing import Any

from mrl.engines.tensor_folder import tensor_names
from mrl.errors import EngineError
from mrl.models.size import equal_parts
from mrl.models.skeleton import PreTrainedConfig, published_names

WITHOUT_WINDOW = {"sglang": ("mistral", "phi3", "cohere2"), "vllm": ("cohere2",)}
"""Server -> families whose sliding window the server leaves out, or makes one token longer."""
OTHERWISE = {"sglang": ("gemma", "olmo3")}
"""Server -> families that the server computes otherwise: Gemma with the exact GELU; OLMo 3 was off by nats."""
UNTIED = {"sglang": ("mixtral", "qwen2_moe", "qwen3_moe")}
"""Server -> families whose head the server keeps apart; where the folder ties it to the embedding, nothing fills it."""
CURE = "choose another rollout.engine for this policy"


def check_family(server: str, folder: Path, config: PreTrainedConfig, *, device: str, context_tokens: int) -> None:
    """Raises EngineError for a model that the server computes otherwise than transformers."""
    window = getattr(config, "sliding_window", None)
    where, family = str(folder / "config.json"), config.model_type
    if family in WITHOUT_WINDOW[server] and window and window < context_tokens:
        raise EngineError(
            f"{server} does not apply the sliding window of {family} as transformers does",
            where=where,
            got=f"sliding_window {window} and {context_tokens} tokens of context",
            cure=f"set server.context_tokens <= {window}, or {CURE}",
        )
    if family in OTHERWISE.get(server, ()):
        raise EngineError(f"{server} computes {family} differently from transformers", where=where, cure=CURE)
    if family in UNTIED.get(server, ()) and config.tie_word_embeddings:
        raise EngineError(
            f"{server} does not tie the output head of {family} to the embedding",
            where=where,
            got="tie_word_embeddings true",
            cure=CURE,
        )
    if server == "sglang" and device == "cpu" and getattr(config, "attn_logit_softcapping", None):
        raise EngineError(f"sglang on a CPU does not apply the attention soft cap of {family}", where=where, cure=CURE)


def check_learning(server: str, folder: Path, config: PreTrainedConfig, *, device: str, adapters: bool) -> None:
    """Raises EngineError for a policy whose new weights the server cannot be given, or does not compute with.

    `adapters`: whether adapters alone are published, beside the folder's weights.
    """
    where = str(folder)
    if getattr(config, "kv_lora_rank", None):  # the products are no parameters, so a swap and digests pass over them
        raise EngineError(
            f"{server} cannot update the weights of latent attention: it keeps products of the old weights",
            where=where,
            got=f"{config.model_type}, kv_lora_rank {config.kv_lora_rank}",
            cure=CURE,
        )
    experts = [name for name in published_names(config) if ".experts." in name]
    if adapters and experts and device == "cpu":
        what = f"{server} on a CPU cannot serve adapters on a mixture of experts"
        raise EngineError(what, where=where, got=config.model_type, cure=f'set rollout.weights = "files", or {CURE}')
    odd = sorted({*experts} - tensor_names(folder)) if experts and not adapters else []
    if odd:
        raise EngineError(
            f"{server} cannot load the published experts: their names differ from those in the model folder",
            where=where,
            got=f"{odd[0]}, which is not in the folder",
            wanted="expert tensors as transformers' save_pretrained writes them",
            cure=CURE,
        )


def check_parts(server: str, where: str, described: Any, gpus: int) -> None:
    """Raises EngineError for a model that cannot be split into as many equal parts as its server has GPUs.

    `described` has the attributes of its config.json about the text part. Both servers split attention heads and the
    inner width into equal parts. Key-value heads are split, or several GPUs have the same key-value head.
    """
    heads = int(getattr(described, "num_attention_heads", None) or 1)
    cached = int(getattr(described, "num_key_value_heads", None) or heads)
    inner = int(getattr(described, "intermediate_size", None) or 0)
    fitting = [parts for parts in equal_parts(heads, cached) if not inner % parts]
    if gpus not in fitting:
        raise EngineError(
            f"{server} cannot split this model evenly over {gpus} GPUs",
            where=where,
            got=f"{gpus} GPUs for {heads} attention heads, {cached} key-value heads, intermediate_size {inner}",
            wanted=f"one of {', '.join(map(str, fitting))}",
            cure="set rollout.gpus to one of these numbers, or on leased units use units with that many GPUs",
        )
