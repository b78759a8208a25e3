"""A policy that names its family: its tool calls are read in episodes and at the gateway, as the family writes them."""

from contextlib import closing
from unittest.mock import Mock

import numpy as np
import pytest

from mrl.alignment.receiver import load_receiver
from mrl.config.load import validate
from mrl.config.policy_tables import PromptTable
from mrl.errors import ModelFolderError, RecordError
from mrl.models.families.family_renderer import turn_renderer_of
from mrl.models.tokenizers import train_byte_level
from mrl.processes.episode_setup import direct_codec, own_syntax, with_episodes
from mrl.processes.preparation.prompt_fit import check_prompts
from mrl.records.canonical_json import canonical_json
from mrl.records.direct_requests import DirectRequest
from mrl.records.episodes import Message, ToolCall, ToolSpec
from mrl.tasks.environments.tool_syntax import HERMES, NONE
from mrl.tasks.pool import build_pool

pytest.importorskip("renderers", reason="the extra `renderers` is not installed")
from tests.support.family_folders import write_family

LOOK_UP = ToolSpec(
    "look_up", "Looks up.", '{"properties":{"key":{"type":"string"},"n":{"type":"integer"}},"type":"object"}'
)
CALL = ToolCall.of("look_up", {"key": "7", "n": 7})
SAID = (
    "hm\n\n<tool_call>\n<function=look_up>\n<parameter=key>\n7\n</parameter>\n<parameter=n>\n7\n</parameter>\n"
    "</function>\n</tool_call>"
)
HERMES_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.fixture
def folder(tmp_path, tiny_model):
    tokenizer = write_family(tmp_path / "p", train_byte_level(["answer yah one two three"] * 3, 400), "qwen3.5")
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "p")
    return tmp_path / "p"


@pytest.fixture
def run(folder, tmp_path):
    def make(dataset="lookup", *, family="qwen3.5", source="environment", serve=False):
        options = {"size": 60} if source == "environment" else {}
        shape = {
            "run": {"name": "r", "steps": 1, "folder": str(tmp_path)},
            "tasks": {"game": {"source": source, "dataset": dataset, "options": options}},
            "policies": {"p": {"model": str(folder), "prompt": {"family": family}}},
            "gateway": {"serve": serve},
            "pool": {"train_prompts": 4, "held_out_prompts": 2},
        }
        return validate(shape, where="test")

    return make


def test_a_call_in_an_episode_is_read_by_the_tools_that_there_are(run, folder):
    """Its arguments have the types that the tools say; what stands before the call is kept."""
    config = run()
    with closing(build_pool(config.tasks, config.pool)) as pool:
        engine = with_episodes(Mock(), config, "p", pool, load_receiver(folder))
    codec = engine._setup.codec
    assert codec.can_call
    turn, message = codec.read(SAID, False, [LOOK_UP])
    assert (turn.tool_calls, turn.broken) == ((CALL,), ())
    assert message == Message("assistant", "hm\n\n", (CALL,))
    assert codec.read(SAID, False, [])[1] == Message("assistant", SAID), "there are no tools to call"
    assert codec.so_far("so <tool_", True) == "so "
    assert codec.so_far("so " + SAID, True) == "so hm\n\n"
    thought = f"<tool_call>no</think>{SAID}"
    assert codec.read(thought, False, [LOOK_UP])[0].tool_calls == (CALL,), "a call within reasoning is none"


@pytest.mark.parametrize(
    ("text", "is_cut", "words"),
    [
        (SAID.replace("</function>\n</tool_call>", ""), False, "unclosed block"),
        (SAID.replace("</function>\n</tool_call>", ""), True, "token limit"),
        ("<tool_call>\n</tool_call>", False, "malformed structure"),
        (SAID.replace("=look_up", f"={'look' * 20}"), False, "name"),
    ],
)
def test_a_call_that_cannot_be_read_is_told_of(folder, text, is_cut, words):
    """To the policy, in one line."""
    syntax = own_syntax(turn_renderer_of(folder, PromptTable(family="qwen3.5"), eos_ids=()))
    (broken,) = syntax.read(text, is_cut=is_cut, tools=[LOOK_UP.as_chat()]).broken
    assert words in broken.words


def test_a_program_that_asks_gets_the_calls_of_the_family(run, folder):
    """By the tools of its request."""
    receiver = load_receiver(folder)
    codec = direct_codec(run(), "p", receiver)
    tools = (canonical_json(LOOK_UP.as_chat()),)
    request = DirectRequest(request_id="a", seed=1, messages=(Message("user", "?"),), tools=tools)
    sampled = np.asarray(codec.renderer.turn(SAID, eos_id=receiver.eos_id), dtype=np.int32)
    assert codec.read(request, sampled, is_cut=False) == ("hm\n\n", (CALL,))


def test_calls_that_the_template_shows_are_read_by_it(folder):
    """As before; without a family, or without a known beginning of calls, those of this template are not read."""
    known = PromptTable(family="qwen3.5", chat_template=HERMES_TEMPLATE)
    assert own_syntax(turn_renderer_of(folder, known, eos_ids=())) is HERMES
    assert own_syntax(turn_renderer_of(folder, PromptTable(), eos_ids=())) is NONE
    by_family = turn_renderer_of(folder, PromptTable(family="qwen3.5"), eos_ids=())
    by_family.mark = ""
    assert own_syntax(by_family) is NONE


def told(config):
    """Notes of the check."""
    notes = []
    with closing(build_pool(config.tasks, config.pool)) as pool:
        check_prompts(config, "p", pool.prompts, notes.append)
    return [note for note in notes if "family" in note]


def test_the_check_says_what_a_family_is_used_for(run):
    """And where it changes nothing."""
    assert told(run()) == [
        "policies.p.prompt.family: renderers 0.1.12 parses tool calls; the chat template does the rest"
    ]
    assert told(run("higher_lower", family="")) == []


def test_a_template_that_leaves_tools_out_is_refused(run, folder):
    """A policy calls none that it has not been shown."""
    shown = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    for template in (HERMES_TEMPLATE, shown + HERMES_TEMPLATE):
        (folder / "chat_template.jinja").write_text(template)
        if template == HERMES_TEMPLATE:
            with pytest.raises(ModelFolderError, match=r"does not show the tool lookup of tasks\.game.*chat_template"):
                told(run(family=""))
        else:
            assert told(run(family="")) == []


def test_tools_without_readable_calls_name_the_key(run):
    """A family that does not help names another template."""
    with pytest.raises(ModelFolderError, match=r"has no tool-call format .*cure: set policies\.X\.prompt\.family, if"):
        told(run(family=""))


@pytest.mark.parametrize(
    ("family", "error"),
    [
        ("qwen9", r"^policies\.p\.prompt\.family = 'qwen9': the renderers package does not know this family"),
        ("glm-4.5", r"^policies\.p\.prompt\.family = 'glm-4\.5': the renderers package cannot use"),
        (
            "prime-qwen3",
            r"^policies\.p\.prompt\.family = 'prime-qwen3': the chat template and the family render a conversation",
        ),
    ],
)
def test_a_family_that_is_not_the_models_is_refused_before_the_run(run, family, error):
    """By its key, in one line; without episodes too."""
    for config in (run(family=family), run("trim", source="words", family=family)):
        with pytest.raises(ValueError, match=error):
            told(config)


def test_without_episodes_a_family_is_for_the_gateway(run):
    """Or for nothing, where the gateway serves nobody."""
    (note,) = told(run("trim", source="words", serve=True))
    assert "parses tool calls, only for gateway requests" in note
    (note,) = told(run("trim", source="words"))
    assert note.endswith("has no effect, because no task has episodes and the gateway serves nobody")


@pytest.mark.parametrize("shape", [{}, {"dataset": "trim", "source": "words", "serve": True}])
def test_what_a_family_says_of_tools_is_proved_wherever_it_reads_calls(run, folder, shape):
    """At the gateway too."""
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("\n<function=", "<function="))
    with pytest.raises(ModelFolderError, match="the family render a conversation differently"):
        told(run(**shape))


def test_a_draft_within_the_familys_reasoning_is_no_call(tmp_path):
    """Whatever mark ends it."""
    write_family(tmp_path, train_byte_level(["answer yah one two three"] * 3, 400), "gemma4")
    syntax = own_syntax(turn_renderer_of(tmp_path, PromptTable(family="gemma4"), eos_ids=()))
    call = '<|tool_call>call:look_up{key:<|"|>7<|"|>,n:7}<tool_call|>'
    thought = f"<|channel>thought\nperhaps {call.replace('7', '8')}<channel|>"
    turn = syntax.read(thought + call, tools=[LOOK_UP.as_chat()])
    assert (turn.tool_calls, turn.broken, turn.content) == ((CALL,), (), thought)
    assert syntax.read(f"{thought}It is 7.", tools=[LOOK_UP.as_chat()]).tool_calls == ()
    assert syntax.content_so_far(f"{thought}It <|tool") == f"{thought}It "


def test_too_much_text_is_refused_before_the_package_is_asked(folder, monkeypatch):
    """As it is without calls."""
    renderer = turn_renderer_of(folder, PromptTable(family="qwen3.5"), eos_ids=())
    monkeypatch.setattr(renderer, "calls", lambda *_: pytest.fail("asked"))
    with pytest.raises(RecordError, match="text of"):
        own_syntax(renderer).read(SAID + "x" * (1 << 20), tools=[LOOK_UP.as_chat()])
