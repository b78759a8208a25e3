"""A checkpoint exists whole or not at all, and training goes on from it as if nothing had happened."""

import pytest
import torch

from mrl.checkpoint.optimizer_state import optimizer_tensors, restore_optimizer
from mrl.checkpoint.store import CheckpointStore
from mrl.errors import CheckpointError


def save(store: CheckpointStore, step: int) -> None:
    store.save(step, model={"w": torch.full((2,), float(step))}, optimizer={}, state={"step": step})


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path):
    """Tensors and state survive, and the newest is found."""
    store = CheckpointStore(tmp_path, "a")
    save(store, 2)
    save(store, 10)

    found = store.load_newest()

    assert found is not None
    assert (found.step, found.state) == (10, {"step": 10})
    assert torch.equal(found.model["w"], torch.full((2,), 10.0))


def test_no_checkpoint_is_not_an_error(tmp_path):
    """A fresh run has none."""
    assert CheckpointStore(tmp_path / "none", "a").load_newest() is None


@pytest.mark.parametrize("file", ["model.safetensors", "state.json", "manifest.json"])
def test_a_torn_checkpoint_falls_back_to_the_one_before(tmp_path, file):
    """Damage in the newest folder leaves the earlier one usable."""
    store = CheckpointStore(tmp_path, "a")
    save(store, 1)
    save(store, 2)
    damaged = tmp_path / "step_2" / file
    damaged.write_bytes(damaged.read_bytes()[:-4])

    found = store.load_newest()

    assert found is not None
    assert found.step == 1


def test_when_none_is_sound_the_error_says_so(tmp_path):
    """All folders damaged is an error that names them, not a silent fresh start."""
    store = CheckpointStore(tmp_path, "a")
    save(store, 1)
    (tmp_path / "step_1" / "state.json").write_text("{}")

    with pytest.raises(CheckpointError, match=r"step_1.*checksum"):
        store.load_newest()


def test_an_interrupted_save_is_ignored_and_the_oldest_are_dropped(tmp_path):
    """Folders under a temporary name do not count; only the newest few stay."""
    store = CheckpointStore(tmp_path, "a", keep=2)
    (tmp_path / ".incomplete-step_9").mkdir()
    for step in (1, 2, 3):
        save(store, step)

    assert store.steps() == [2, 3]


def test_a_checkpoint_of_another_policy_is_refused(tmp_path):
    """Folders do not cross between policies."""
    save(CheckpointStore(tmp_path, "a"), 1)

    with pytest.raises(CheckpointError, match="policy a"):
        CheckpointStore(tmp_path, "b").load(1)


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
    store.save(3, model=dict(first.named_parameters()), optimizer=optimizer_tensors(first_optimizer), state={})
    found = store.load(3)
    with torch.no_grad():
        for name, parameter in second.named_parameters():
            parameter.copy_(found.model[name])
    second_optimizer = torch.optim.AdamW(second.parameters(), lr=1e-2)
    restore_optimizer(second_optimizer, found.optimizer)

    train(second, second_optimizer, range(3, 6))

    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


def test_optimizer_state_of_another_model_is_refused(tiny_model):
    """Shapes are compared before anything is restored."""
    small, large = tiny_model(), tiny_model(vocab_size=72)
    source = torch.optim.AdamW(large.parameters(), lr=1e-2)
    train(large, source, range(1))

    with pytest.raises(CheckpointError, match="shape"):
        restore_optimizer(torch.optim.AdamW(small.parameters()), optimizer_tensors(source))
