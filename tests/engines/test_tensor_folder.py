"""What a folder of weights holds, compared with what a server serves."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import save_file

from mrl.engines.server_timeouts import load_timeout_s
from mrl.engines.tensor_folder import TensorSums, check_same_tensors, digests_held, served_name
from mrl.errors import WeightsError
from mrl.models.tensor_file import digest, read_folder
from mrl.models.tensor_header import INDEX

LAYER = "model.layers.0"


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (7, 4),
        f"{LAYER}.self_attn.q_proj.weight": (4, 4),
        f"{LAYER}.self_attn.k_proj.weight": (2, 4),
        f"{LAYER}.self_attn.v_proj.weight": (2, 4),
        f"{LAYER}.mlp.gate_proj.weight": (6, 4),
        f"{LAYER}.mlp.up_proj.weight": (6, 4),
        "lm_head.weight": (7, 4),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(folder, weights: dict[str, torch.Tensor], *, tied: bool = False):
    """In two files, as large models come."""
    folder.mkdir()
    names = sorted(weights)
    save_file({name: weights[name] for name in names[:3]}, folder / "model-1.safetensors")
    save_file({name: weights[name] for name in names[3:]}, folder / "model-2.safetensors")
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    return folder


def served(weights: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """Hashes as a server tells them, which has put some tensors behind each other in one, and zeros behind others."""

    def rows(*names: str) -> torch.Tensor:
        return torch.cat([weights[name] for name in names]).to(dtype)

    attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    held = {
        "model.embed_tokens.weight": torch.cat([rows("model.embed_tokens.weight"), torch.zeros(57, 4, dtype=dtype)]),
        f"{attention}.qkv_proj.weight": rows(*(f"{attention}.{part}_proj.weight" for part in "qkv")),
        f"{mlp}.gate_up_proj.weight": rows(f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
        "lm_head.weight": rows("lm_head.weight"),
        "rotary.table": torch.zeros(3),
    }
    return {
        name: hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for name, tensor in held.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_held_has_the_digest_of_the_folders_tensor(tmp_path, dtype):
    """Fused ones too, and rounded as the server rounds; a table that the folder lacks is not spoken of."""
    weights = tensors()
    folder = write(tmp_path / "a", weights)

    held = digests_held(folder, served(weights, dtype), str(dtype).removeprefix("torch."))

    assert held == {name: digest(tensor) for name, tensor in weights.items()}


@pytest.mark.parametrize("modules", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_experts_that_a_server_holds_together_are_known_one_by_one(tmp_path, modules):
    """As they come in a broadcast, too; an expert at another one's place is seen, and so is one that is missing."""
    gate, up, down = modules
    experts = f"{LAYER}.mlp.experts"
    weights = {
        f"{experts}.{expert}.{module}.weight": torch.randn(2, 3, generator=torch.Generator().manual_seed(expert))
        for expert in range(11)
        for module in (gate, up)
    }
    weights |= {f"{experts}.{expert}.{down}.weight": torch.full((3, 2), float(expert)) for expert in range(11)}
    folder = write(tmp_path / "a", weights)
    wanted = {name: digest(tensor) for name, tensor in weights.items()}

    def sums(order: list[int]) -> dict[str, str]:
        held = {
            "w13_weight": torch.stack(
                [weights[f"{experts}.{expert}.{module}.weight"] for expert in order for module in (gate, up)]
            ),
            "w2_weight": torch.stack([weights[f"{experts}.{expert}.{down}.weight"] for expert in range(11)]),
        }
        return {
            f"{experts}.{name}": hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
            for name, tensor in held.items()
        }

    assert digests_held(folder, sums([*range(11)]), "float32") == wanted
    held = digests_held(folder, sums([1, 0, *range(2, 11)]), "float32")
    assert {name for name in wanted if held[name] != wanted[name]} == {one for one in wanted if f".{down}." not in one}
    assert digests_held(folder, sums([*range(10)]), "float32")[f"{experts}.0.{up}.weight"].startswith("sha256:")

    coming = TensorSums("float32")
    for name, tensor in weights.items():
        coming.add(served_name(name), name, tensor, wanted[name])
    assert coming.held(sums([*range(11)])) == wanted


@pytest.mark.parametrize("first", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_head_that_no_folder_fills_is_held_to_the_embedding(tmp_path, first):
    """A server that has one where the folder ties it computes with it; whichever it names first."""
    weights = tensors()
    del weights["lm_head.weight"]
    folder = write(tmp_path / "a", weights, tied=True)
    sums = served(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    wanted = {name: digest(tensor) for name, tensor in weights.items()}
    order = sorted(sums, key=lambda name: name != first)

    assert digests_held(folder, {name: sums[name] for name in order}, "float32") == wanted
    sums["lm_head.weight"] = "0" * 16
    held = digests_held(folder, {name: sums[name] for name in order}, "float32")
    assert {name for name in wanted if held[name] != wanted[name]} == {"model.embed_tokens.weight"}


@pytest.mark.parametrize("turned", [True, False])
def test_a_matrix_that_gpt2_keeps_the_other_way_round_is_known_either_way(tmp_path, turned):
    """Servers turn it, and families that use the same names do not; what is neither is seen."""
    name = "transformer.h.0.mlp.c_fc.weight"
    weights = {name: torch.randn(4, 6, generator=torch.Generator().manual_seed(3))}
    (tmp_path / "a").mkdir()
    save_file(weights, tmp_path / "a" / "model.safetensors")

    def sums(tensor: torch.Tensor) -> dict[str, str]:
        rows = (tensor.t() if turned else tensor).contiguous()
        return {name: hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]}

    assert digests_held(tmp_path / "a", sums(weights[name]), "float32") == {name: digest(weights[name])}
    held = digests_held(tmp_path / "a", sums(weights[name] + 1e-6), "float32")
    assert held[name].startswith("sha256:")


def test_one_element_of_a_fused_tensor_that_is_stale_by_a_millionth_is_seen(tmp_path):
    """All parts of that tensor are suspect, since one hash speaks for them, and no other."""
    weights = tensors()
    folder = write(tmp_path / "a", weights)
    stale = {name: tensor.clone() for name, tensor in weights.items()}
    stale[f"{LAYER}.self_attn.k_proj.weight"][1, 2] += 1e-6

    held = digests_held(folder, served(stale), "float32")

    wrong = {name for name, tensor in weights.items() if held[name] != digest(tensor)}
    assert wrong == {f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkv"}


def test_a_folder_that_has_been_pruned_proves_nothing(tmp_path):
    """To find no difference in nothing would be a proof of anything."""
    with pytest.raises(WeightsError, match="no tensors to compare with"):
        digests_held(tmp_path / "pruned", {"a": "0" * 16}, "float32")


def test_two_tensors_that_were_swapped_are_seen(tmp_path):
    """Both have the same shape, so that nothing but their bytes tells."""
    weights = tensors()
    folder = write(tmp_path / "a", weights)
    gate, up = f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp.up_proj.weight"

    held = digests_held(folder, served(weights | {gate: weights[up], up: weights[gate]}), "float32")

    assert {name for name, tensor in weights.items() if held[name] != digest(tensor)} == {gate, up}


def test_a_folder_with_the_same_tensors_fits(tmp_path):
    """Whatever their values."""
    check_same_tensors(write(tmp_path / "new", tensors(1)), write(tmp_path / "old", tensors(0)))


def test_a_second_copy_of_the_weights_under_other_names_is_none_of_the_model(tmp_path):
    """Mistral's folders have one, which nothing reads."""
    old = write(tmp_path / "old", tensors())
    bound_s = load_timeout_s(old)
    (old / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    save_file({f"mistral.{name}": tensor for name, tensor in tensors().items()}, old / "consolidated.safetensors")

    check_same_tensors(write(tmp_path / "new", tensors(1)), old)
    assert read_folder(old).keys() == tensors().keys()
    assert load_timeout_s(old) == bound_s


def test_a_missing_and_an_unknown_tensor_are_refused_by_name(tmp_path):
    """A server would keep the old tensor without a word."""
    weights = tensors()
    del weights[f"{LAYER}.mlp.up_proj.weight"]
    old = write(tmp_path / "old", tensors())

    with pytest.raises(WeightsError, match=r"up_proj"):
        check_same_tensors(write(tmp_path / "new", weights), old)
    with pytest.raises(WeightsError, match=r"score\.weight"):
        check_same_tensors(write(tmp_path / "more", tensors() | {"score.weight": torch.zeros(1)}), old)


def test_another_shape_is_refused_with_both_shapes(tmp_path):
    """SGLang ends when it meets one."""
    weights = tensors() | {"lm_head.weight": torch.zeros(8, 4)}

    with pytest.raises(WeightsError, match=r"lm_head\.weight has shape \(8, 4\).* \(7, 4\)"):
        check_same_tensors(write(tmp_path / "new", weights), write(tmp_path / "old", tensors()))


def test_a_tied_head_may_be_written_or_left_out(tmp_path):
    """Whoever saves a tied model decides; a head of its own may not be left out."""
    without = {name: tensor for name, tensor in tensors().items() if name != "lm_head.weight"}
    written = write(tmp_path / "written", tensors(), tied=True)
    left_out = write(tmp_path / "left_out", without, tied=True)
    check_same_tensors(written, left_out)
    check_same_tensors(left_out, written)

    untied = write(tmp_path / "untied", tensors())
    with pytest.raises(WeightsError, match=r"lm_head"):
        check_same_tensors(left_out, untied)
    with pytest.raises(WeightsError, match=r"lm_head"):
        check_same_tensors(untied, left_out)


def test_a_folder_that_is_not_here_tells_nothing(tmp_path):
    """Somebody else's server may have begun with a model of the hub."""
    check_same_tensors(write(tmp_path / "new", tensors()), tmp_path / "elsewhere")


def test_a_torn_file_is_refused(tmp_path):
    """With its path."""
    folder = write(tmp_path / "new", tensors())
    (folder / "model-2.safetensors").write_bytes(b"torn")

    with pytest.raises(WeightsError, match=r"model-2\.safetensors: cannot be read"):
        check_same_tensors(folder, write(tmp_path / "old", tensors()))


def test_tensors_that_lie_together_in_the_folder_already_are_known(tmp_path):
    """Phi 3 and GLM 4 are written so; then one element that is stale is seen, too."""
    fused, held = f"{LAYER}.mlp.gate_up_proj.weight", served(tensors())
    weights = tensors()
    weights[fused] = torch.cat([weights.pop(f"{LAYER}.mlp.{part}_proj.weight") for part in ("gate", "up")])
    folder = write(tmp_path / "folder", weights)

    assert digests_held(folder, held, "float32")[fused] == digest(weights[fused])
    weights[fused][0, 0] += 1e-6
    assert digests_held(write(tmp_path / "later", weights), held, "float32")[fused] != digest(weights[fused])


EXTRA = "model.layers.1.self_attn.rotary_emb.inv_freq", "model.layers.46.eh_proj.weight"


@pytest.mark.parametrize(("family", "extra"), [("llama", EXTRA[:1]), ("glm4_moe", EXTRA)])
def test_what_no_learner_loads_need_not_come_back(tmp_path, family, extra):
    """Llama 2 has frequencies in its folder, and GLM 4.5 a layer that predicts a second token."""
    own = {"model.layers.0.mlp.weight": torch.ones(2, 2)}
    first = write(tmp_path / "first", own | {name: torch.ones(3) for name in extra})
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2}
    (first / "config.json").write_text(json.dumps({"model_type": family, **shape}))

    check_same_tensors(write(tmp_path / "published", own), first)
    with pytest.raises(WeightsError, match=r"mlp\.weight"):
        check_same_tensors(write(tmp_path / "less", {"other": torch.ones(1)}), first)
