"""A family by the package `renderers` and the chat template of a model: alike, or refused."""

import importlib.metadata
import itertools
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from mrl.config.policy_tables import PromptTable
from mrl.errors import ConfigError, MissingError, ModelFolderError
from mrl.models.families.family_calls import FamilyCall
from mrl.models.families.family_renderer import PROBE_TOOL, turn_renderer_of
from mrl.models.families.renderers_package import TRIED
from mrl.models.tokenizers import train_byte_level
from mrl.models.turn_renderer import TurnRenderer
from mrl.records.episodes import Message, ToolCall, as_chat

pytest.importorskip("renderers", reason="the extra `renderers` is not installed")
from tests.support.family_folders import TOKENS, write_family

USER = Message(role="user", content="lower")
TOOL = Message(role="tool", content="7", name="look_up")
CALL = ToolCall(name="look_up", arguments='{"key":"b"}')
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"}},
        },
    },
}
CALLED = "<tool_call>\n<function=look_up>\n<parameter=key>\n7\n</parameter>\n<parameter=n>\n7\n</parameter>\n"
WHOLE = f"{CALLED}</function>\n</tool_call>"


def called(**arguments):
    """A call with these arguments as they are written."""
    written = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items())
    return f"<tool_call>\n<function=look_up>\n{written}</function>\n</tool_call>"


def small_tokenizer():
    return train_byte_level(["answer yah one two three"] * 3, 400)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    write_family(root / "qwen3.5", small_tokenizer(), "qwen3.5")
    write_family(root / "gemma4", small_tokenizer(), "gemma4", tool=PROBE_TOOL)
    write_family(root / "glm-4.5", small_tokenizer(), "glm-4.5")
    write_family(root / "minimax-m2", small_tokenizer(), "minimax-m2")
    return root


@pytest.fixture(scope="module")
def spellings(folders):
    """By the family, by the folder's name."""

    def make(family, **prompt):
        tokenizer = TurnRenderer(folders / family, eos_ids=())._tokenizer
        ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|tool_response>")]
        eos_ids = [one for one in ends if one is not None]
        return turn_renderer_of(folders / family, PromptTable(family=family, **prompt), eos_ids=eos_ids)

    return {family: make(family) for family in TOKENS} | {"make": make}


def test_without_a_family_the_template_alone_is_asked(folders):
    """The package is not looked at."""
    assert type(turn_renderer_of(folders / "qwen3.5", PromptTable(), eos_ids=())) is TurnRenderer


def by_package(renderer, turn_ids, messages):
    before = renderer.opening([USER])[:1].tolist()
    found = renderer._renderer.bridge_to_next_turn(before, turn_ids, as_chat(messages))
    return found.token_ids[1 + len(turn_ids) :]


@given(said=st.text(max_size=20), told=st.text(max_size=20), num_tools=st.integers(0, 2), is_ended=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_template_and_package_have_one_bridge(spellings, said, told, num_tools, is_ended):
    """Token by token, behind any turn, to a user's message and to answers of tools."""
    renderer = spellings["qwen3.5"]
    end = renderer._tokenizer.eos_token_id
    turn = [*renderer._ids(said).tolist(), *[end] * is_ended]
    messages = [Message(role="tool", content=told, name="look_up")] * num_tools or [Message("user", told)]
    own = super(type(renderer), renderer).bridge(turn, (CALL,) * num_tools, messages)
    assert own.tolist() == by_package(renderer, turn, messages)
    assert renderer.bridge(turn, (CALL,) * num_tools, messages).tolist() == own.tolist()


@pytest.mark.thorough
def test_both_have_one_bridge_by_a_real_vocabulary(tmp_path):
    """That of Qwen, with words and marks of every kind around the turn."""
    for package in ("dashscope", "sentencepiece"):
        pytest.importorskip(package)
    import real_vocabularies

    from mrl.alignment.card_text import card_texts

    folder = real_vocabularies.make_folder("qwen", tmp_path)
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    write_family(tmp_path / "family", tokenizer, "qwen3.5")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    renderer = turn_renderer_of(tmp_path / "family", PromptTable(family="qwen3.5"), eos_ids=[end])
    renderer.check(has_tools=True)
    assert renderer.mark == "<tool_call>"
    texts = [text for rows in card_texts().values() for text in rows[:: max(1, len(rows) // 20)]]
    assert len(texts) > 60
    for said, told in itertools.pairwise(texts):
        turn = [*renderer._ids(said).tolist(), end]
        for calls, message in (((), Message("user", told)), ((CALL,), Message("tool", told, name="look_up"))):
            if "<think>" in said or "<|im_end|>" in said:  # reasoning that stays open is ended by the package
                continue
            assert renderer.bridge(turn, calls, [message]).tolist() == by_package(renderer, turn, [message])


@pytest.mark.parametrize(
    ("family", "bridged", "mark"), [("qwen3.5", set(), "<tool_call>"), ("gemma4", {"tool"}, "<|tool_call>")]
)
def test_what_both_say_alike_passes(spellings, family, bridged, mark):
    """For users' messages and tools' answers; what the package alone can do is known then."""
    spellings["make"](family, system="Be brief.", assistant_prefill="So").check(has_tools=False)
    renderer = spellings["make"](family)
    for has_tools in (False, True):
        renderer.check(has_tools=has_tools)
    assert renderer.bridged == bridged
    assert renderer.mark == mark


@pytest.mark.parametrize(
    ("old", "new", "has_tools", "got"),
    [
        ("assistant\n<think>\n", "assistant\n<think>", False, "'nt\\n<think>'; wanted 'nt\\n<think>\\n'"),
        ("<|im_end|>\n{%", "<|im_end|>{%", False, "<|im_end|><|im_start|>assistant"),
        ("trim }}\n</tool", "trim }}</tool", True, "B\\n</tool_res'"),
        ("\n<function=", "<function=", True, "<tool_call>\\n<function='"),
    ],
)
def test_a_template_that_says_otherwise_is_refused(folders, spellings, old, new, has_tools, got):
    """With what both say, and no run."""
    changed = TurnRenderer(folders / "qwen3.5", eos_ids=()).template.replace(old, new)
    renderer = spellings["make"]("qwen3.5", chat_template=changed)
    with pytest.raises(ModelFolderError, match="the family render a conversation differently") as caught:
        renderer.check(has_tools=has_tools)
    assert str(caught.value).startswith("prompt.family = 'qwen3.5': the chat template")
    assert got in str(caught.value)


def test_ids_that_differ_are_refused_where_the_text_is_one(spellings, monkeypatch):
    """As of a package that cuts the text of a bridge into other tokens."""
    renderer = spellings["make"]("qwen3.5")
    whole = renderer._renderer.render

    def split(messages, **given):
        found = whole(messages, **given)
        place = max(
            at
            for at, token in enumerate(found.token_ids)
            if len(renderer.name(token)) > 1 and at < len(found.token_ids) - 1
        )
        parts = [renderer._tokenizer.convert_tokens_to_ids(piece) for piece in renderer.name(found.token_ids[place])]
        if None in parts:
            return found
        found.token_ids[place : place + 1] = parts
        for rows in (found.message_indices, found.sampled_mask):
            rows[place : place + 1] = [rows[place]] * len(parts)
        return found

    renderer.check(has_tools=False)
    monkeypatch.setattr(renderer._renderer, "render", split)
    with pytest.raises(ModelFolderError, match="differently"):
        renderer.check(has_tools=False)


def test_the_package_goes_on_where_the_template_has_no_way(folders, spellings):
    """What was sampled stands there unchanged, and the answer behind it."""
    renderer = spellings["gemma4"]
    turn = renderer._ids('hm<|tool_call>call:look_up{key:<|"|>b<|"|>}<tool_call|><|tool_response>').tolist()
    with pytest.raises(ModelFolderError, match="when later ones are added"):
        TurnRenderer(folders / "gemma4", eos_ids=()).bridge(turn, (CALL,), [TOOL])
    found = renderer.bridge(turn, (CALL,), [TOOL])
    assert renderer._decoded(found) == 'response:look_up{value:<|"|>7<|"|>}<tool_response|>'
    assert found.tolist() == by_package(renderer, turn, [TOOL])
    begun = spellings["make"]("gemma4", assistant_prefill="So")
    assert begun.text(begun.bridge(turn, (CALL,), [TOOL]).tolist()).endswith("<tool_response|>So")


@pytest.mark.parametrize("end", ["", "<turn|>", "<eos>"])
def test_behind_a_turn_that_ended_otherwise_the_familys_end_stands_first(spellings, end):
    """As behind a stop string: the call is answered, whatever closed it."""
    renderer = spellings["gemma4"]
    turn = renderer._ids(f'<|tool_call>call:look_up{{key:<|"|>b<|"|>}}<tool_call|>{end}').tolist()
    found = renderer._decoded(renderer.bridge(turn, (CALL,), [TOOL]))
    assert found == '<|tool_response>response:look_up{value:<|"|>7<|"|>}<tool_response|>'
    nameless = [Message("tool", "7"), Message("tool", "no call")]
    found = renderer._decoded(renderer.bridge(turn, (CALL,), nameless))
    assert "response:look_up{" in found
    assert "response:unknown{" in found


def test_the_answer_to_a_broken_call_stands_in_the_row(folders, spellings):
    """Though the template says answers behind calls alone, as Gemma's does."""
    template = TurnRenderer(folders / "gemma4", eos_ids=()).template
    skips = template.replace(
        "{% if m.role == 'tool' %}",
        "{% set calls = messages | selectattr('tool_calls', 'defined') | list %}"
        "{% if m.role == 'tool' and not calls %}{% elif m.role == 'tool' %}",
    )
    assert skips != template
    renderer = spellings["make"]("gemma4", chat_template=skips)
    renderer.check(has_tools=True)
    turn = renderer._ids("<|tool_call>zzz<tool_call|><|tool_response>").tolist()
    told = [Message("tool", "error: the tool call cannot be read")]
    found = renderer._decoded(renderer.bridge(turn, (), told))
    assert found == f'response:unknown{{value:<|"|>{told[0].content}<|"|>}}<tool_response|>'
    alone = TurnRenderer(folders / "gemma4", PromptTable(chat_template=skips), eos_ids=())
    with pytest.raises(ModelFolderError, match="leaves out a message after a turn"):
        alone.bridge(turn, (), told)


def test_turns_that_the_family_ends_by_no_eos_are_refused(folders):
    """Sampling would go on behind a call; one line says which id is missing."""
    tokenizer = TurnRenderer(folders / "gemma4", eos_ids=())._tokenizer
    renderer = turn_renderer_of(folders / "gemma4", PromptTable(family="gemma4"), eos_ids=[tokenizer.eos_token_id])
    renderer.check(has_tools=False)
    with pytest.raises(
        ModelFolderError,
        match=r"not an EOS of the model; got '<turn\|>'; wanted <\|tool_response>; cure: add \d+ to eos",
    ):
        renderer.check(has_tools=True)


def test_the_package_goes_on_behind_nothing_but_what_was_proved(folders, spellings):
    """A message that the template refuses stays refused, though the package can write it."""
    template = TurnRenderer(folders / "gemma4", eos_ids=()).template
    strict = "{% if messages[-1].role == 'system' %}{{ raise_exception('no orders here') }}{% endif %}" + template
    renderer = spellings["make"]("gemma4", chat_template=strict)
    renderer.check(has_tools=True)
    order = [Message("system", "shout")]
    assert by_package(renderer, [5], order)
    with pytest.raises(ModelFolderError, match="no orders here"):
        renderer.bridge([5], (), order)


def test_a_family_that_cannot_be_rendered_is_refused(folders, monkeypatch):
    """In one line, whatever its code raises."""
    renderer = turn_renderer_of(folders / "qwen3.5", PromptTable(family="qwen3.5"), eos_ids=())
    monkeypatch.setattr(type(renderer._renderer), "render", lambda *_, **__: 1 / 0)
    with pytest.raises(ModelFolderError, match=r"'qwen3\.5': .* cannot render a conversation .*division by zero"):
        renderer.check(has_tools=False)
    again = turn_renderer_of(folders / "qwen3.5", PromptTable(family="qwen3.5"), eos_ids=())
    assert (again.mark, again.bridged) == ("", frozenset())


def test_a_bridge_that_changes_what_was_sampled_is_none(spellings, monkeypatch):
    """Neither in a run nor in the proof before it."""
    renderer = spellings["make"]("gemma4")
    honest = renderer._renderer.bridge_to_next_turn

    def forgetful(before, said, messages):
        found = honest(before, said, messages)
        return found and SimpleNamespace(token_ids=[*before, *found.token_ids[len(before) + 1 :]])

    turn = renderer._ids('hm<|tool_call>call:look_up{key:<|"|>b<|"|>}<tool_call|><|tool_response>').tolist()
    assert renderer.bridge(turn, (CALL,), [TOOL]).size
    monkeypatch.setattr(renderer._renderer, "bridge_to_next_turn", forgetful)
    for refused in (lambda: renderer.bridge(turn, (CALL,), [TOOL]), lambda: renderer.check(has_tools=True)):
        with pytest.raises(ModelFolderError, match="when later ones are added"):
            refused()


def test_a_bridge_that_says_otherwise_than_a_rendering_is_none(spellings, monkeypatch):
    """Told before the run."""
    renderer = spellings["make"]("gemma4")
    honest = renderer._renderer.bridge_to_next_turn

    def longer(*given):
        found = honest(*given)
        return found and SimpleNamespace(token_ids=[*found.token_ids, 5])

    monkeypatch.setattr(renderer._renderer, "bridge_to_next_turn", longer)
    with pytest.raises(ModelFolderError, match="when later ones are added"):
        renderer.check(has_tools=True)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (WHOLE, [FamilyCall("look_up", {"key": "7", "n": 7}, "")]),
        (f"{WHOLE}\n{WHOLE}", [FamilyCall("look_up", {"key": "7", "n": 7}, "")] * 2),
        (CALLED, [FamilyCall("", None, "unclosed block")]),
        (called(b="True", key="True"), [FamilyCall("look_up", {"b": True, "key": "True"}, "")]),
        (called(n="None"), [FamilyCall("look_up", {"n": None}, "")]),
        (called(b="True", n="seven"), [FamilyCall("look_up", None, "invalid json")]),
        (called(other="True"), [FamilyCall("look_up", None, "invalid json")]),
        ("<tool_call>\n</tool_call>", [FamilyCall("", None, "malformed structure")]),
        ("<tool_call>", [FamilyCall("", None, "unclosed block")]),
        ("", [FamilyCall("", None, "no call")]),
    ],
)
def test_calls_are_read_as_the_family_writes_them(spellings, text, calls):
    """Which arguments are texts, the tools say: the family writes "7" and 7 alike."""
    found = spellings["qwen3.5"].calls(text, [LOOK_UP])
    assert [(one.name, one.fault) for one in found] == [(one.name, one.fault) for one in calls]
    assert [one.arguments for one in found if not one.fault] == [one.arguments for one in calls if not one.fault]


@given(
    pieces=st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "<function=",
                ">",
                "</function>",
                "<parameter=n>",
                "\n",
                "x",
                "<think>",
                "</think>",
                "<|im_end|>",
                '{"',
                "\udc00"[:0],
            ]
        ),
        max_size=12,
    )
)
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("family", ["qwen3.5", "gemma4"])
def test_whatever_a_policy_says_is_read(spellings, family, pieces):
    """As whole calls or as faults; nothing raises."""
    renderer = spellings[family]
    found = renderer.calls(renderer.mark + "".join(pieces), [LOOK_UP])
    assert found
    assert all(one.fault or (one.name and isinstance(one.arguments, dict)) for one in found)


TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "said", "value"),
    [
        ({"enum": ["c", "7"]}, "c", "c"),
        ({"enum": ["c", "7"]}, "7", "7"),
        ({"const": "c"}, "c", "c"),
        ({"anyOf": [{"enum": ["a"]}, {"type": "null"}]}, "a", "a"),
        ({"$ref": "#/$defs/unit"}, "c", "c"),
        ({"$ref": "#/$defs/loop"}, "c", "c"),
        ({"type": ["string", "null"]}, "c", "c"),
        ({"type": ["string", "null"]}, "None", None),
        (TEXT_OR_NULL, "7", "7"),
        (TEXT_OR_NULL, "true", "true"),
        (TEXT_OR_NULL, "None", None),
        (TEXT_OR_NULL, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "7", 7),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "True", "True"),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "7", "7"),
        ({"enum": [1, 2]}, "2", 2),
        ({"type": "boolean"}, "True", True),
        (True, "c", "c"),
        (True, "7", 7),
    ],
)
def test_an_argument_is_of_a_type_that_its_tool_allows(spellings, schema, said, value):
    """Text wherever the schema says so, in whatever words."""
    defs = {"unit": {"enum": ["c"]}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]}}
    parameters = {"properties": {"x": schema}, "$defs": defs}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": parameters}}
    assert spellings["qwen3.5"].calls(called(x=said), [tool]) == [FamilyCall("look_up", {"x": value}, "")]


def test_a_text_that_the_family_marks_stays_text(spellings):
    """Gemma says which arguments are texts."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": TEXT_OR_NULL}}}}
    said = '<|tool_call>call:f{x:<|"|>None<|"|>}<tool_call|>'
    assert spellings["gemma4"].calls(said, [tool]) == [FamilyCall("f", {"x": "None"}, "")]


@pytest.mark.parametrize("parameters", [{}, {"parameters": None}, {"parameters": {"properties": True}}])
def test_a_tool_without_arguments_is_called(spellings, parameters):
    """Whatever it says in their place."""
    tool = {"type": "function", "function": {"name": "look_up"} | parameters}
    assert spellings["qwen3.5"].calls(called(), [tool]) == [FamilyCall("look_up", {}, "")]
    assert spellings["qwen3.5"].calls(called(x="c"), [tool])[0].fault == "invalid json"


GLM = "<tool_call>{name}\n<arg_key>key</arg_key>\n<arg_value>7</arg_value>\n</tool_call>"
MINIMAX = '<invoke name="look_up">\n<parameter name="key">7</parameter>\n</invoke>\n'
GEMMA = '<|tool_call>call:{name}{{key:<|"|>7<|"|>}}<tool_call|>'


@pytest.mark.parametrize(
    ("family", "said"),
    [("glm-4.5", GLM.format(name="gone")), ("gemma4", GEMMA.format(name="gone"))],
)
def test_whether_there_is_such_a_tool_the_environment_says(spellings, family, said):
    """As for families that leave it open."""
    (call,) = spellings[family].calls(said, [LOOK_UP])
    assert (call.name, call.fault) == ("gone", "")


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("qwen3.5", called(key="7", n="7").replace("\n</parameter>", "", 1)),
        ("qwen3.5", called(key="7").replace("</parameter>", "")),
        ("qwen3.5", called(key="7").replace("=key>", "=key")),
        ("qwen3.5", called(key="7").replace("</function>", "</function><function=look_up></function>")),
        ("glm-4.5", GLM.format(name="look_up").replace("<arg_value>", "<arg_key>n</arg_key><arg_value>")),
        ("minimax-m2", f"<minimax:tool_call>{MINIMAX}{MINIMAX[:-11]}</minimax:tool_call>"),
        ("minimax-m2", f"<minimax:tool_call>{MINIMAX}</minimax:tool_call>".replace("</parameter>", "")),
    ],
)
def test_a_call_that_would_lose_a_part_is_broken(spellings, family, said):
    """Tags that are not closed; a call in another one's block."""
    assert spellings[family].calls(said, [LOOK_UP]) == [FamilyCall("", None, "malformed structure")]


@pytest.mark.parametrize(
    ("family", "said", "num_calls"),
    [
        ("qwen3.5", called(key="a <function=b> <parameter= c"), 1),
        ("qwen3.5", called(key="7").replace("</function>\n", ""), 1),
        ("glm-4.5", GLM.format(name="look_up").replace("7", "<function=a>") * 2, 2),
        ("minimax-m2", f"<minimax:tool_call>{MINIMAX * 2}</minimax:tool_call>" * 2, 4),
        ("gemma4", GEMMA.format(name="look_up").replace("7", "<parameter=a>"), 1),
    ],
)
def test_whole_calls_are_read_with_tags_in_their_texts(spellings, family, said, num_calls):
    """Those of other kinds than what holds them."""
    assert [call.fault for call in spellings[family].calls(said, [LOOK_UP])] == [""] * num_calls


@pytest.mark.parametrize(("family", "end"), [("qwen3.5", "<|endoftext|>"), ("glm-4.5", "<|user|>")])
def test_a_call_behind_the_end_of_a_turn_is_told(spellings, family, end):
    """The package reads nothing there."""
    said = WHOLE if family == "qwen3.5" else GLM.format(name="look_up")
    one, other = spellings[family].calls(f"{said}{end}{said}", [LOOK_UP])
    assert not one.fault
    assert "after the end of the turn" in other.fault


@pytest.mark.parametrize("tag", ["<parameter=a>", "<parameter=", "<function="])
@pytest.mark.timeout(20)
def test_tags_without_end_take_no_time(spellings, tag):
    """The package would look through all that follows at each of them."""
    said = f"<tool_call><function=f>{tag * 4000}{' ' * 900_000}</tool_call>"
    assert spellings["qwen3.5"].calls(said, [LOOK_UP]) == [FamilyCall("", None, "malformed structure")]


def test_no_more_calls_are_read_than_a_turn_may_make(spellings):
    """And one, which tells that there were more."""
    assert len(spellings["qwen3.5"].calls(WHOLE * 100, [LOOK_UP])) == 65


def test_letters_stay_as_they_were_sampled(tmp_path):
    """Under a tokenizer that composes them."""
    tokenizer = small_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    write_family(tmp_path, tokenizer, "qwen3.5")
    renderer = turn_renderer_of(tmp_path, PromptTable(family="qwen3.5"), eos_ids=())
    (call,) = renderer.calls(called(key="cafe\u0301"), [LOOK_UP])
    assert call.arguments == {"key": "cafe\u0301"}
    assert isinstance(renderer._tokenizer.backend_tokenizer.normalizer, normalizers.NFC)


def test_the_folders_path_tells_the_package_nothing(folders):
    """It would look for names of models in it."""
    renderer = turn_renderer_of(folders / "qwen3.5", PromptTable(family="qwen3.5"), eos_ids=())
    assert renderer._renderer._tokenizer.name_or_path == ""
    assert renderer._tokenizer.name_or_path


def test_a_parser_that_raises_has_found_no_call(spellings, monkeypatch):
    """It is somebody else's code, and reads what a policy made up."""
    renderer = spellings["make"]("qwen3.5")
    monkeypatch.setattr(renderer._renderer, "parse_response", lambda *_, **__: 1 / 0)
    assert renderer.calls(WHOLE, []) == [FamilyCall("", None, "malformed structure")]


def test_a_family_needs_its_package(spellings, monkeypatch):
    """In the version that was tried; else one line says how to get it."""

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(MissingError) as caught:
        spellings["make"]("qwen3.5")
    assert str(caught.value) == (
        "prompt.family = 'qwen3.5': the renderers package is not installed; cure: pip install 'mrl[renderers]'"
    )
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2")
    with pytest.raises(
        MissingError, match=rf"version of the renderers package is not supported; got '0\.2'; wanted {TRIED}; cure: pip"
    ):
        spellings["make"]("qwen3.5")


def test_a_family_that_is_not_known_or_not_the_models_is_refused(folders):
    """With the names that there are; with the token that is not there."""
    with pytest.raises(
        ConfigError, match=r"'qwen9': the renderers package does not know this family; wanted .*glm-4\.5.*qwen3\.5"
    ):
        turn_renderer_of(folders / "qwen3.5", PromptTable(family="qwen9"), eos_ids=())
    with pytest.raises(ModelFolderError, match=r"'glm-4\.5': .*cannot use the model's tokenizer.*\[gMASK\]"):
        turn_renderer_of(folders / "qwen3.5", PromptTable(family="glm-4.5"), eos_ids=())


def test_options_of_the_template_are_the_familys_too(folders, spellings):
    """Those that it knows; they have to do the same in both."""
    template = TurnRenderer(folders / "qwen3.5", eos_ids=()).template
    options = {"enable_thinking": False, "mood": "good"}
    reads = template.replace(
        "assistant\n<think>\n", "assistant\n{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}"
    )
    spellings["make"]("qwen3.5", chat_template=reads, template_options=options).check(has_tools=True)
    with pytest.raises(ModelFolderError, match="differently"):
        spellings["make"]("qwen3.5", chat_template=template, template_options=options).check(has_tools=False)
    with pytest.raises(ModelFolderError, match="or template options"):
        spellings["make"]("qwen3.5", template_options={"enable_thinking": "perhaps"})


def test_a_model_without_a_template_has_nothing_to_hold_a_family_against(tmp_path):
    """Lines of text are no family's way."""
    tokenizer = write_family(tmp_path, small_tokenizer(), "qwen3.5")
    tokenizer.chat_template = None
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelFolderError, match=r"no chat template to compare prompt\.family with"):
        turn_renderer_of(tmp_path, PromptTable(family="qwen3.5"), eos_ids=())
