"""Measures how long new weights take from a learner to an embedded engine on one host, by files and by broadcast.

A Qwen3 of about --million-parameters in float32 is published and installed again and again, as learner and worker do:
written as a folder with digests and canary, verified, loaded beside sampling, swapped in, and proved. Beside it, in the
same rounds, the bytes of the weights are copied once from a file to a new file on the same file system. Medians.
"Paused" is the part of the load in which the engine could run no forward. The proof stands by itself, since it depends
on the model and not on its bytes alone; its canary is one more forward, beside which sampling goes on.

Then the next version goes by broadcast: kept in memory with its digests, sent by gloo over loopback from one thread of
this process to another, verified and swapped in. Files in memory are the quicker way on one host; the broadcast is for
hosts that share no memory, and its rows say what the protocol costs.

Last, adapters of rank 16 on every linear layer of such a model go alone: written, verified, merged into the weights of
an engine that has started with the same folder, and proved, which merges them once more.

    .venv/bin/python tools/bench_weights.py [--rounds N] [--million-parameters N] [--folder FOLDER]

Prints a table; the last line is JSON; exit code 1 when a requirement is missed.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from mrl.config.policy_tables import LoraTable
from mrl.engines.embedded import EmbeddedEngine
from mrl.engines.engine import Sampling
from mrl.models.load import load_policy
from mrl.models.lora import add_adapters
from mrl.models.parameters import named_weights, trained_weights, whole_adapters
from mrl.models.tensor_broadcast import Incoming
from mrl.records.rollouts import WeightsNotice, WeightsRequest, WeightsRoute
from mrl.records.version import Version
from mrl.rollout.updates import prove
from mrl.weights.adapters import AdapterFormat
from mrl.weights.broadcast import BroadcastPublisher
from mrl.weights.canary import canary_sequences, make_canary
from mrl.weights.manifest import read_manifest
from mrl.weights.publish import Publisher

VOCAB = 32_000
HIDDEN = 768
COPY_FACTOR, PAUSE_SHARE = 2.0, 0.10
CANARY = canary_sequences(VOCAB)


@dataclass
class Times:
    """Seconds of every round, by what was done."""

    rounds: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, what: str, work: Callable[[], object]) -> object:
        """Do it and note how long it took."""
        began_s = time.perf_counter()
        result = work()
        self.rounds.setdefault(what, []).append(time.perf_counter() - began_s)
        return result

    def median(self, what: str) -> float:
        """Median over the rounds, 0 for what was never done."""
        return statistics.median(self.rounds.get(what, [0.0]))


def make_model(million_parameters: float) -> PreTrainedModel:
    """As many layers as make about so many parameters."""
    shape: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_attention_heads": 12,
        "vocab_size": VOCAB,
    }
    per_layer = 3 * 3 * HIDDEN**2 + 4 * HIDDEN**2
    layers = max(1, round((million_parameters * 1e6 - VOCAB * HIDDEN) / per_layer))
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(**shape, num_hidden_layers=layers, head_dim=64, num_key_value_heads=4, tie_word_embeddings=True)
    ).eval()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--million-parameters", type=float, default=100.0)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where the weights lie; default /dev/shm")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="mrl-weights-") as folder:
        times, *sizes_bytes = measure(make_model(arguments.million_parameters), Path(folder), arguments.rounds)
    return report(times, sizes_bytes, arguments.folder)


def measure(model: PreTrainedModel, folder: Path, rounds: int) -> tuple[Times, int, int]:
    """(times, bytes of the weights, of adapters). Every round changes every tensor, so that nothing can be skipped."""
    model.save_pretrained(folder / "model")
    (folder / "model" / "tokenizer.json").write_text("{}")
    engine = EmbeddedEngine(folder / "model", Sampling(1.0, 8, (1,)), device="cpu", max_running=1)
    publisher = Publisher(folder / "weights", "bench", keep=2)
    sender = BroadcastPublisher(Publisher(folder / "sent", "bench"), host="127.0.0.1")
    adapters = AdapterRounds(folder)
    times = Times()
    for number in range(rounds + 1):
        if number == 1:
            times = Times()  # the round before warmed up
        change(model)
        one_round(model, engine, publisher, folder, times, Version(0, 2 * number))
        change(model)
        one_broadcast(model, engine, sender, times, Version(0, 2 * number + 1))
        adapters.measure(times, Version(0, number))
    sender.close()
    return times, sum(tensor.nbytes for tensor in named_weights(model).values()), adapters.size_bytes


class AdapterRounds:
    """A learner of adapters and its engine, both begun with `folder / "model"`."""

    def __init__(self, folder: Path) -> None:
        start = folder / "model"
        table = LoraTable(rank=16, alpha=32)
        self._model = load_policy(start)
        add_adapters(self._model, table, seed=0)
        self._engine = EmbeddedEngine(start, Sampling(1.0, 8, (1,)), device="cpu", max_running=1)
        self._publisher = Publisher(folder / "adapters", "bench", adapters=AdapterFormat(table, start), keep=2)
        self.size_bytes = sum(tensor.nbytes for _, tensor in whole_adapters(self._model))

    @torch.no_grad()
    def measure(self, times: Times, version: Version) -> None:
        """One update of adapters that have all changed."""
        for tensor in trained_weights(self._model).values():
            tensor.add_(1e-3)
        canary = make_canary(self._model, CANARY)
        path = times.measure(
            "publish adapters",
            lambda: self._publisher.publish_weights(whole_adapters(self._model), version, canary),
        )
        assert isinstance(path, Path)
        manifest = read_manifest(path)
        times.measure(
            "verify and merge adapters", lambda: self._engine.load_adapters(path.parent, version, manifest.tensors)
        )
        times.rounds.setdefault("paused by adapters", []).append(self._engine.paused_s)
        times.measure("prove adapters", lambda: prove(self._engine, manifest))


@torch.no_grad()
def change(model: PreTrainedModel) -> None:
    """Another value for every parameter."""
    for tensor in named_weights(model).values():
        tensor.mul_(1.0 + 1e-3)


def one_broadcast(
    model: PreTrainedModel, engine: EmbeddedEngine, sender: BroadcastPublisher, times: Times, version: Version
) -> None:
    """One update over a process group, as worker and learner make it."""
    canary = make_canary(model, CANARY)
    path = times.measure("keep", lambda: sender.publish_weights(named_weights(model).items(), version, canary))
    assert isinstance(path, Path)
    manifest = read_manifest(path)
    seats = engine.broadcast_seats()
    sender.ask(b"", WeightsRequest(worker="w", version=version, attempt=version.step, num_ranks=seats.num_ranks))

    def receive() -> None:
        notice = WeightsNotice(version=version, manifest_path=str(path))
        answers: list[tuple[bytes, WeightsRoute]] = []
        while not answers:  # the sender's thread may still be at the end of the broadcast before
            answers = sender.answers(notice, num_workers=1)
        meeting = answers[0][1].meeting
        assert meeting is not None
        engine.receive(Incoming(meeting, manifest.broadcast, manifest.tensors), version)

    times.measure("meet and receive", receive)
    prove(engine, manifest)


def one_round(
    model: PreTrainedModel, engine: EmbeddedEngine, publisher: Publisher, folder: Path, times: Times, version: Version
) -> None:
    """One update, and one copy of the same bytes."""
    canary = make_canary(model, CANARY)
    path = times.measure("publish", lambda: publisher.publish_weights(named_weights(model).items(), version, canary))
    assert isinstance(path, Path)
    manifest = read_manifest(path)
    times.measure("verify and load", lambda: engine.load(path.parent, version, manifest.tensors))
    times.rounds.setdefault("paused", []).append(engine.paused_s)
    times.measure("prove", lambda: prove(engine, manifest))
    copy = folder / "copy"
    times.measure("copy once", lambda: shutil.copyfile(path.with_name("model.safetensors"), copy))
    copy.unlink()


def report(times: Times, sizes_bytes: Sequence[int], folder: Path) -> int:
    """Print the table and the JSON line; the exit code."""
    copy_s = times.median("copy once")
    update_s = sum(times.median(part) for part in ("publish", "verify and load"))
    rounds = len(times.rounds["publish"])
    whole, adapters = (f"{size_bytes / 1e6:.1f} MB" for size_bytes in sizes_bytes)
    print(f"{whole} of weights, {adapters} of adapters in {folder}, medians of {rounds} rounds, one thread\n")
    print("| part | seconds | of one copy |\n|---|--:|--:|")
    for part in times.rounds:
        print(f"| {part} | {times.median(part):.4f} | {times.median(part) / copy_s:.2f} |")
    paused_share = times.median("paused") / update_s
    broadcast_s = sum(times.median(part) for part in ("keep", "meet and receive"))
    adapters_s = sum(times.median(part) for part in ("publish adapters", "verify and merge adapters"))
    rows = [
        row("update by broadcast", broadcast_s, "s", "one copy of the bytes", broadcast_s / copy_s, None),
        row("update by adapters alone", adapters_s, "s", "update by files", adapters_s / update_s, None),
        row("update by files", update_s, "s", "one copy of the bytes", update_s / copy_s, COPY_FACTOR),
        row("engine paused", times.median("paused"), "s", "the update", paused_share, PAUSE_SHARE),
    ]
    print(f"\nupdate {update_s / copy_s:.2f} of one copy (<= {COPY_FACTOR}), paused {paused_share:.1%} of it (<= 10 %)")
    print(f"update by broadcast {broadcast_s / copy_s:.2f} of one copy")
    print(json.dumps({"bench": "weights", "rows": rows}))
    return 0 if all(one["ok"] for one in rows) else 1


def row(name: str, value: float, unit: str, against: str, ratio: float, required: float | None) -> dict[str, object]:
    """A row of the JSON line; the ratio may not exceed what is required, if anything is."""
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "against": against,
        "ratio": ratio,
        "required": required,
        "ok": required is None or ratio <= required,
    }


if __name__ == "__main__":
    sys.exit(main())
