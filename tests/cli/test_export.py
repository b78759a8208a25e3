"""A checkpoint of a run becomes a folder that transformers loads as it would load any other."""

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrl.cli.main import main
from mrl.config.locks import held
from mrl.config.run_folder import RunFolder, create_run_folder
from mrl.config.schema import RunConfig
from mrl.models.load_policy import load_policy
from mrl.models.lora import add_adapters
from mrl.models.parameters import named_weights, trained_weights
from mrl.models.probe import save_probe
from mrl.weights.checkpoint_store import CheckpointStore
from mrl.weights.tensor_pieces import Piece
from mrl.weights.training_state import training_tensors
from tests.support.family_rig import make_family
from tests.support.word_runs import word_run


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    """A small policy with a card of its own."""
    folder = tmp_path_factory.mktemp("model")
    save_probe(folder, seed=3)
    (folder / "README.md").write_text("somebody else's card")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


@pytest.fixture
def run(tmp_path, model_folder) -> RunFolder:
    """A run with two checkpoints of policy "qwen", the later of them by two ranks; and a frozen teacher."""
    policies = {
        "qwen": {"model": str(model_folder), "source": "Qwen/Qwen3-test"},
        "teacher": {"model": str(model_folder), "frozen": True},
    }
    folder = create_run_folder(word_run(policies, run={"steps": 9, "folder": str(tmp_path)}))
    store = CheckpointStore(folder.checkpoints("qwen"), "qwen")
    for step in (4, 8):
        model = load_policy(model_folder)
        with torch.no_grad():
            for tensor in named_weights(model).values():
                tensor.add_(step / 100)
        tensors = training_tensors(model, torch.optim.AdamW(model.parameters()))
        cuts = [0, 1, None] if step == 8 else [0, None]
        for rank in range(len(cuts) - 1):
            pieces = {
                name: Piece(tensor[cuts[rank] : cuts[rank + 1]], cuts[rank], tuple(tensor.shape), is_first_copy=True)
                for name, tensor in tensors.items()
            }
            store.write_pieces(step, pieces, rank=rank, life=0)
        store.complete(step, b"{}", life=0, num_ranks=len(cuts) - 1)
    return folder


@pytest.fixture
def with_settings(model_folder):
    """Puts keys into the model's tokenizer_config.json, which is afterwards what it was."""
    file = model_folder / "tokenizer_config.json"
    before = file.read_text()
    yield lambda **keys: file.write_text(json.dumps(json.loads(before) | keys))
    file.write_text(before)


def begun(tmp_path: Path, policy: dict[str, object]) -> tuple[RunConfig, RunFolder]:
    """A run of one policy, "qwen"."""
    config = word_run({"qwen": policy}, run={"steps": 9, "folder": str(tmp_path)})
    return config, create_run_folder(config)


def save(run: RunFolder, tensors: dict[str, torch.Tensor]) -> None:
    """Its checkpoint of step 2."""
    pieces = {name: Piece(one.detach(), 0, tuple(one.shape), is_first_copy=True) for name, one in tensors.items()}
    store = CheckpointStore(run.checkpoints("qwen"), "qwen")
    store.write_pieces(2, pieces, rank=0, life=0)
    store.complete(2, b"{}", life=0)


@pytest.mark.parametrize(("step", "arguments"), [(8, []), (4, ["--step", "4"])])
def test_transformers_loads_what_was_exported(run, model_folder, step, arguments, capsys):
    """Weights of that step, tokenizer, chat template, and a card that says where they come from."""
    assert main(["export", str(run.path), "--policy", "qwen", *arguments]) == 0

    exported = Path(capsys.readouterr().out.strip())
    assert exported == run.path / "exports" / f"qwen-step_{step}"
    found = named_weights(AutoModelForCausalLM.from_pretrained(exported, local_files_only=True))
    first = named_weights(load_policy(model_folder))
    assert found.keys() == first.keys()
    assert all(torch.equal(found[name], tensor + step / 100) for name, tensor in first.items())
    tokenizer = AutoTokenizer.from_pretrained(exported, local_files_only=True)
    assert tokenizer.decode(tokenizer("the fox")["input_ids"]) == "the fox"
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    card = (exported / "README.md").read_text()
    assert f"# qwen, step {step} of run r" in card
    assert "trained from: Qwen/Qwen3-test" in card
    assert json.loads((exported / "config.json").read_text())["model_type"] == "qwen3"
    assert [path.name for path in (run.path / "exports").iterdir()] == [exported.name]


@pytest.mark.parametrize(
    ("arguments", "others", "norm"),
    [
        ([], "bfloat16", "float32"),
        (["--dtype", "model"], "bfloat16", "float32"),
        (["--dtype", "float32"], "float32", "float32"),
        (["--dtype", "float16"], "float16", "float16"),
    ],
)
@pytest.mark.parametrize("lora", [None, {"rank": 2, "target_modules": ["q_proj"]}], ids=["whole", "adapters"])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_weights_are_in_the_dtype_of_the_model_or_the_wanted_one(
    tmp_path, model_folder, lora, arguments, others, norm, capsys
):
    """What was not trained is bit for bit what it was; a tensor that a family keeps in 32 bits stays so."""
    model = load_policy(model_folder)
    begun_from = tmp_path / "model"
    shutil.copytree(model_folder, begun_from)
    model.to(torch.bfloat16).model.norm.to(torch.float32)
    model.save_pretrained(begun_from)
    config, folder = begun(tmp_path, {"model": str(begun_from), "learner": {} if lora is None else {"lora": lora}})
    model = load_policy(begun_from)
    if lora is not None:
        add_adapters(model, config.policies["qwen"].learner.lora, seed=1)
    save(folder, training_tensors(model, torch.optim.AdamW(trained_weights(model).values())))

    assert main(["export", str(folder.path), "--policy", "qwen", *arguments]) == 0

    told = capsys.readouterr()
    exported = Path(told.out.strip())
    assert told.err == f"weights in {' and '.join(sorted({others, norm}))}\n"
    assert told.err.strip() in (exported / "README.md").read_text()
    found, wanted = load_file(exported / "model.safetensors"), load_file(begun_from / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        dtype = getattr(torch, norm if name == "model.norm.weight" else others)
        assert found[name].dtype == dtype, name
        assert torch.equal(found[name], tensor.to(dtype)), name
    loaded = AutoModelForCausalLM.from_pretrained(exported, local_files_only=True)
    assert loaded.config.dtype == loaded.dtype == getattr(torch, others)


@pytest.mark.parametrize("damage", [lambda file: file.write_bytes(b"vers"), Path.unlink], ids=["cut off", "missing"])
def test_a_model_whose_dtypes_cannot_be_read_is_exported_in_a_named_one(tmp_path, model_folder, damage, capsys):
    """Its weights are those of the checkpoint."""
    begun_from = tmp_path / "model"
    shutil.copytree(model_folder, begun_from)
    _, folder = begun(tmp_path, {"model": str(begun_from)})
    model = load_policy(begun_from)
    save(folder, training_tensors(model, torch.optim.AdamW(model.parameters())))
    shutil.copyfile(begun_from / "model.safetensors", begun_from / "other.safetensors")
    damage(begun_from / "model.safetensors")

    assert main(["export", str(folder.path), "--policy", "qwen"]) == 2
    assert "cannot read the dtypes of the model's weights" in capsys.readouterr().err
    assert main(["export", str(folder.path), "--policy", "qwen", "--dtype", "float32"]) == 0


def test_a_mixture_is_exported_by_the_names_of_its_folder(tmp_path, capsys):
    """An expert per tensor, as servers read it; in a checkpoint they lie together, as in memory."""
    model_folder = make_family(tmp_path / "model", "mixtral")
    model = load_policy(model_folder)
    _, run = begun(tmp_path, {"model": str(model_folder)})
    save(run, training_tensors(model, torch.optim.AdamW(model.parameters())))

    assert main(["export", str(run.path), "--policy", "qwen"]) == 0

    exported = load_file(Path(capsys.readouterr().out.strip()) / "model.safetensors")
    wanted = load_file(model_folder / "model.safetensors")
    assert exported.keys() == wanted.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in wanted.items())


def test_how_a_policy_was_asked_goes_with_it(run, with_settings, capsys):
    """Its own chat template in the place of the model's, and the rest on the card."""
    with_settings(chat_template="{{ messages[0].content }} of the model")
    config = json.loads(run.config_json.read_text())
    template = "{% for m in messages %}<<{{ m.content }}>>{% endfor %}"
    config["policies"]["qwen"]["prompt"] |= {"chat_template": template, "system": "Be brief.", "stop": ["!"]}
    run.config_json.write_text(json.dumps(config))

    assert main(["export", str(run.path), "--policy", "qwen"]) == 0

    exported = Path(capsys.readouterr().out.strip())
    assert AutoTokenizer.from_pretrained(exported, local_files_only=True).chat_template == template
    assert "chat_template" not in json.loads((exported / "tokenizer_config.json").read_text())  # llama.cpp's first
    card = (exported / "README.md").read_text().splitlines()
    assert "- prompt: system = 'Be brief.'" in card
    assert "- prompt: stop = ['!']" in card


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "pytorch_model.bin.index.json", "optimizer.pt", "tf_model.h5", "model-q4.gguf"],
)
def test_weights_in_other_forms_stay_behind(run, model_folder, name, capsys):
    """They are those that the model had before, and a trainer's folder has twice as much beside them."""
    (model_folder / name).write_text("of before")
    try:
        assert main(["export", str(run.path), "--policy", "qwen"]) == 0
    finally:
        (model_folder / name).unlink()
    exported = Path(capsys.readouterr().out.strip())
    assert not (exported / name).exists()
    assert (exported / "generation_config.json").exists()


def test_a_link_to_nowhere_is_a_place_that_is_taken(run, tmp_path, capsys):
    """A folder cannot get its name."""
    (tmp_path / "out").symlink_to("nowhere")
    assert main(["export", str(run.path), "--policy", "qwen", "--to", str(tmp_path / "out")]) == 2
    assert "out: already exists" in capsys.readouterr().err


def test_what_a_killed_export_left_goes_with_the_next_one(run, tmp_path, capsys, monkeypatch):
    """The kernel drops a killed one's lock; what is being written by another stays."""
    parts, arguments = [], ["export", str(run.path), "--policy", "qwen", "--to", str(tmp_path / "o[u]t")]

    def write(part, *_):
        parts.append(part)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("mrl.cli.export.write_folder", write)
        assert main(arguments) != 0
    assert not parts[0].exists()
    left, others, own = parts[0], parts[0].with_name(f"{parts[0].name}0"), tmp_path / ".o[u]t.mine"
    for folder in (left, others, own):
        folder.mkdir()
        (folder / "model.safetensors").touch()
    with held(others):
        assert main(arguments) == 0
    assert {path.name for path in tmp_path.glob(".*")} == {others.name, own.name}


def test_modes_of_the_model_stay_with_it(run, model_folder, capsys):
    """What lies where nobody may write becomes files that their owner may."""
    file = model_folder / "chat_template.jinja"
    file.chmod(0o444)
    try:
        assert main(["export", str(run.path), "--policy", "qwen"]) == 0
    finally:
        file.chmod(0o644)
    assert (Path(capsys.readouterr().out.strip()) / file.name).stat().st_mode & 0o200


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "qwem"], "no learning policy of this name; got 'qwem'; wanted qwen"),
        (["--policy", "teacher"], "no learning policy of this name"),
        (["--policy", "qwen", "--step", "5"], "no checkpoint for this step; got 5; wanted one of [4, 8]"),
        (["--policy", "qwen", "--to", "."], ".: already exists; cure: choose another --to"),
        (
            ["--policy", "qwen", "--to", "/dev/null/out/sub"],
            "cannot be written (Not a directory); cure: choose another",
        ),
    ],
)
def test_what_cannot_be_exported_is_one_line(run, arguments, words, capsys):
    """With exit code 2, and nothing is written."""
    assert main(["export", str(run.path), *arguments]) == 2

    assert words in capsys.readouterr().err
    assert not (run.path / "exports").exists()


def test_a_damaged_checkpoint_is_not_exported(run, capsys):
    """Its checksums are compared first."""
    file = run.checkpoints("qwen") / "step_8" / "rank_00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    assert main(["export", str(run.path), "--policy", "qwen"]) == 1

    assert "rank_00001.safetensors: checksum differs" in capsys.readouterr().err
    assert not (run.path / "exports").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_exported_merged_and_alone(tmp_path, model_folder) -> None:
    """Both load and say the same as the model that was trained; the checkpoint holds adapters only."""
    lora = {"rank": 4, "target_modules": ["q_proj", "up_proj"]}
    config, folder = begun(tmp_path, {"model": str(model_folder), "learner": {"lora": lora}})
    model = load_policy(model_folder)
    add_adapters(model, config.policies["qwen"].learner.lora, seed=1)
    with torch.no_grad():
        for tensor in trained_weights(model).values():
            tensor.add_(0.05)
    save(folder, training_tensors(model, torch.optim.AdamW(trained_weights(model).values())))

    assert main(["export", str(folder.path), "--policy", "qwen"]) == 0

    out = folder.path / "exports" / "qwen-step_2"
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    expected = model(input_ids=ids).logits
    merged = AutoModelForCausalLM.from_pretrained(out)
    alone = peft.PeftModel.from_pretrained(load_policy(model_folder), out / "adapter")
    torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(alone(input_ids=ids).logits, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(load_policy(model_folder)(input_ids=ids).logits, expected, atol=1e-2)
    assert "adapters of rank 4" in (out / "README.md").read_text()
    assert AutoTokenizer.from_pretrained(out).eos_token
