import json
from datetime import date

import pytest

from mrl.config.policy_tables import PromptTable, ShotTable
from mrl.models.chat_template import FILE, read_template
from mrl.models.load_policy import load_tokenizer
from mrl.models.make import make_policy
from mrl.models.prompting import PromptEncoder, prompt_token_ids
from mrl.models.turn_renderer import TurnRenderer
from mrl.records.episodes import Message


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


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if brief is defined %}({{ brief }}){% endif %}[me]"
)


def asked(folder, content, **prompt) -> str:
    return PromptEncoder(folder, PromptTable(**prompt)).shown(content)


def test_what_stands_around_a_prompt_is_rendered_with_it(folder):
    """System message, examples, an option of the template; then what the answer begins with, as part of the prompt."""
    shots = [ShotTable(user="1", assistant="one"), ShotTable(user="2", assistant="two")]
    text = asked(
        folder, "3", chat_template=TEMPLATE, system="Count.", few_shot=shots,
        template_options={"brief": False}, assistant_prefill="So:",
    )  # fmt: skip
    assert text == "[system]Count.[user]1[assistant]one[user]2[assistant]two[user]3(False)[me]So:"


def test_a_conversation_keeps_its_own_system_message(folder):
    """Examples stand behind it."""
    content = (("system", "Own."), ("user", "3"))
    shots = [ShotTable(user="1", assistant="one")]
    text = asked(folder, content, chat_template=TEMPLATE, system="Count.", few_shot=shots)
    assert text == "[system]Own.[user]1[assistant]one[user]3[me]"


def test_a_line_of_plain_text_may_be_followed_by_the_begin_of_its_answer(folder):
    """Without a template as well."""
    assert asked(folder, "Copy this word: ab", assistant_prefill="<answer>") == "Copy this word: ab\n<answer>"


def test_the_check_renders_what_the_worker_encodes(folder):
    """Before a run there is no tokenizer of transformers, and the text is the same."""
    prompt = PromptTable(chat_template=TEMPLATE, system="Be.", template_options={"brief": 1}, assistant_prefill="So")
    template = read_template(folder, prompt)
    assert template is not None
    assert template.render("3") == PromptEncoder(folder, prompt).shown("3")


def test_a_template_that_prints_the_day_prints_that_of_the_run(folder):
    """In prompts, in the check before the run, and in episodes: whatever day it is."""
    template = "{{ strftime_now('%d %b %Y') }}: " + TEMPLATE
    prompt = PromptTable(chat_template=template, today=date(2024, 7, 26))
    assert PromptEncoder(folder, prompt).shown("3") == "26 Jul 2024: [user]3[me]"
    found = read_template(folder, prompt)
    assert found is not None
    assert found.prints_day
    assert found.render("3") == "26 Jul 2024: [user]3[me]"
    opening = TurnRenderer(folder, prompt, eos_ids=[0]).opening([Message("user", "3")])
    assert load_tokenizer(folder).decode(opening) == "26 Jul 2024: [user]3[me]"
    assert asked(folder, "3", chat_template=template) == f"{date.today():%d %b %Y}: [user]3[me]"


def test_the_day_is_that_of_the_run_where_a_model_has_several_templates(folder):
    """As Hermes 3 has: one of them for tools."""
    settings = folder / "tokenizer_config.json"
    named = [{"name": "default", "template": "{{ strftime_now('%d %b %Y') }}"}, {"name": "tool_use", "template": "-"}]
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": named}))
    (folder / FILE).unlink(missing_ok=True)
    assert asked(folder, "3", today=date(2024, 7, 26)) == "26 Jul 2024"


@pytest.mark.parametrize(
    ("template", "unread"),
    [
        ("{% if brief is defined and brief %}x{% endif %}", []),
        ("{# brief #}{{ messages }}", ["brief"]),
        ("brief{{ 'brief' }}", ["brief"]),
        ("{% generation %}{{ brief }}{% endgeneration %}", []),
    ],
)
def test_options_that_a_template_does_not_read_are_known(folder, template, unread):
    """A word in a comment, in text or in quotes reads nothing."""
    prompt = PromptTable(chat_template=template, template_options={"brief": True})
    assert read_template(folder, prompt).unread_options() == unread
