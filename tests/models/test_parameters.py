"""Weights by the names of a released folder: experts one by one, as views of what the model holds together."""

import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mrl.config.policy_tables import LoraTable
from mrl.models import parameters
from mrl.models.load_policy import load_policy, policy_without_values
from mrl.models.lora import add_adapters
from mrl.models.parameters import named_weights, released, weight_sources
from tests.support.family_rig import MIXTURES, make_family


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_views_of_what_the_model_holds(tmp_path, family):
    """Every element once, under the name and with the value that the folder has; no second copy."""
    folder = make_family(tmp_path, family)
    wanted, model = load_file(folder / "model.safetensors"), load_policy(folder)
    held = named_weights(model)

    found = dict(released(model, held.items()))

    assert len(found) > len(held)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    memory = {tensor.untyped_storage().data_ptr() for tensor in held.values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in found.values()} == memory
    assert sum(tensor.nbytes for tensor in found.values()) == sum(tensor.nbytes for tensor in held.values())
    starts = [tensor.data_ptr() for name, tensor in found.items() if ".experts." in name and ".layers.1." in name]
    gate_and_up, down = starts[: len(starts) * 2 // 3], starts[len(starts) * 2 // 3 :]
    assert gate_and_up == sorted(gate_and_up), "as servers lay them out"
    assert down == sorted(down)


def test_ranks_that_never_read_the_folder_know_its_names(tmp_path):
    """Also where that folder holds experts together."""
    folder = make_family(tmp_path, "qwen3_moe")
    load_policy(folder).save_pretrained(folder, save_original_format=False)
    assert not any(".experts.0." in name for name in load_file(folder / "model.safetensors"))

    names = [
        [source.name for source in weight_sources(one)] for one in (load_policy(folder), policy_without_values(folder))
    ]

    assert names[0] == names[1]
    assert any(".experts.0." in name for name in names[0])


def test_a_tensor_of_experts_is_gathered_once_and_let_go_behind_its_last(tmp_path, monkeypatch):
    """However many experts it has: all ranks gather it together."""
    model = load_policy(make_family(tmp_path, "qwen3_moe"))
    gathered: list[tuple[int, weakref.ref[Tensor]]] = []

    def gather(tensor: Tensor) -> Tensor:
        whole = tensor.detach().clone()
        gathered.append((tensor.data_ptr(), weakref.ref(whole)))
        return whole

    monkeypatch.setattr(parameters, "_whole", gather)
    for _ in range(2):
        gathered.clear()
        for source in weight_sources(model):
            source.whole()
            assert sum(one() is not None for _, one in gathered) <= 1
        assert [place for place, _ in gathered] == [tensor.data_ptr() for tensor in named_weights(model).values()]
        assert all(one() is None for _, one in gathered)


def test_adapters_beside_experts_leave_them_their_names(tmp_path):
    """Attention is adapted, and merged under its own name; routers and experts are as they were."""
    folder = make_family(tmp_path, "mixtral")
    model = load_policy(folder)
    add_adapters(model, LoraTable(rank=2), seed=0)

    found = {source.name: source.whole() for source in weight_sources(model)}

    wanted = load_file(folder / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_mixture_that_was_read_leaves_its_file(tmp_path):
    """Its experts are put together elsewhere; while one tensor lay in the mapped file, all of it stayed in memory."""
    folder = make_family(tmp_path, "qwen3_moe")

    model = load_policy(folder)

    assert model.get_parameter("model.norm.weight").sum() == 64
    assert str(folder) not in Path("/proc/self/maps").read_text()
