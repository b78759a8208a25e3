"""Time of new weights from a learner until an engine of its host serves them, proved, for those who size a run.

Weights of --gigabytes in bfloat16, shaped as a Qwen3's, go again and again from float32 parameters into vLLM's worker
extension: rounded, copied and hashed in memory that both see, checked and written into spare parameters beside the
steps, swapped in, and read back. The worker around the extension is a stand-in with vLLM's fused modules; no calls go
over HTTP. For comparison, in the same rounds, as many bytes are copied once within warm memory, by one thread, and once
from a file in memory to a new one. The best of the rounds counts.

Then a Qwen3 of --million-parameters goes from a learner to the embedded engine, all in float32: by files in memory, by
broadcast over loopback, and, with adapters of rank 16 on every linear layer (extra `lora`), as adapters alone. "Paused"
is the time in which the engine could run no forward. The canary of a proof is one more forward, whose time depends on
the model and not on its bytes alone; sampling goes on beside it.

    .venv/bin/python tools/bench_weights.py [--rounds N] [--gigabytes N] [--million-parameters N] [--threads N]

Prints a table; the last line is JSON; exit code 1 when a requirement is missed, or cannot be measured here.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from bench_row import Row, end, print_rows
from torch import Tensor, nn

from mrl.errors import MissingError

INSIDE = Path(__file__).parents[1] / "mrl" / "engines" / "inside"
LAYERS = "vllm.model_executor.layers"
MIXTURE = f"{LAYERS}.fused_moe"
STUBS: tuple[str, ...] = ("vllm", "vllm.model_executor", LAYERS, f"{LAYERS}.utils")
STUBS += (MIXTURE, f"{MIXTURE}.activation", f"{MIXTURE}.experts", f"{MIXTURE}.experts.cpu_moe")
"""Modules of vLLM that the extension imports."""
COPIES, PAUSE_SHARE = 2.0, 0.05
VOCAB, HIDDEN = 32_000, 1024
PROJECTIONS = {"q_proj": HIDDEN, "k_proj": HIDDEN // 2, "v_proj": HIDDEN // 2, "gate_proj": 3 * HIDDEN}
PROJECTIONS |= {"up_proj": 3 * HIDDEN, "down_proj": HIDDEN}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PARTS = ("publish: round, copy, hash", "take: check and write", "swap", "read back")


@dataclass
class Times:
    """Seconds of every round, by the part that was timed."""

    rounds: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, what: str, work: Callable[[], Any]) -> Any:
        """Do some work and note its seconds; return its result."""
        began_s = time.perf_counter()
        result = work()
        self.note(what, time.perf_counter() - began_s)
        return result

    def note(self, what: str, seconds: float) -> None:
        """Note the seconds of a part in one round."""
        self.rounds.setdefault(what, []).append(seconds)

    def best(self, *parts: str) -> float:
        """Least sum of the parts over the rounds in which all were done; NaN if there is none."""
        sums = [sum(parts) for parts in zip(*(self.rounds.get(part, []) for part in parts), strict=True)]
        return min(sums) if sums else float("nan")


class FusedModel(nn.Module):
    """Model with fused parameters and a loader as vLLM's models have them; it computes nothing."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self._places: dict[str, tuple[str, int]] = {}
        rows: dict[str, int] = {}
        for name, shape in shapes.items():
            served = next(
                (name.replace(part, fused) for fused, parts in FUSED.items() for part in parts if part in name), name
            )
            self._places[name] = served, rows.get(served, 0)
            rows[served] = rows.get(served, 0) + shape[0]
        for served, count in rows.items():
            columns = next(shape[1:] for name, shape in shapes.items() if self._places[name][0] == served)
            empty = torch.zeros(count, *columns, dtype=torch.bfloat16)
            self.register_parameter(served.replace(".", "/"), nn.Parameter(empty))

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy each tensor to its rows of a fused parameter, as vLLM's loaders do."""
        parameters = dict(self.named_parameters())
        for name, tensor in tensors:
            served, first = self._places[name]
            parameters[served.replace(".", "/")].data.narrow(0, first, len(tensor)).copy_(tensor)


def shapes_of(gigabytes: float) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's tensors, of about so many gigabytes in bfloat16."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    number = 0
    while 2 * sum(int(np.prod(shape)) for shape in shapes.values()) < gigabytes * 1e9:
        layer = {name: (rows, 3 * HIDDEN if name == "down_proj" else HIDDEN) for name, rows in PROJECTIONS.items()}
        layer |= {"o_proj": (HIDDEN, HIDDEN)}
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
        shapes[f"model.layers.{number}.norm.weight"] = (HIDDEN,)
        number += 1
    return shapes


def make_worker(shapes: dict[str, tuple[int, ...]]) -> Any:
    """Make vLLM's worker extension, in a stand-in worker of this process."""
    sys.path.insert(0, str(INSIDE))
    for name in STUBS:
        sys.modules[name] = ModuleType(name)
    layers = sys.modules[f"{LAYERS}.utils"]
    vars(layers)["dispatch_cpu_unquantized_gemm"] = print
    vars(sys.modules[LAYERS])["utils"] = layers
    vars(sys.modules[f"{MIXTURE}.activation"]).update(ApplyMoEActivationConfig=print, apply_moe_activation=print)
    experts = type("CPUUnquantizedExperts", (), {"process_weights_after_loading": print, "apply": print})
    vars(sys.modules[f"{MIXTURE}.experts.cpu_moe"])["CPUUnquantizedExperts"] = experts
    worker, model = importlib.import_module("vllm_cpu_worker").CpuWeightsExtension(), FusedModel(shapes)
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    return worker


def measure_server(times: Times, folder: Path, gigabytes: float, rounds: int) -> int:
    """Measure updates of vLLM's extension; return the bytes of the weights.

    Every round changes every tensor, so that none can be skipped.
    """
    from mrl.models.parameters import plain_sources
    from mrl.records.version import Version
    from mrl.weights.manifest import Canary, read_manifest
    from mrl.weights.publish import Publisher

    shapes = shapes_of(gigabytes)
    torch.manual_seed(0)
    learner = {name: torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    worker = make_worker(shapes)
    size_bytes = 2 * sum(tensor.numel() for tensor in learner.values())
    publisher = Publisher(folder / "server", "bench", in_memory=True, dtype="bfloat16")
    source, target = (np.ones(size_bytes, np.uint8) for _ in range(2))

    def publish(step: int) -> Path:
        publisher.begin(plain_sources(learner.items()), Version(0, step), Canary([], [], []))
        publisher.finish()
        return folder / "server" / f"0.{step}" / "manifest.json"

    def take(path: Path, digests: dict[str, str]) -> None:
        worker.mrl_take(json.dumps({"folder": str(path.parent), "digests": digests}))
        worker.mrl_arriving.result()
        assert worker.mrl_arrival() == {}

    def look() -> dict[str, str]:
        worker.mrl_look()
        worker.mrl_looking.result()
        return worker.mrl_checksums()

    for step in range(1, rounds + 3):
        seen = Times() if step < 3 else times  # two rounds make the memory that all others use
        for tensor in learner.values():
            tensor.mul_(1.0 + 1e-3)
        path = seen.measure(PARTS[0], partial(publish, step))
        manifest = read_manifest(path)
        seen.measure(PARTS[1], partial(take, path, manifest.tensors))
        assert seen.measure(PARTS[2], worker.mrl_serve_arrived) == {}
        assert seen.measure(PARTS[3], look) == manifest.tensors, "it serves what was published"
        seen.measure("one copy in memory", lambda: np.copyto(target, source))
        weights, copy = path.with_name("model.safetensors"), os.memfd_create("copy")
        with weights.open("rb") as file:
            seen.measure("one copy from file to file", partial(send, file.fileno(), copy))
        os.close(copy)
    publisher.close()
    return size_bytes


def send(source: int, target: int) -> None:
    """Copy all bytes of a file into another."""
    done, size_bytes = 0, os.fstat(source).st_size
    while done < size_bytes:
        done += os.sendfile(target, source, done, size_bytes - done)


def measure_embedded(times: Times, folder: Path, million_parameters: float, rounds: int) -> None:
    """Measure updates of an embedded engine of this process, by files in memory and by broadcast in turn."""
    from mrl.engines.embedded import EmbeddedEngine
    from mrl.engines.engine import Sampling
    from mrl.models.parameters import weight_sources
    from mrl.models.tensor_broadcast import IncomingTensors
    from mrl.records.rollouts import WeightsNotice, WeightsRequest
    from mrl.records.version import Version
    from mrl.weights.broadcast import BroadcastPublisher
    from mrl.weights.canary import canary_sequences, make_canary
    from mrl.weights.manifest import read_manifest
    from mrl.weights.publish import Publisher

    model, canary_ids = make_model(million_parameters), canary_sequences(VOCAB)
    model.save_pretrained(folder / "model")
    (folder / "model" / "tokenizer.json").write_text("{}")
    engine = EmbeddedEngine(folder / "model", Sampling(1.0, 8, (1,)), device="cpu", max_running=1)
    publisher = Publisher(folder / "embedded", "bench", in_memory=True)
    with ExitStack() as closing:
        closing.callback(publisher.close)
        sender = BroadcastPublisher(Publisher(folder / "sent", "bench"), host="127.0.0.1")
        closing.callback(sender.close)

        def by_files(seen: Times, version: Version) -> None:
            canary = make_canary(model, canary_ids)

            def publish() -> None:
                publisher.begin(weight_sources(model), version, canary)
                publisher.finish()

            seen.measure("embedded: publish", publish)
            path = folder / "embedded" / str(version) / "manifest.json"
            manifest = read_manifest(path)
            seen.measure("embedded: check and load", lambda: engine.load(path.parent, version, manifest.tensors))
            seen.note("embedded: paused", engine.paused_s)
            assert seen.measure("embedded: read back", engine.checksums) == manifest.tensors
            seen.measure("embedded: canary", lambda: engine.score(canary.token_ids))

        def by_broadcast(seen: Times, version: Version) -> None:
            canary = make_canary(model, canary_ids)
            weights = ((source.name, source.whole()) for source in weight_sources(model))
            path = seen.measure("broadcast: keep", lambda: sender.publish_weights(weights, version, canary))
            manifest, seats = read_manifest(path), engine.broadcast_seats()
            asked = WeightsRequest(worker="w", version=version, attempt=version.step, num_ranks=seats.num_ranks)
            sender.ask(b"", asked)

            def receive() -> None:
                notice = WeightsNotice(version=version, manifest_path=str(path))
                while not (answers := sender.answers(notice, num_workers=1)):
                    pass  # the sender's thread may still be at the end of the broadcast before
                meeting = answers[0][1].meeting
                assert meeting is not None
                engine.receive(IncomingTensors(meeting, manifest.broadcast, manifest.tensors), version)

            seen.measure("broadcast: meet and receive", receive)

        for number in range(2 * rounds + 4):
            change(model)
            (by_files, by_broadcast)[number % 2](Times() if number < 4 else times, Version(0, number))


def measure_adapters(times: Times, folder: Path, rounds: int) -> None:
    """Measure updates by adapters alone, of a learner and an engine that both began with `folder / "model"`."""
    from mrl.config.policy_tables import LoraTable
    from mrl.engines.embedded import EmbeddedEngine
    from mrl.engines.engine import Sampling
    from mrl.models.load_policy import load_policy
    from mrl.models.lora import add_adapters
    from mrl.models.parameters import adapter_sources, trained_weights
    from mrl.records.version import Version
    from mrl.rollout.weight_updates import prove
    from mrl.weights.adapters import AdapterFormat
    from mrl.weights.canary import canary_sequences, make_canary
    from mrl.weights.manifest import read_manifest
    from mrl.weights.publish import Publisher

    start, table, canary_ids = folder / "model", LoraTable(rank=16, alpha=32), canary_sequences(VOCAB)
    model = load_policy(start)
    add_adapters(model, table, seed=0)
    engine = EmbeddedEngine(start, Sampling(1.0, 8, (1,)), device="cpu", max_running=1)
    publisher = Publisher(folder / "adapters", "bench", adapters=AdapterFormat(table, start), in_memory=True)
    for number in range(rounds + 1):
        seen, version = Times() if number < 1 else times, Version(0, number)
        with torch.no_grad():
            for tensor in trained_weights(model).values():
                tensor.add_(1e-3)
        canary = make_canary(model, canary_ids)

        def publish(version: Version = version, canary: Any = canary) -> None:
            publisher.begin(adapter_sources(model), version, canary)
            publisher.finish()

        seen.measure("adapters: publish", publish)
        path = folder / "adapters" / str(version) / "manifest.json"
        manifest = read_manifest(path)
        load = partial(engine.load_adapters, path.parent, version, manifest.tensors)
        seen.measure("adapters: check and load", load)
        seen.note("adapters: paused", engine.paused_s)
        seen.measure("adapters: prove", partial(prove, engine, manifest))
    publisher.close()


def make_model(million_parameters: float) -> Any:
    """Make a Qwen3 with random weights of about this many million parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2304, "num_attention_heads": 12}
    layers = max(1, round((million_parameters * 1e6 - VOCAB * 768) / (13 * 768**2)))
    shape |= {"num_hidden_layers": layers, "head_dim": 64, "num_key_value_heads": 4, "vocab_size": VOCAB}
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True)).eval()


@torch.no_grad()
def change(model: nn.Module) -> None:
    """Change the value of every parameter."""
    for tensor in model.parameters():
        tensor.mul_(1.0 + 1e-3)


def main() -> int:
    """Measure, and print the results; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--million-parameters", type=float, default=100.0, help="0: without the embedded engine")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    times, lacking, size_bytes = Times(), [], 0
    with tempfile.TemporaryDirectory(prefix="mrl-weights-") as place:
        folder = Path(place)
        try:
            size_bytes = measure_server(times, folder, arguments.gigabytes, arguments.rounds)
            if arguments.million_parameters:
                measure_embedded(times, folder, arguments.million_parameters, arguments.rounds)
                measure_adapters(times, folder, arguments.rounds)
        except (ImportError, MissingError) as error:
            lacking.append(str(error))
    for reason in lacking:
        print(f"not measured from here on: {reason}")
    return report(times, size_bytes, arguments.threads)


def report(times: Times, size_bytes: int, threads: int) -> int:
    """Print the table and the JSON line; return the exit code."""
    copy_s = times.best("one copy in memory")
    print(
        f"{size_bytes / 1e9:.2f} GB of bfloat16 into vLLM's worker extension, {threads} threads, best of the rounds\n"
    )
    print("| part | seconds | of one copy in memory |\n|---|--:|--:|")
    for part in times.rounds:
        ratio = "" if ":" in part and part not in PARTS else f"{times.best(part) / copy_s:.2f}"
        print(f"| {part} | {times.best(part):.4f} | {ratio} |")
    rows = list(rows_of(times))
    print_rows(rows)
    return end("weights", rows)


def rows_of(times: Times) -> Iterator[Row]:
    """Rows of the required bounds, and of the figures beside them."""
    copy, file_copy = times.best("one copy in memory"), times.best("one copy from file to file")
    update_s = times.best(*PARTS)
    against = "one copy of the bytes in warm memory"
    yield Row("update and its proof", update_s, "s", against, update_s / copy, f"<={COPIES}")
    yield Row("update and its proof", update_s, "s", "one copy from file to file", update_s / file_copy)
    swap_s = times.best("swap")
    yield Row("engine still", swap_s, "s", "update and its proof", swap_s / update_s, f"<={PAUSE_SHARE}")
    embedded = times.best("embedded: publish", "embedded: check and load", "embedded: read back")
    paused_s = times.best("embedded: paused")
    yield Row("embedded engine still", paused_s, "s", "its update", paused_s / embedded, f"<={PAUSE_SHARE}")
    broadcast = times.best("broadcast: keep", "broadcast: meet and receive")
    yield Row("update by broadcast", broadcast, "s", "by files in memory", broadcast / embedded)
    adapters = times.best("adapters: publish", "adapters: check and load")
    yield Row("update by adapters alone", adapters, "s", "by files in memory", adapters / embedded)


if __name__ == "__main__":
    sys.exit(main())
