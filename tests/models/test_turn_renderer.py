"""The turns of an episode in own tokens, by templates as families write them."""

import json

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from mrl.config.policy_tables import PromptTable
from mrl.errors import ModelFolderError
from mrl.models.load_policy import load_tokenizer
from mrl.models.make import make_policy
from mrl.models.prompting import PromptEncoder
from mrl.models.tokenizers import train_metaspace
from mrl.models.turn_renderer import TurnRenderer
from mrl.records.episodes import Message, ToolCall
from mrl.tasks.environments.tool_syntax import HERMES
from tests.support.forgetful_template import FORGETFUL, KEEPS_NEWEST

CALL = ToolCall(name="look_up", arguments='{"key":"b"}')
USER = Message(role="user", content="lower")
TOOL = Message(role="tool", content="7", name="look_up")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A line break stands behind the end of a turn, which no engine samples."""
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Drops the reasoning of turns before the newest question, as Qwen3 does."""
HEADERS = (
    "{% for m in messages %}{% if m.tool_calls %}<|head|>assistant<|/head|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}<|head|>{{ 'ipython' if m.role == 'tool' else m.role }}<|/head|>\n\n{{ m.content }}{% endif %}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
"""Drops what is said beside a call, as Llama 3 does."""
OPENED_BY_ROLE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""Has no end of a turn, as GLM: the next one's beginning is it."""
COUNTING = "{{ messages | length }}:" + CHATML
"""A longer conversation begins otherwise; what stands behind a turn does not."""
REWRITING = (
    "{% for m in messages %}{{ m.content }}{{ '.' if loop.last else ';' }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
"""Ends the last turn otherwise than one that others follow."""


@pytest.fixture
def folder(tmp_path, recipe, examples):
    make_policy(recipe, examples, tmp_path / "p", on_step=lambda step, loss: None)
    return tmp_path / "p"


@pytest.fixture
def renderer(folder):
    """By this template; without one, by lines."""
    own = [load_tokenizer(folder).eos_token_id]

    def make(template="", *, eos_ids=own, **prompt):
        return TurnRenderer(folder, PromptTable(chat_template=template, **prompt), eos_ids=eos_ids)

    return make


@pytest.fixture
def text(folder):
    tokenizer = load_tokenizer(folder)
    return lambda ids: tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("template", "calls", "said", "bridge"),
    [
        (CHATML, (), USER, "<|im_end|>\n<|im_start|>user\nlower<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, (CALL,), TOOL, "<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"),
        (THINKING, (), USER, "<|im_end|>\n<|im_start|>user\nlower<|im_end|>\n<|im_start|>assistant\n"),
        (HEADERS, (), USER, "<|eot|><|head|>user<|/head|>\n\nlower<|eot|><|head|>assistant<|/head|>\n\n"),
        (HEADERS, (CALL,), TOOL, "<|eot|><|head|>ipython<|/head|>\n\n7<|eot|><|head|>assistant<|/head|>\n\n"),
        (OPENED_BY_ROLE, (), USER, "<|user|>\nlower<|assistant|>\n"),
        (COUNTING, (), USER, "<|im_end|>\n<|im_start|>user\nlower<|im_end|>\n<|im_start|>assistant\n"),
        ("", (), USER, "lower\n"),
    ],
)
def test_a_bridge_is_what_the_template_puts_between_two_turns(renderer, text, template, calls, said, bridge):
    """From the end of the turn, with the separators that no engine samples, to where the next one begins."""
    assert text(renderer(template).bridge([], calls, [said])) == bridge


def test_a_conversation_that_others_had_is_rendered_whole(renderer, text):
    """Calls and their answers in it too, behind the policy's own system message and examples."""
    talk = [USER, Message(role="assistant", content="", tool_calls=(CALL,)), TOOL]
    found = text(renderer(CHATML, system="be brief").opening(talk))
    assert found.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nlower<|im_end|>\n")
    assert '<tool_call>\n{"name": "look_up", "arguments": {"key": "b"}}\n</tool_call>' in found
    assert found.endswith("<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n")
    by_option = renderer("{{ 'no thoughts' if thinks is false }}" + CHATML, template_options={"thinks": False})
    assert text(by_option.opening(talk)).startswith("no thoughts")
    own = [Message(role="system", content="shout"), USER]
    assert "be brief" not in text(renderer(CHATML, system="be brief").opening(own))


def test_calls_are_said_by_the_template_for_tools_where_a_model_has_several(folder, text):
    """As Hermes 3 has: the other one knows no calls."""
    plain = CHATML.partition("{% for c in")[0] + "<|im_end|>\n" + CHATML.rpartition("<|im_end|>\n")[2]
    settings = folder / "tokenizer_config.json"
    named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": CHATML}]
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": named}))
    several = TurnRenderer(folder, eos_ids=[load_tokenizer(folder).eos_token_id])
    several.check(has_tools=True)
    alone = TurnRenderer(folder, PromptTable(chat_template=CHATML), eos_ids=[load_tokenizer(folder).eos_token_id])
    assert several.said("hm", (CALL,)) == alone.said("hm", (CALL,))
    assert text(several.bridge([], (CALL,), [TOOL])) == text(alone.bridge([], (CALL,), [TOOL]))


@pytest.mark.parametrize("before", ["", "hm\n", "<think>\nhm\n</think>\n\n"])
def test_a_turn_with_calls_is_said_as_it_was_sampled(renderer, before):
    """What parts calls from the words before them stands there once, and not at all before the first of a turn."""
    parting = renderer(CHATML.replace("\n<tool_call>", "{{ '\n' }}<tool_call>"))
    call = '<tool_call>\n{"name": "look_up", "arguments": {"key": "b"}}\n</tool_call>'
    for sampled in (before + call, f"{before}{call}\n{call}"):
        turn = HERMES.read(sampled)
        assert parting.said(turn.content, turn.tool_calls) == sampled
    assert parting.said("hm", (CALL,)) == f"hm\n{call}"


def test_an_end_that_was_sampled_is_not_said_again(renderer, folder, text):
    """One that was not, as in a turn cut at the limit, is; another one than the template's stays before it."""
    eos_id = load_tokenizer(folder).eos_token_id
    eos = load_tokenizer(folder).eos_token
    ended = CHATML.replace("<|im_end|>", eos)
    word = load_tokenizer(folder)("a")["input_ids"][-1]

    assert text(renderer(ended).bridge([word, eos_id], (), [USER])).startswith("\n<|im_start|>user")
    assert text(renderer(ended).bridge([word], (), [USER])).startswith(eos + "\n<|im_start|>user")
    assert text(renderer(CHATML).bridge([word, eos_id], (), [USER])).startswith("<|im_end|>\n<|im_start|>user")


def test_another_end_of_turns_is_an_end(renderer, folder, text):
    """As Llama's <|eom_id|>: the template's own is not said behind it. Where roles open turns, the next role is."""
    tokenizer = load_tokenizer(folder)
    eos, word = tokenizer.eos_token, tokenizer("a")["input_ids"][-1]
    two = {"eos_ids": [tokenizer.eos_token_id, word]}

    ended = text(renderer(CHATML.replace("<|im_end|>", eos), **two).bridge([word], (), [USER]))
    opened = text(renderer(OPENED_BY_ROLE.replace("<|user|>", eos), **two).bridge([word], (), [USER]))

    assert ended.startswith("\n<|im_start|>user")
    assert opened == text(renderer(OPENED_BY_ROLE.replace("<|user|>", eos)).bridge([], (), [USER]))


def test_an_episode_of_bridges_is_the_conversation_as_the_template_renders_it(renderer, folder, text):
    """Where nothing is dropped, prompt, turns and bridges together are one rendering."""
    eos = load_tokenizer(folder).eos_token
    template, tokenizer = CHATML.replace("<|im_end|>", eos), load_tokenizer(folder)
    own = renderer(template)
    first, second = own.turn("6", eos_id=tokenizer.eos_token_id), own.turn("5", eos_id=tokenizer.eos_token_id)
    opening = own.opening([Message(role="user", content="guess")])
    row = [*opening, *first, *own.bridge(first.tolist(), (), [USER]), *second]

    tokenizer.chat_template = template
    turns = [("user", "guess"), ("assistant", "6"), ("user", "lower"), ("assistant", "5")]
    rendered = tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in turns], tokenize=False)
    assert text(row) + "\n" == rendered


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (CHATML, '<tool_call>\n{"name": "look_up", "arguments": {"key": "b"}}\n</tool_call>'),
        (HEADERS, '{"name": "look_up", "parameters": {"key": "b"}}'),
    ],
)
def test_a_peers_call_is_said_in_the_own_syntax(renderer, text, template, call):
    """As the template writes it."""
    assert renderer(template).said("", (CALL,)).strip() == call


def test_the_rest_of_a_turn_stands_behind_its_beginning(tmp_path, tiny_model):
    """A vocabulary that puts a space before a text's first word puts none there; the end closes either."""
    tokenizer = train_metaspace(["call look_up answer"] * 3, 400)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.save_pretrained(tmp_path)
    tiny_model(vocab_size=400).save_pretrained(tmp_path)
    own = TurnRenderer(tmp_path, eos_ids=[tokenizer.eos_token_id])
    whole, rest = (own.turn("call", eos_id=tokenizer.eos_token_id, is_begun=begun).tolist() for begun in (False, True))
    assert tokenizer.decode(rest) == f"call{tokenizer.eos_token}"
    assert tokenizer.decode(whole) == f" call{tokenizer.eos_token}"
    assert own.turn("", eos_id=None, is_begun=True).size == 0


@pytest.mark.parametrize("template", [THINKING, OPENED_BY_ROLE, ""])
def test_a_call_that_the_template_leaves_out_cannot_be_said(renderer, template):
    """An expected outcome, and no error."""
    assert renderer(template).said("x", (CALL,)) is None


@pytest.mark.parametrize(("template", "has_tools"), [(CHATML, True), (HEADERS, True), (THINKING, False), ("", True)])
def test_templates_by_which_a_conversation_goes_on_pass(renderer, template, has_tools):
    """Also one that drops earlier reasoning: the policy goes on seeing what it sampled."""
    renderer(template).check(has_tools=has_tools)


@pytest.mark.parametrize(
    ("template", "has_tools", "words"),
    [
        (REWRITING, False, "changes earlier messages when later ones are added"),
        (THINKING, True, "does not render the tool calls of a turn"),
        (
            "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
            False,
            "does not render each turn exactly once",
        ),
        (
            "{% for m in messages %}{{ raise_exception('roles') if loop.index > 2 else m.content }}{% endfor %}",
            False,
            "roles",
        ),
    ],
)
def test_a_template_without_a_bridge_is_refused(renderer, folder, template, has_tools, words):
    """With its place and the cure, before anything is sampled."""
    with pytest.raises(ModelFolderError, match=words) as raised:
        renderer(template).check(has_tools=has_tools)
    if words != "roles":  # the template's own word
        assert str(folder) in str(raised.value)
        assert "wanted a template with which a conversation can continue" in str(raised.value)
        assert "cure: set policies.X.prompt.chat_template to a file with another template" in str(raised.value)


def test_what_opens_and_what_begins_an_answer_stand_in_both_places(renderer, text):
    """The system message once, the begun answer before every turn."""
    own = renderer(CHATML, system="Be brief.", assistant_prefill="A: ")

    opening = text(own.opening([Message(role="user", content="guess")]))
    assert opening.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nguess")
    assert opening.endswith("<|im_start|>assistant\nA: ")
    assert text(own.bridge([], (), [USER])).endswith("<|im_start|>assistant\nA: ")
    assert "system" not in text(own.bridge([], (), [USER]))


def test_a_turn_reads_without_its_end(renderer, folder):
    """Special tokens within it stay: calls may be written with them."""
    tokenizer = load_tokenizer(folder)
    ids = [*tokenizer("6 , 7")["input_ids"], tokenizer.eos_token_id]

    assert renderer().text(ids) == "6 , 7"
    assert renderer().text(ids[:-1]) == "6 , 7"
    assert renderer(eos_ids=[]).text(ids) == "6 , 7" + tokenizer.eos_token
    assert renderer().is_end(tokenizer.eos_token_id)
    assert not renderer().is_end(ids[0])
    assert renderer().name(tokenizer.eos_token_id) == tokenizer.eos_token
    assert renderer().name(1 << 20) == ""


def test_a_turn_of_others_is_what_was_said(renderer, folder, text):
    """In 32 bits, closed or not; without calls it needs no template."""
    own, eos_id = renderer(), load_tokenizer(folder).eos_token_id
    assert own.said("hm", ()) == "hm"
    turns = [own.turn("hm", eos_id=eos_id), own.turn("hm", eos_id=None)]
    assert [text(turn) for turn in turns] == ["hm" + load_tokenizer(folder).eos_token, "hm"]
    assert {turn.dtype for turn in turns} == {np.dtype(np.int32)}


@pytest.mark.parametrize("behind", ["", "<|pad|>", "<|endoftext|>"])
def test_lines_begin_with_what_the_tokenizer_puts_before_a_text(renderer, folder, text, behind):
    """A bridge does not: it stands within one. Nothing ends with what is put behind, or the answer would be over."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    eos = load_tokenizer(folder).eos_token
    begins = {"id": eos, "ids": [load_tokenizer(folder).eos_token_id], "tokens": [eos]}
    single = [{"SpecialToken": {"id": eos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    single += [{"SpecialToken": {"id": behind, "type_id": 0}}] if behind else []
    ends = {"id": behind, "ids": load_tokenizer(folder).convert_tokens_to_ids([behind]), "tokens": [behind]}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {eos: begins} | ({behind: ends} if behind else {}),
    }
    file.write_text(json.dumps(content))
    own = renderer(assistant_prefill="A: ")
    assert text(own.opening([USER, USER])) == eos + "lower\nlower\nA: "
    assert text(own.plain("lower")) == eos + "lower"
    assert text(own.plain("lower" + eos)) == eos + "lower" + eos
    assert text(own.plain("")) == eos
    assert text(PromptEncoder(folder).token_ids("lower")) == eos + "lower\n"
    assert text(own.bridge([], (), [USER])) == "lower\nA: "


def test_tools_stand_in_the_beginning_of_every_row(renderer, text):
    """Where there are any, and in the row that follows a thought too."""
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    asked, reasoned = Message("user", "?"), Message("assistant", "<think>hm</think>5")
    own = renderer(FORGETFUL)
    assert text(own.opening([asked], tools)).startswith("<|im_start|>system\nlook_up: <tool_call>")
    assert "system" not in text(own.opening([asked]))
    anew = own.anew([asked, reasoned, USER], tools)
    assert anew is not None
    assert text(anew[0]) == text(own.opening([asked, Message("assistant", "5"), USER], tools))
    shows = renderer(FORGETFUL.replace("t.function.name", "messages[1:] | map(attribute='content') | join"))
    assert shows.anew([asked, reasoned, USER], tools) is None, "with the tools the template tells the thought"
    of_none = renderer("{{ 'tools' if tools is not none and tools is defined else 'none' }}" + CHATML)
    assert text(of_none.opening([asked])).startswith("none")


def test_thoughts_are_known_by_their_marks(renderer):
    """Templates look for either; the first end of several ends the thought, and all from `since` on may be one."""
    asked = Message("user", "?")
    by_begin = renderer(FORGETFUL.replace("loop.index0 < ns.last", "loop.index0 < ns.last and '<think>' in m.content"))
    assert by_begin.anew([asked, Message("assistant", "<think>hm</think>5"), USER]) is not None
    assert by_begin.anew([asked, Message("assistant", "hm</think>5"), USER]) is None
    by_end = renderer(FORGETFUL.replace("split('</think>')[-1]", "split('</think>', 1)[-1]"))
    twice = Message("assistant", "<think>hm</think>so</think>5")
    assert by_end.anew([asked, twice, USER]) is not None
    assert by_end.anew([twice, USER]) is not None, "the first message, too"
    with_calls = renderer(FORGETFUL.replace("loop.index0 < ns.last", "loop.index0 < ns.last and not m.tool_calls"))
    called = Message("assistant", "<think>hm</think>5", (CALL,))
    assert with_calls.anew([asked, called, TOOL, USER]) is None


def test_a_message_may_be_told_in_other_letters_and_not_left_out(renderer, text):
    """As JSON, say."""
    in_json = renderer(CHATML.replace("{{ m.content }}", "{{ m.content | tojson if m.role == 'tool' else m.content }}"))
    said = [Message("tool", 'a"b', name="look_up"), Message("tool", "c", name="look_up")]
    assert '"a\\"b"' in text(in_json.bridge([], (CALL,), said))
    leaves_out = renderer(CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}"))
    with pytest.raises(ModelFolderError, match="leaves out a message after a turn"):
        leaves_out.bridge([], (CALL,), said)


@pytest.mark.parametrize("template", [CHATML, HEADERS, ""])
def test_a_call_that_holds_the_placeholder_of_turns_cannot_be_said(renderer, template):
    """Nothing that a peer writes raises; a policy without a template has no way to say calls at all."""
    own = renderer(template)
    for call in (ToolCall(name="f", arguments='{"x":"XqTURNqX"}'), ToolCall(name="XqTURNqX", arguments="{}")):
        assert own.said("hm", (call,)) is None


def test_a_conversation_is_rendered_anew_where_the_template_drops_reasoning(renderer, text):
    """Behind a user's next message, not behind a tool's answer; nothing else makes a new row."""
    own = renderer(FORGETFUL)
    asked, reasoned = Message("user", "?"), Message("assistant", "<think>\nhm\n</think>\n\n5")
    anew = own.anew([asked, reasoned, USER])
    assert anew is not None
    assert text(anew[0]) == (
        "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
        "<|im_start|>user\nlower<|im_end|>\n<|im_start|>assistant\n"
    )
    called = Message("assistant", "<think>hm</think>", (CALL,))
    assert own.anew([asked, called, TOOL]) is None, "reasoning stays while its question is answered"
    assert own.anew([asked, called, TOOL, Message("assistant", "7"), USER]) is not None
    assert own.anew([asked, Message("assistant", "5"), USER]) is None, "no reasoning"
    assert own.anew([asked, reasoned, USER], since=2) is None, "it stands in an earlier row"
    assert renderer(CHATML).anew([asked, reasoned, USER]) is None, "the template keeps it"
    sees_all = renderer(FORGETFUL, history="sampled")
    assert sees_all.anew([asked, reasoned, USER]) is None
    assert anew[1] == 3, "the new row shows no reasoning"
    keeps_newest = renderer(KEEPS_NEWEST)
    assert keeps_newest.anew([asked, reasoned, USER]) is None
    anew = keeps_newest.anew([asked, reasoned, USER, reasoned, USER])
    assert anew is not None, "one of two is dropped"
    assert anew[1] == 3, "the other may be later"
    assert own.drops_reasoning
    assert sees_all.drops_reasoning, "whatever the policy sees"
    assert keeps_newest.drops_reasoning
    assert not renderer(CHATML).drops_reasoning
    begun = own.anew([asked, Message("assistant", "hm</think>5"), USER])
    assert begun is not None, "where the template itself begins the reasoning"
