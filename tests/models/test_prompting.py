import pytest

from mrl.models.load_policy import load_tokenizer
from mrl.models.make import make_policy
from mrl.models.prompting import PromptEncoder, prompt_token_ids


@pytest.fixture
def folder(tmp_path, recipe, examples):
    make_policy(recipe, examples, tmp_path / "p", on_step=lambda step, loss: None)
    return tmp_path / "p"


def test_without_a_template_a_prompt_is_its_text_and_a_line_break(folder):
    """A local policy reads the prompt as a line."""
    ids = PromptEncoder(folder).token_ids("Copy this word: ab")
    assert load_tokenizer(folder).decode(ids) == "Copy this word: ab\n"
    assert ids.dtype == "int32"


def test_a_chat_template_is_used_where_there_is_one(folder):
    """A model with a template reads the prompt as one user turn, ready to answer."""
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"
    )
    assert tokenizer.decode(prompt_token_ids(tokenizer, "Hi there")) == "[user]Hi there[me]"


def test_ids_of_a_prompt_cannot_be_changed_by_a_caller(folder):
    """Ids are kept and shared between calls, hence read-only."""
    encoder = PromptEncoder(folder)
    ids = encoder.token_ids("Copy this word: ab")
    assert encoder.token_ids("Copy this word: ab") is ids
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1
