"""Engines that score otherwise than the learner does, and faults of the weights that they serve."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from canary_check.cases import Case
from canary_check.learner import Published
from torch import Tensor, nn

from mrl.engines.attached_adapters import AttachedAdapters
from mrl.engines.engine import Sampling
from mrl.engines.environment import engine_python
from mrl.engines.server_backend import Launch
from mrl.engines.server_engine import ServerEngine
from mrl.engines.server_timeouts import ServerTimeouts
from mrl.engines.vllm import VLLM
from mrl.models.load_policy import load_policy
from mrl.records.version import Version

Logits = Callable[[Any, Tensor], Tensor]
"""Function that gives a model's logits [N, L, V] for ids [N, L]."""


def plain(model: Any, ids: Tensor) -> Tensor:
    """Logits by torch's attention."""
    return model(input_ids=ids, use_cache=False).logits


def written_out(model: Any, ids: Tensor) -> Tensor:
    """Logits by transformers' own attention."""
    model.set_attn_implementation("eager")
    return plain(model, ids)


def fused(model: Any, ids: Tensor) -> Tensor:
    """Logits with the residual added and normed at once, as servers do: the norm sees the sum before it is rounded."""
    return _head(model, _fused(model, ids), torch.float32)


def fused_coarse_logits(model: Any, ids: Tensor) -> Tensor:
    """Logits as of `fused`, in the number format of the weights."""
    return _head(model, _fused(model, ids), model.dtype)


def _fused(model: Any, ids: Tensor) -> Tensor:
    decoder = model.model
    hidden = decoder.embed_tokens(ids)
    residual = torch.zeros_like(hidden)
    turns = decoder.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
    for layer in decoder.layers:
        hidden, residual = _add_and_norm(layer.input_layernorm, hidden, residual)
        hidden, _ = layer.self_attn(hidden, position_embeddings=turns, attention_mask=None)
        hidden, residual = _add_and_norm(layer.post_attention_layernorm, hidden, residual)
        hidden = layer.mlp(hidden)
    return _add_and_norm(decoder.norm, hidden, residual)[0]


def _add_and_norm(norm: Any, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    total = hidden.float() + residual.float()
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight.float()
    return normed.to(hidden.dtype), total.to(hidden.dtype)


def _head(model: Any, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return hidden.to(dtype) @ model.lm_head.weight.to(dtype).T


HEALTHY: dict[str, tuple[Logits, int]] = {
    "torch's attention": (plain, 64),
    "one text at a time": (plain, 1),
    "transformers' attention": (written_out, 7),
    "fused norms": (fused, 16),
    "fused norms, coarse logits": (fused_coarse_logits, 5),
}
"""Name of a healthy engine -> how it computes logits, and how many texts it scores at once."""

Tensors = dict[str, Tensor]


def stale(now: Tensors, before: Tensors) -> None:
    _keep(now, before, list(now))


def half(now: Tensors, before: Tensors) -> None:
    _keep(now, before, list(now)[1::2])


def late(now: Tensors, before: Tensors) -> None:
    layers = [name for name in now if ".layers." in name]
    _keep(now, before, layers[len(layers) // 2 :])


def swapped_queries(now: Tensors, before: Tensors) -> None:
    first, second = (f"model.layers.{layer}.self_attn.q_proj" for layer in (1, 2))
    _swap(now, first, second)


def gate_for_up(now: Tensors, before: Tensors) -> None:
    _swap(now, "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj")


FAULTS: dict[str, Callable[[Tensors, Tensors], None]] = {
    "stale": stale,
    "half": half,
    "late": late,
    "q swapped": swapped_queries,
    "gate / up": gate_for_up,
}


def _keep(now: Tensors, before: Tensors, names: Sequence[str]) -> None:
    for name in names:
        now[name].copy_(before[name])


def _swap(now: Tensors, first: str, second: str) -> None:
    """Swap the weights of two layers, or both factors of their adapters."""
    for name in [name for name in now if name.startswith(f"{first}.")]:
        other = second + name.removeprefix(first)
        kept = now[name].clone()
        now[name].copy_(now[other])
        now[other].copy_(kept)


class InProcess:
    """Engine for `install`, which loads folders, scores texts, and cannot give checksums of its weights."""

    def __init__(self, case: Case, start: Path, *, kind: str, fault: str = "") -> None:
        """Make an engine that computes as HEALTHY[kind].

        The fault is planted at the second load, into what was loaded: weights, or adapters over those of `start`.
        """
        self._dtype = getattr(torch, case.engine)
        self._logits, self._batch = HEALTHY[kind]
        self._fault = FAULTS.get(fault)
        self._model: nn.Module | None = None
        self._start = start
        self._adapters: tuple[AttachedAdapters, Tensors] | None = None
        self.version: Version | None = None

    def load(self, folder: Path, version: Version, digests: Mapping[str, str] | None = None) -> None:
        """Serve the weights of a folder in the engine's number format."""
        before, self._model = self._model, load_policy(folder, dtype=self._dtype)
        if before is not None and self._fault is not None:
            with torch.no_grad():
                self._fault(dict(self._model.named_parameters()), dict(before.named_parameters()))
        self.version = version

    def load_adapters(self, folder: Path, version: Version, digests: Mapping[str, str] | None = None) -> None:
        """Serve the adapters of a folder over the weights of `start`."""
        if self._adapters is None:
            self._model = load_policy(self._start, dtype=self._dtype)
            self._adapters = AttachedAdapters(self._model, self._start), {}
        attached, before = self._adapters
        adapters = attached.read(folder, digests)
        now = {
            f"{layer}.{place}": held.tensor
            for layer, factors in adapters.factors.items()
            for place, held in enumerate(factors)
        }
        kept = {name: tensor.clone() for name, tensor in now.items()}
        if before and self._fault is not None:
            self._fault(now, before)
        attached.attach(adapters)
        self._adapters, self.version = (attached, kept), version

    @torch.no_grad()
    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probabilities of each text's tokens but the first. Texts of one length share batches."""
        scored: dict[int, list[float]] = {}
        lengths = sorted({len(row) for row in token_ids})
        for length in lengths:
            places = [place for place, row in enumerate(token_ids) if len(row) == length]
            for start in range(0, len(places), self._batch):
                some = places[start : start + self._batch]
                ids = torch.tensor([token_ids[place] for place in some])
                logprobs = self._logits(self._model, ids)[:, :-1].float().log_softmax(-1)
                found = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1).tolist()
                scored |= dict(zip(some, found, strict=True))
        return [scored[place] for place in range(len(token_ids))]

    def checksums(self) -> None:
        """Return None, as a server does that somebody else started."""


class Untold(ServerEngine):
    """A real server whose checksums are not asked for."""

    def checksums(self) -> None:
        """See InProcess."""


def vllm_server(published: Published, folder: Path, closing: ExitStack) -> Untold:
    """Start vLLM in bfloat16 on the CPU, on the folder that the learner began with."""
    launch = Launch(
        engine_python("vllm", device="cpu"), published.start, "127.0.0.1", 0, "cpu", "bfloat16", 1, 16, 128, 0
    )
    bounds = ServerTimeouts(start_s=400.0, load_s=60.0)
    engine = Untold(VLLM(), Sampling(1.0, 8, (0,)), launch=launch, log=folder / "server.log", bounds=bounds)
    closing.callback(engine.close)
    return engine
