"""A checkpoint exists whole or not at all, and training goes on from it as if nothing had happened."""

import itertools
import json
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from mrl.config.policy_tables import LoraTable
from mrl.errors import CheckpointError
from mrl.models.lora import add_adapters
from mrl.models.parameters import trained_weights
from mrl.weights import checkpoint_store as store_module
from mrl.weights.checkpoint_saver import Saver
from mrl.weights.checkpoint_store import CheckpointStore
from mrl.weights.tensor_pieces import Piece, held_piece
from mrl.weights.training_state import restore_training, training_tensors


def save(store: CheckpointStore, step: int, tensors: dict[str, torch.Tensor] | None = None, life: int = 0) -> Path:
    tensors = {"w": torch.full((2,), float(step))} if tensors is None else tensors
    store.write_pieces(step, {name: held_piece(t, 0) for name, t in tensors.items()}, rank=0, life=life)
    return store.complete(step, json.dumps({"step": step}).encode(), life=life)


def rows_of(tensor: torch.Tensor, first_row: int, last_row: int) -> Piece:
    return Piece(tensor[first_row:last_row], first_row, tuple(tensor.shape), is_first_copy=True)


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path):
    """Tensors, of any kind and shape, and state."""
    store = CheckpointStore(tmp_path, "a")
    save(store, 2)
    save(store, 10, {"w": torch.full((2,), 10.0), "count": torch.tensor(7), "half": torch.ones(3, 2).bfloat16()})

    found = store.open(10)

    assert (store.steps(), store.problem(10)) == ([2, 10], None)
    assert (found.step, found.state) == (10, {"step": 10})
    assert torch.equal(found.read("w"), torch.full((2,), 10.0))
    assert torch.equal(found.read("count"), torch.tensor(7))
    assert torch.equal(found.read("half"), torch.ones(3, 2).bfloat16())


@pytest.mark.parametrize("cuts", [[0, 7], [0, 3, 7], [0, 1, 2, 7]])
def test_any_rows_are_read_from_whichever_files_hold_them(tmp_path, cuts):
    """Ranks wrote some rows each; another number of ranks reads others."""
    store, tensor = CheckpointStore(tmp_path, "a"), torch.arange(21.0).view(7, 3)
    for rank, (first, last) in enumerate(itertools.pairwise(cuts)):
        store.write_pieces(4, {"w": rows_of(tensor, first, last)}, rank=rank, life=0)
    store.complete(4, b"{}", life=0, num_ranks=len(cuts) - 1)

    found = store.open(4)

    assert store.problem(4) is None
    assert found.shape("w") == (7, 3)
    assert torch.equal(found.read("w"), tensor)
    for first in range(8):
        for count in range(8 - first):
            assert torch.equal(found.read("w", first, count), tensor[first : first + count])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("cuts", [[0, 7], [0, 3, 7], [0, 1, 2, 7]])
def test_distributed_checkpoints_of_torch_read_the_files(tmp_path, cuts):
    """Rows of several ranks, whole tensors, and numbers; nothing but the folder is told."""
    saved = {
        "w": torch.arange(21.0).view(7, 3),
        "b": torch.arange(7.0).bfloat16(),
        "count": torch.tensor(5),
    }
    store = CheckpointStore(tmp_path, "a")
    for rank, (first, last) in enumerate(itertools.pairwise(cuts)):
        pieces = {name: rows_of(saved[name], first, last) for name in ("w", "b")}
        if rank == 0:
            pieces["count"] = held_piece(saved["count"], 0)
        store.write_pieces(4, pieces, rank=rank, life=0)
    folder = store.complete(4, b"{}", life=0, num_ranks=len(cuts) - 1)

    found = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)

    assert {name: tensor.tolist() for name, tensor in found.items()} == {n: t.tolist() for n, t in saved.items()}


def test_no_checkpoint_is_not_an_error(tmp_path):
    """A fresh run has none."""
    assert CheckpointStore(tmp_path / "none", "a").steps() == []


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
@pytest.mark.parametrize("file", ["rank_00000.safetensors", "state.json", "manifest.json"])
def test_a_torn_checkpoint_is_found_out(tmp_path, file, damage):
    """Whatever file it is, and however little; the checkpoint before stays usable."""
    store = CheckpointStore(tmp_path, "a")
    save(store, 1)
    save(store, 2)
    damage(tmp_path / "step_2" / file)

    assert f"step_2{'' if file == 'manifest.json' else '/' + file}" in store.problem(2)
    assert store.problem(1) is None


def test_a_tensor_of_another_kind_is_damage(tmp_path):
    """The same bytes under another type are not what was saved."""
    store = CheckpointStore(tmp_path, "a")
    file = save(store, 1) / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"'))

    assert "checksum" in store.problem(1)


def test_every_rank_checks_its_part_of_the_files(tmp_path):
    """Damage in one file is seen by the rank whose turn it is, and by nobody else."""
    store = CheckpointStore(tmp_path, "a")
    for rank in range(3):
        piece = rows_of(torch.ones(3, 2), rank, rank + 1)
        store.write_pieces(1, {"w": piece}, rank=rank, life=0)
    flip(store.complete(1, b"{}", life=0, num_ranks=3) / "rank_00001.safetensors")

    problems = [store.problem(1, rank=rank, num_ranks=2) for rank in range(2)]

    assert problems[0] is None
    assert "rank_00001" in problems[1]


def test_an_interrupted_save_is_ignored_and_the_oldest_are_dropped(tmp_path):
    """What is not complete does not count, and the next life removes it; only the newest few stay."""
    store = CheckpointStore(tmp_path, "a", keep=2)
    store.write_pieces(9, {"w": held_piece(torch.ones(2), 0)}, rank=0, life=0)
    for step in (1, 2, 3):
        save(store, step)

    assert store.steps() == [2, 3]
    store.discard_unfinished()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_3"]


class Cut(BaseException):
    """The process is gone."""


def cut_at(monkeypatch, moment: int) -> list[str]:
    """Let the process end before the `moment`-th thing that the store does to the disk; returns what was done."""
    done: list[str] = []

    def counted(name, act):
        def acting(*arguments, **options):
            if len(done) == moment:
                raise Cut
            done.append(name)
            return act(*arguments, **options)

        return acting

    for name in ("write_tensors", "replace_file", "_sync"):
        monkeypatch.setattr(store_module, name, counted(name, getattr(store_module, name)))
    monkeypatch.setattr(store_module.shutil, "rmtree", counted("rmtree", store_module.shutil.rmtree))
    for name in ("mkdir", "rename", "unlink"):
        monkeypatch.setattr(Path, name, counted(name, getattr(Path, name)))
    return done


def test_a_save_that_ends_at_any_moment_leaves_a_usable_checkpoint(tmp_path):
    """Before every single thing that is done to the disk; and the next life saves the same step."""
    moment, finished = 0, False
    while not finished:
        store = CheckpointStore(tmp_path / str(moment), "a", keep=1)
        save(store, 1)
        with pytest.MonkeyPatch.context() as patched:
            done = cut_at(patched, moment)
            try:
                save(store, 2)
                finished = True
            except Cut:
                pass
        usable = [step for step in store.steps() if store.problem(step) is None]
        assert usable, (moment, done)
        assert usable == store.steps(), "what has its name is whole"
        store.discard_unfinished()
        save(store, 2, life=1)
        assert store.problem(2) is None
        assert store.steps() == [2]
        moment += 1
    assert moment > 8
    assert {"write_tensors", "replace_file", "_sync", "rename", "rmtree"} <= set(done)


def test_pieces_of_an_earlier_life_are_never_mixed_in(tmp_path):
    """The same step is saved again after a crash; what a lost rank left of it does not count."""
    store = CheckpointStore(tmp_path, "a")
    store.write_pieces(4, {"w": rows_of(torch.zeros(2, 1), 1, 2)}, rank=1, life=0)
    store.write_pieces(4, {"w": rows_of(torch.ones(2, 1), 0, 1)}, rank=0, life=1)

    with pytest.raises(CheckpointError, match=r"rank_00001.*not written within 0 s"):
        store.complete(4, b"{}", life=1, num_ranks=2, timeout_s=0.0)
    store.write_pieces(4, {"w": rows_of(torch.ones(2, 1), 1, 2)}, rank=1, life=1)
    store.complete(4, b"{}", life=1, num_ranks=2)

    assert torch.equal(store.open(4).read("w"), torch.ones(2, 1))


def test_a_checkpoint_of_another_policy_is_refused(tmp_path):
    """Folders do not cross between policies."""
    save(CheckpointStore(tmp_path, "a"), 1)

    with pytest.raises(CheckpointError, match="policy 'a', wanted format 3 of policy 'b'"):
        CheckpointStore(tmp_path, "b").open(1)


class SlowStore(CheckpointStore):
    """One whose disk waits to be told to go on."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.go_on = threading.Event()

    def write_pieces(self, *arguments, **options) -> None:
        assert self.go_on.wait(120)
        super().write_pieces(*arguments, **options)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    """What is saved is what was there when it was asked for, whatever happens to the tensors afterwards."""
    store, tensor, state = SlowStore(tmp_path, "a"), torch.ones(3), {"step": 1}
    saver = Saver(store, rank=0, num_ranks=1, life=0)

    saver.save(1, {"w": tensor}, state)
    tensor.zero_()
    state["step"] = 2
    assert store.steps() == []
    store.go_on.set()
    saver.wait()

    found = store.open(1)
    assert torch.equal(found.read("w"), torch.ones(3))
    assert found.state == {"step": 1}


def test_one_checkpoint_is_in_flight_and_its_wait_is_bounded(tmp_path):
    """The next save waits for the one before, and not for ever."""
    store = SlowStore(tmp_path, "a")
    saver = Saver(store, rank=0, num_ranks=1, life=0, timeout_s=0.05)
    saver.save(1, {"w": torch.ones(3)}, {})

    with pytest.raises(CheckpointError, match=r"checkpoint 1: not written to disk within"):
        saver.save(2, {"w": torch.ones(3)}, {})
    store.go_on.set()


def test_a_checkpoint_that_could_not_be_written_is_told(tmp_path):
    """By the next wait, with the reason that the disk gave."""
    (tmp_path / "a").write_text("a file where the folder should be")
    saver = Saver(CheckpointStore(tmp_path / "a", "a"), rank=0, num_ranks=1, life=0)
    saver.save(1, {"w": torch.ones(3)}, {})

    with pytest.raises(OSError, match="a"):
        saver.wait()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = torch.arange(64).roll(step).view(4, 16)
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()


def test_training_goes_on_bit_for_bit_from_a_checkpoint(tiny_model, tmp_path):
    """Three steps, a checkpoint and three more equal six steps in one go."""
    whole, first, second = (tiny_model(seed=3) for _ in range(3))
    whole_optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    train(whole, whole_optimizer, range(6))
    first_optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2)
    train(first, first_optimizer, range(3))
    store = CheckpointStore(tmp_path, "a")
    save(store, 3, training_tensors(first, first_optimizer))
    second_optimizer = torch.optim.AdamW(second.parameters(), lr=1e-2)
    checkpoint = store.open(3)
    restore_training(second, second_optimizer, checkpoint)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(), "mapped files count as memory of a whole run"

    train(second, second_optimizer, range(3, 6))

    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("change", [{"vocab_size": 72}, {"tied": False}])
def test_a_checkpoint_of_another_model_is_refused(tiny_model, tmp_path, change):
    """Names and shapes are compared before anything is restored."""
    own, other = tiny_model(seed=1), tiny_model(**change)
    source = torch.optim.AdamW(other.parameters(), lr=1e-2)
    train(other, source, range(1))
    store = CheckpointStore(tmp_path, "a")
    save(store, 3, training_tensors(other, source))
    before = [p.detach().clone() for p in own.parameters()]

    with pytest.raises(
        CheckpointError, match=r"step_3: is a checkpoint of another model.*cure: restore the policy's model"
    ):
        restore_training(own, torch.optim.AdamW(own.parameters()), store.open(3))

    assert all(torch.equal(a, b) for a, b in zip(before, own.parameters(), strict=True))


@pytest.mark.parametrize("moved", ["q_proj", "v_proj"])
def test_adapters_that_add_nothing_are_left_behind(tiny_model, tmp_path, moved):
    """As those in layers for images, which models had once; others make it another model."""
    own, other = tiny_model(seed=1), tiny_model(seed=1)
    add_adapters(own, LoraTable(rank=2, target_modules=["q_proj"]), seed=1)
    add_adapters(other, LoraTable(rank=2, target_modules=["q_proj", "v_proj"]), seed=2)
    parts = trained_weights(other)
    for name, tensor in parts.items():
        tensor.requires_grad_(moved in name)
        tensor.grad = torch.ones_like(tensor) if moved in name else None
    source = torch.optim.AdamW(parts.values(), lr=1e-2)
    source.step()
    store = CheckpointStore(tmp_path, "a")
    save(store, 3, training_tensors(other, source))

    def restore() -> None:
        restore_training(own, torch.optim.AdamW(trained_weights(own).values()), store.open(3))

    if moved == "v_proj":
        with pytest.raises(CheckpointError, match=r"another model: different names .*v_proj\.lora_"):
            restore()
        return
    restore()
    assert all(torch.equal(tensor, parts[name]) for name, tensor in trained_weights(own).items())
