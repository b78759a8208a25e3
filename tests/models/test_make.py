import random
import stat

import pytest
import torch

from mrl.errors import ModelFolderError
from mrl.models.load_policy import load_policy, load_tokenizer
from mrl.models.make import encode_example, make_policy
from mrl.tasks.warm_start_examples import Example


def ignore(step, loss):
    """Nobody watches."""


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma3", "qwen3_moe"])
def test_a_made_folder_is_an_ordinary_model_folder(tmp_path, recipe, examples, architecture):
    """It loads like a downloaded one, with matching vocabulary and EOS, and says how it was made."""
    changed = recipe.model_copy(update={"architecture": architecture, "skilled_in": ["copy"]})
    make_policy(changed, examples, tmp_path / "p", on_step=ignore)
    model, tokenizer = load_policy(tmp_path / "p"), load_tokenizer(tmp_path / "p")
    assert model.config.model_type.startswith(architecture)
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert not model.training
    readme = (tmp_path / "p" / "README.md").read_text()
    assert "skewed prior" in readme
    assert "likely for copy" in readme


def test_the_same_recipe_gives_the_same_weights(tmp_path, recipe, examples):
    """Making depends on the recipe alone, and leaves the global generator of torch as it was."""
    torch.manual_seed(77)
    state = torch.get_rng_state()
    for name in ("a", "b"):
        make_policy(recipe, examples, tmp_path / name, on_step=ignore)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert torch.equal(torch.get_rng_state(), state)


def test_an_interrupted_making_leaves_nothing(tmp_path, recipe, examples):
    """A folder appears whole or not at all."""

    def interrupt(step, loss):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_policy(recipe, examples, tmp_path / "p", on_step=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_one_clear_error(tmp_path, recipe, examples):
    """A file where the folder of policies should be is said as such."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelFolderError, match="cannot write policies here"):
        make_policy(recipe, examples, tmp_path / "file" / "p", on_step=ignore)


def test_the_folder_is_readable_by_others(tmp_path, recipe, examples):
    """A made folder has the mode of an ordinary one."""
    make_policy(recipe, examples, tmp_path / "p", on_step=ignore)
    assert stat.S_IMODE((tmp_path / "p").stat().st_mode) == 0o755


def test_an_example_ends_with_eos(tmp_path, recipe, examples):
    """The completion's ids decode to its text and end with EOS; the prompt's ids are those of rollouts."""
    make_policy(recipe, examples, tmp_path / "p", on_step=ignore)
    tokenizer = load_tokenizer(tmp_path / "p")
    example = examples.draw(random.Random(1), practice=False)
    ((prompt, completion),) = encode_example(tokenizer, example)
    ((prompt_text, completion_text),) = example.turns
    assert tokenizer.decode(prompt) == prompt_text + "\n"
    assert completion[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(completion[:-1]) == completion_text


def test_every_turn_of_an_episode_is_imitated(tmp_path, recipe, examples):
    """As an episode's row has them: each prompt a line, each turn of the policy with its EOS."""
    make_policy(recipe, examples, tmp_path / "p", on_step=ignore)
    tokenizer = load_tokenizer(tmp_path / "p")
    turns = encode_example(tokenizer, Example((("Copy", "b"), ("ba", "d"))))
    eos = tokenizer.eos_token
    assert [tuple(map(tokenizer.decode, turn)) for turn in turns] == [("Copy\n", f"b{eos}"), ("ba\n", f"d{eos}")]


def test_a_second_making_replaces_the_first(tmp_path, recipe, examples):
    """Making again at the same place leaves one whole folder of the new recipe."""
    make_policy(recipe, examples, tmp_path / "p", on_step=ignore)
    make_policy(recipe.model_copy(update={"num_layers": 2}), examples, tmp_path / "p", on_step=ignore)
    assert load_policy(tmp_path / "p").config.num_hidden_layers == 2
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
