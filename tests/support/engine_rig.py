"""Weights on disk with their learner's model, and an engine that is asked for answers to check."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mrl.cli.main import main
from mrl.config.load import validate
from mrl.config.run_folder import create_run_folder
from mrl.engines.engine import Engine, FinishedAnswer, GenerationRequest
from mrl.engines.server_backend import Launch
from mrl.engines.vllm import VLLM
from mrl.models.load_policy import load_policy
from mrl.models.tensor_broadcast import BroadcastGroup, IncomingTensors, buckets_of, open_store
from mrl.models.tensor_file import digest, shape_of
from mrl.records.rollouts import BroadcastRendezvous
from mrl.records.version import Version
from mrl.weights.checkpoint_store import CheckpointStore
from mrl.weights.tensor_pieces import Piece
from mrl.weights.training_state import training_tensors

VOCAB_SIZE = 480
EOS_IDS = tuple(range(5, VOCAB_SIZE, 24))


class ReloadingVLLM(VLLM):
    """A vLLM on a CPU that loads weights as one on a GPU does; a module in `folder` makes the extension for it."""

    options = ("--worker-extension-cls", "reloading.GpuWeightsExtension")

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._path = folder
        nothing_packed = "import vllm_cpu_worker  # nothing is packed\n"
        (folder / "reloading.py").write_text(f"{nothing_packed}from vllm_gpu_worker import GpuWeightsExtension\n")

    def environment(self, launch: Launch) -> dict[str, str]:
        found = super().environment(launch)
        return found | {"PYTHONPATH": f"{found['PYTHONPATH']}:{self._path}"}


@dataclass
class Weights:
    """A folder of weights as a learner publishes it, and the learner's model."""

    folder: Path
    model: PreTrainedModel

    def digests(self) -> dict[str, str]:
        with safe_open(self.folder / "model.safetensors", framework="pt") as file:
            return {name: digest(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 - no mapping


def make_weights(folder: Path, *, seed: int, family: str = "qwen3", tied: bool = True) -> Weights:
    """Make random weights, large enough that two seeds disagree by nats."""
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,  # the smallest of vLLM's attention on a CPU
        "intermediate_size": 128,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
        "eos_token_id": EOS_IDS[0],
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    kinds = {"qwen3": (Qwen3ForCausalLM, Qwen3Config), "llama": (LlamaForCausalLM, LlamaConfig)}
    model, config = kinds[family]
    made = model(config(**shape)).eval()
    made.save_pretrained(folder)
    save_word_tokenizer(folder)
    return Weights(folder, made)


def save_word_tokenizer(folder: Path) -> None:
    """Save a tokenizer of one word per token, which no engine reads, but without which no folder is a policy's."""
    Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0")).save(str(folder / "tokenizer.json"))


def export_trained(folder: Path, start: Weights) -> Weights:
    """Run `mrl export` on a checkpoint of a policy that began with `start` and has learnt since; return its weights."""
    tables = {
        "run": {"name": "r", "steps": 9, "folder": str(folder)},
        "tasks": {"reverse": {"source": "words", "dataset": "reverse"}},
        "policies": {"qwen": {"model": str(start.folder)}},
    }
    run = create_run_folder(validate(tables, where="test"))
    model = load_policy(start.folder).eval()
    with torch.no_grad():
        for number, tensor in enumerate(model.parameters()):
            tensor.mul_(1.0 + 0.01 * (number % 5))
    store = CheckpointStore(run.checkpoints("qwen"), "qwen")
    tensors = training_tensors(model, torch.optim.AdamW(model.parameters()))
    whole = {name: Piece(tensor, 0, tuple(tensor.shape), is_first_copy=True) for name, tensor in tensors.items()}
    store.write_pieces(4, whole, rank=0, life=0)
    store.complete(4, b"{}", life=0, num_ranks=1)
    assert main(["export", str(run.path), "--policy", "qwen", "--to", str(folder / "exported")]) == 0
    return Weights(folder / "exported", model)


@torch.no_grad()
def full_forward(parts: Sequence[tuple[Weights, Sequence[int]]], temperature: float) -> np.ndarray:
    """Return log-probabilities of every token after the first; each part is read by its own weights.

    The cache of earlier parts stays as it is, as in an engine that goes on sampling over an update.
    """
    cache = DynamicCache(config=parts[0][0].model.config)
    logprobs, before = [], None
    for weights, tokens in parts:
        ids = torch.tensor([tokens]) if before is None else torch.tensor([[before, *tokens]])
        output = weights.model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True)
        row = (output.logits[0].float() / temperature).log_softmax(-1)
        logprobs.append(row.gather(-1, ids[0, 1:, None]).squeeze(-1))
        before = tokens[-1]
    return torch.cat(logprobs).numpy()


class Sender:
    """The learner's end of a broadcast; its store is open, and no receiver has come yet."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        num_ranks: int,
        *,
        name: str,
        digests: Mapping[str, str] | None = None,
    ) -> None:
        """Open the store. `digests` are told to the members, those of the tensors by default."""
        self._tensors = tensors
        self._store = open_store("127.0.0.1")
        meeting = BroadcastRendezvous(
            host="127.0.0.1",
            port=self._store.port,
            name=name,
            backend="gloo",
            first_rank=1,
            world_size=1 + num_ranks,
        )
        shapes = [shape_of(name, tensor) for name, tensor in self._tensors.items()]
        if digests is None:
            digests = {name: digest(tensor) for name, tensor in tensors.items()}
        self.incoming = IncomingTensors(meeting, shapes, digests)

    def send(self, *, buckets: int | None = None) -> BroadcastGroup:
        """Meet the receivers, and send all buckets or the first few; the group lasts as long as it is kept."""
        group = BroadcastGroup(self._store, self.incoming.meeting, 0)
        for bucket in buckets_of(self.incoming.tensors)[:buckets]:
            flat = [self._tensors[shape.name].detach().reshape(-1).view(torch.uint8) for shape in bucket]
            group.send(torch.cat(flat))
        return group


class Rig:
    """An engine under test, and the weights of the versions that it has served."""

    def __init__(self, engine: Engine, temperature: float) -> None:
        self.engine, self.temperature = engine, temperature
        self.served: dict[Version, Weights] = {}
        self._asked = 0

    def serve(self, weights: Weights) -> Version:
        """Load `weights` as a new version, unless the engine serves them already; return the version."""
        now = self.engine.version
        if now is not None and self.served.get(now) is weights:
            return now
        version = Version(0, len(self.served) + 1)
        self.served[version] = weights
        self.engine.load(weights.folder, version)
        return version

    def ask(self, *, answers: int = 4, prompt_tokens: int = 6) -> GenerationRequest:
        """Make a request that was not made before."""
        self._asked += 1
        rng = np.random.default_rng(self._asked)
        prompt = rng.integers(0, VOCAB_SIZE, size=prompt_tokens).astype(np.int32)
        return GenerationRequest(f"r{self._asked}", prompt, rng.integers(0, 2**63, size=answers, dtype=np.uint64))

    def collect(self, count: int, within_s: float = 120.0) -> list[FinishedAnswer]:
        """Collect `count` answers, within a time that is only reached when something is wrong."""
        found: list[FinishedAnswer] = []
        deadline_s = time.monotonic() + within_s
        while len(found) < count:
            assert time.monotonic() < deadline_s, f"{len(found)} of {count} answers came"
            found += self.engine.collect(0.5)
        return found

    def expected(self, request: GenerationRequest, one: FinishedAnswer, *, keeps_cache: bool) -> np.ndarray:
        """Return [T] log-probabilities of an answer under the versions that it names.

        With `keeps_cache` tokens before an update stay as the old version read them; without it every version reads
        them anew.
        """
        prompt, answer = request.prompt_token_ids.tolist(), one.generation.token_ids.tolist()
        parts, start = [], 0
        for span in one.generation.versions:
            parts.append((self.served[span.version], answer[start : start + span.num_tokens]))
            start += span.num_tokens
        assert start == len(answer), "spans cover the answer"
        if keeps_cache:
            head = (parts[0][0], prompt + parts[0][1])
            return full_forward([head, *parts[1:]], self.temperature)[len(prompt) - 1 :]
        found, known = [], prompt
        for weights, tokens in parts:
            found.append(full_forward([(weights, known + tokens)], self.temperature)[len(known) - 1 :])
            known = known + tokens
        return np.concatenate(found)
