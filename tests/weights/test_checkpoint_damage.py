"""Whatever happens to the files of a checkpoint: what is loaded is what was saved, or one line says what is wrong."""

import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.errors import MRLError
from mrl.weights.checkpoint_store import CheckpointStore
from mrl.weights.tensor_pieces import held_piece
from mrl.weights.training_state import restore_training, training_tensors

STEP = 6
STATE = {
    "version": {"run_epoch": 1, "step": STEP},
    "ledger": {"cursor": 24, "open": [20, 23], "dropped": 2},
    "regime": {"own": {"pending": []}},
    "rng": {"bit_generator": "PCG64", "state": {"state": 3**70, "inc": 5**40}, "has_uint32": 0, "uinteger": 0},
    "skipped": 0,
    "alarms": 1,
}
EACH = 12
"""Random damages of every kind and file."""
MOST = 120
"""Places of its JSON that are changed."""
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 2**31, 2**63, 2**64, 10**30, 1e308, 0.5, "", "x", "\x00", "é", [], [1], {}, {"a": 1}
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Any]) -> Path:
    """A run's checkpoint: a model that was trained a little, its optimizer, and the learner's state."""
    folder = tmp_path_factory.mktemp("saved")
    model = tiny_model(seed=3)
    store = CheckpointStore(folder, "a")
    tensors = training_tensors(model, trained(model))
    store.write_pieces(STEP, {name: held_piece(tensor, 0) for name, tensor in tensors.items()}, rank=0, life=0)
    return store.complete(STEP, json.dumps(STATE).encode(), life=0)


def trained(model: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has made a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.arange(64).view(4, 16)
    model(input_ids=x, labels=x).loss.backward()
    optimizer.step()
    return optimizer


Damage = tuple[str, Callable[[Path], None]]
"""What it is called, and what it does to a file."""


def rewritten(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return act


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def zeroed(data: bytes, begin: int, end: int) -> bytes:
    return data[:begin] + bytes(end - begin) + data[end:]


def become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def become_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def of_bytes(length: int, seed: int) -> Iterator[Damage]:
    """Kinds of damage that any file may have."""
    draw = random.Random(seed)
    yield "gone", Path.unlink
    yield "a folder", become_folder
    yield "a link to itself", become_loop
    yield "empty", rewritten(lambda _: b"")
    yield "all zeros", rewritten(lambda data: bytes(len(data)))
    yield "zeros behind", rewritten(lambda data: data + bytes(4096))
    yield "twice", rewritten(lambda data: data + data)
    yield "not UTF-8", rewritten(lambda data: b"\xff\xfe" + data)
    yield "nested deeply", rewritten(lambda _: b"[" * 100_000)
    yield "a huge number", rewritten(lambda _: b"9" * 10_000)
    for _ in range(EACH):
        at, bit, other = draw.randrange(length), draw.randrange(8), draw.randrange(length)
        begin, end = min(at, other), max(at, other) + 1
        yield f"bit {bit} of byte {at}", rewritten(lambda data, at=at, bit=bit: flipped(data, at, bit))
        yield f"cut at {at}", rewritten(lambda data, at=at: data[:at])
        yield f"zeros in {begin}:{end}", rewritten(lambda data, b=begin, e=end: zeroed(data, b, e))
        yield f"lacks {begin}:{end}", rewritten(lambda data, b=begin, e=end: data[:b] + data[e:])
        yield f"{at} not UTF-8", rewritten(lambda data, at=at: data[:at] + b"\xff" + data[at + 1 :])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a tree of JSON."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    if isinstance(value, list):
        for number, one in enumerate(value):
            yield from places(one, (*path, number))


def put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The tree with another value in a place."""
    if not path:
        return value
    tree = tree.copy()
    tree[path[0]] = put(tree[path[0]], path[1:], value)
    return tree


def without(tree: Any, path: tuple[Any, ...]) -> Any:
    """The tree without a place."""
    tree = tree.copy()
    if len(path) == 1:
        del tree[path[0]]
    else:
        tree[path[0]] = without(tree[path[0]], path[1:])
    return tree


def of_json(tree: Any, seed: int, most: int = MOST) -> Iterator[tuple[str, Any]]:
    """Other values, of right and of wrong types, and missing keys, in every kind of place."""
    draw = random.Random(seed)
    found = list(itertools.islice(places(tree), 4000))
    draw.shuffle(found)
    for path in found[:most]:
        value = draw.choice(VALUES)
        yield f"{path} = {value!r}", put(tree, path, value)
        if path:
            yield f"without {path}", without(tree, path)


def header_rewritten(data: bytes, header: Any) -> bytes:
    text = json.dumps(header).encode()
    begin = 8 + int.from_bytes(data[:8], "little")
    return len(text).to_bytes(8, "little") + text + data[begin:]


def damages(file: Path, seed: int) -> Iterator[Damage]:
    """All that is tried on one file."""
    data = file.read_bytes()
    yield from of_bytes(len(data), seed)
    if file.suffix == ".json":
        for name, tree in of_json(json.loads(data), seed):
            yield name, rewritten(lambda _, tree=tree: json.dumps(tree).encode())
    else:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        yield from ((f"bit {bit} of byte {at}", rewritten(lambda data, at=at, bit=bit: flipped(data, at, bit)))
                    for at in range(8) for bit in range(8))  # fmt: skip
        for name, tree in of_json(header, seed):
            yield name, rewritten(lambda data, tree=tree: header_rewritten(data, tree))


def outcome(folder: Path, model: torch.nn.Module) -> tuple[str, Any, dict[str, torch.Tensor]]:
    """("", state, tensors) of what a learner goes on from, or why it does not."""
    store, optimizer = CheckpointStore(folder, "a"), torch.optim.AdamW(model.parameters(), lr=1e-2)
    problem = store.problem(STEP)
    if problem is not None:
        return problem, None, {}
    checkpoint = store.open(STEP)
    restore_training(model, optimizer, checkpoint)
    assert checkpoint.step == STEP
    return "", checkpoint.state, training_tensors(model, optimizer)


@pytest.mark.parametrize("file", ["manifest.json", "state.json", "rank_00000.safetensors"])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(2, 6))])
def test_damage_gives_the_right_values_or_one_line(
    saved: Path, tmp_path: Path, tiny_model: Callable[..., Any], file: str, seed: int
) -> None:
    """Cut, flipped, emptied, filled with zeros, in another encoding, of other types, null, with missing keys, huge."""
    model = tiny_model(seed=9)
    right, wrong_line, uncaught, num_refused = training_tensors(m := tiny_model(seed=3), trained(m)), [], [], 0
    target = tmp_path / f"step_{STEP}"
    for name, damage in damages(saved / file, seed):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(saved, target)
        damage(target / file)
        try:
            problem, state, tensors = outcome(tmp_path, model)
        except MRLError as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            uncaught.append(f"{name}: {error!r}"[:300])
            continue
        if problem:
            num_refused += 1
            wrong_line += [problem] if "\n" in problem or str(target) not in problem else []
            continue
        assert state == STATE, name
        assert tensors.keys() == right.keys(), name
        assert all(torch.equal(tensors[key], right[key]) for key in right), name
    assert (uncaught, wrong_line) == ([], [])
    assert num_refused > 50


def test_a_checkpoint_under_the_name_of_another_step_is_refused(saved: Path, tmp_path: Path) -> None:
    """Somebody renamed it: versions would be used twice, or left out."""
    shutil.copytree(saved, tmp_path / "step_9")
    assert "the manifest is of step 6" in str(CheckpointStore(tmp_path, "a").problem(9))
