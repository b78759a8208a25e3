"""Bridges between turns, by templates with the traps of released ones, under real and made vocabularies."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import real_vocabularies

from mrl.config.policy_tables import PromptTable
from mrl.errors import ModelFolderError
from mrl.models.turn_bridge import Branch, Bridge, Said, TurnBridge

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_THOUGHT = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in c and loop.index0 < ns.last %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{{ c }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if no_thought is defined %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA = (
    "<|begin|>{% for m in messages %}<|start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|head|>\n\n"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}<|eom|>{% else %}{{ m.content | trim }}"
    "<|eot|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|head|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 or not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('an answer without its call') }}{% endif %}"
    "[TOOL_RESULTS] {{ m.content }} {{ m.tool_call_id }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS] {{ m.tool_calls | tojson }}</s>{% else %} {{ m.content }}</s>{% endif %}"
    "{% endfor %}"
)
ENDS_TURNS = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
REORDERS = "{% for m in messages[::-1] %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ONE_TURN = (
    "{% if messages | length > 1 %}{{ raise_exception('one message alone') }}{% endif %}{{ messages[0].content }}"
)
CALL = {"type": "function", "function": {"name": "look", "arguments": {"key": "b"}}}
USER = [{"role": "user", "content": "Guess."}]


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(characters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def spaced_tokenizer() -> Tokenizer:
    """Characters, and a space before the first word of a text, as Llama 2's tokenizer has it."""
    characters = ["\u2581", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(characters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, template: str, specials: tuple[str, ...]) -> Path:
    """A model folder without weights; the first of the special tokens is its EOS."""
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": specials[0]}
    settings |= {"clean_up_tokenization_spaces": False} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.fixture(scope="module")
def vocabularies(request) -> dict[str, Path]:
    """Folders of two families; made once and kept by pytest's cache."""
    key = hashlib.sha256(Path(real_vocabularies.__file__).read_bytes()).hexdigest()[:16]
    root = Path(request.config.cache.mkdir("vocabularies")) / key
    return {name: real_vocabularies.make_folder(name, root) for name in ("qwen", "mistral_spm")}


@pytest.fixture
def made(tmp_path, monkeypatch, vocabularies):
    """Bridges for a vocabulary, an EOS and a template."""
    monkeypatch.setattr("mrl.models.load_policy.check_folder", lambda folder: None)

    def make(vocabulary, eos, template, more=(), **prompt):
        known = vocabularies.get(vocabulary)
        made_here = {"bytes": byte_tokenizer, "spaced": spaced_tokenizer}
        tokenizer = Tokenizer.from_file(str(known / "tokenizer.json")) if known else made_here[vocabulary]()
        folder = write_folder(tmp_path / "policy", tokenizer, template, (eos, *more))
        return TurnBridge(folder, PromptTable(**prompt), policy="amber")

    return make


def end_of(bridge: TurnBridge, token: str) -> int:
    """The id of a special token."""
    return int(bridge._tokenizer.convert_tokens_to_ids(token))


def spelled(bridge: TurnBridge, ids) -> str:
    """The text of ids, special tokens in it."""
    return str(bridge._tokenizer.decode(list(ids), skip_special_tokens=False))


def row_of(bridge: TurnBridge, said: Said, after, tools=()) -> str:
    """The whole row as text: prompt, what was sampled, and the bridge."""
    found = bridge.between(USER, said, after, tools)
    assert isinstance(found, Bridge), found
    assert spelled(bridge, found.ids) == found.text
    sampled = said.text + ("" if said.end_id is None else spelled(bridge, [said.end_id]))
    return spelled(bridge, bridge.first(USER, tools)) + sampled + found.text


HIGHER = [{"role": "user", "content": "higher"}]


@pytest.mark.parametrize(("text", "is_cut"), [("5", False), ("5  \n", False), ("I gue", True)])
def test_the_separator_and_the_end_of_a_cut_turn_are_the_bridges(made, text, is_cut):
    """The newline behind <|im_end|> was never sampled; of a cut turn its end neither. Trimmed text stays."""
    bridge = made("qwen", "<|im_end|>", CHATML)
    end_id = None if is_cut else end_of(bridge, "<|im_end|>")
    assert row_of(bridge, Said(text, end_id), HIGHER) == (
        "<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n"
        + text
        + "<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    )
    found = bridge.between(USER, Said(text, end_id), HIGHER)
    assert found.end == ("cut" if is_cut else "closed")
    assert found.text.startswith("<|im_end|>\n" if is_cut else "\n<|im_start|>")


def test_an_eos_that_the_template_does_not_have_stays(made):
    """The row keeps it, for it was sampled; the template's own end stands behind it."""
    bridge = made("qwen", "<|im_end|>", CHATML)
    found = bridge.between(USER, Said("5", end_of(bridge, "<|endoftext|>")), HIGHER)
    assert found.end == "foreign"
    assert found.text.startswith("<|im_end|>\n<|im_start|>user")


def test_another_end_of_the_template_takes_the_place_of_its_own(made):
    """Llama's <|eom_id|> closes a turn as <|eot_id|> does."""
    bridge = made("qwen", "<|eot|>", LLAMA, ("<|begin|>", "<|start|>", "<|head|>", "<|eom|>"))
    found = bridge.between(USER, Said("5", end_of(bridge, "<|eom|>")), HIGHER)
    assert (found.end, found.text) == ("other", "<|start|>user<|head|>\n\nhigher<|eot|><|start|>assistant<|head|>\n\n")
    assert spelled(bridge, found.ids) == found.text


def test_dropped_reasoning_begins_a_row_anew(made):
    """A new question drops it: a branch, with the prompt as rendered anew. A tool's answer keeps it: a bridge."""
    bridge = made("qwen", "<|im_end|>", DROPS_THOUGHT)
    said = Said("<think>\nhm\n</think>\n\n5", end_of(bridge, "<|im_end|>"))
    branch = bridge.between(USER, said, HIGHER)
    assert isinstance(branch, Branch)
    assert branch.why == "earlier reasoning is dropped"
    assert spelled(bridge, branch.ids) == branch.text
    assert branch.text == (
        "<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
        "<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    )
    assert branch.kept.text == "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    assert isinstance(bridge.between(USER, said, [{"role": "tool", "content": "7"}]), Bridge)


def test_reasoning_that_the_prompt_closes_is_a_branch_too(made):
    """Where the template puts an empty thought into the prompt and leaves it out of later turns."""
    bridge = made("qwen", "<|im_end|>", DROPS_THOUGHT, template_options={"no_thought": True})
    branch = bridge.between(USER, Said("5", end_of(bridge, "<|im_end|>")), HIGHER)
    assert isinstance(branch, Branch)
    assert branch.why == "earlier turns differ"


def test_tools_are_answered_behind_calls_that_the_template_spells_itself(made):
    """Mistral's wants to see the calls, with ids of nine characters; what was sampled stays as it was sampled."""
    bridge = made("mistral_spm", "</s>", MISTRAL)
    bridge.check_tools([CALL])
    said = Said('[TOOL_CALLS][{"name":"look",  "arguments":{"key":"b"}}]', end_of(bridge, "</s>"), (CALL,))
    found = bridge.between(USER, said, [{"role": "tool", "content": "7", "name": "look"}], [CALL])
    assert isinstance(found, Bridge)
    assert found.text == "[TOOL_RESULTS] 7 call00000[/TOOL_RESULTS]"
    assert spelled(bridge, found.ids).replace(" ", "") == found.text.replace(" ", "")


def test_a_text_behind_a_special_token_gets_no_dummy_prefix(made):
    """The vocabulary puts a space before a text's first word; a bridge is no text of its own."""
    bridge = made("spaced", "</s>", ENDS_TURNS)
    found = bridge.between(USER, Said("5", end_of(bridge, "</s>")), HIGHER)
    assert bridge._tokenizer.convert_ids_to_tokens(found.ids.tolist()) == list("higher")


def test_a_model_without_a_template_reads_lines(made):
    """Its own turns end with its EOS, those of the environment with a line break."""
    bridge = made("bytes", "<|endoftext|>", "")
    assert bridge.template == ""
    assert row_of(bridge, Said("5", end_of(bridge, "<|endoftext|>")), HIGHER) == "Guess.\n5<|endoftext|>higher\n"
    assert row_of(bridge, Said("5", None), HIGHER) == "Guess.\n5<|endoftext|>higher\n"


def test_what_stands_around_a_prompt_stands_there_once(made):
    """System message and examples before the first turn, the text that a turn begins with before every turn."""
    bridge = made("qwen", "<|im_end|>", CHATML, system="Play.", assistant_prefill="So:")
    first = spelled(bridge, bridge.first(USER))
    assert (
        first == "<|im_start|>system\nPlay.<|im_end|>\n<|im_start|>user\nGuess.<|im_end|>\n<|im_start|>assistant\nSo:"
    )
    found = bridge.between(USER, Said("5", end_of(bridge, "<|im_end|>")), HIGHER)
    assert isinstance(found, Bridge)
    assert found.text == "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\nSo:"


@pytest.mark.parametrize(
    ("template", "told"), [(REORDERS, "new messages do not stand behind"), (ONE_TURN, "one message alone")]
)
def test_a_template_that_cannot_go_on_is_refused(made, template, told):
    """In one line that names policy and file."""
    with pytest.raises(ModelFolderError, match=told) as caught:
        made("qwen", "<|im_end|>", template)
    assert "policies.amber" in str(caught.value)
    assert "tokenizer_config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_date_that_changes_is_asked_again(made, monkeypatch):
    """Midnight between two renderings is no branch."""
    days = iter(["24", "25", "25", "25", "25", "25", "25"])
    bridge = made("qwen", "<|im_end|>", CHATML)
    rendered = TurnBridge._rendered
    monkeypatch.setattr(TurnBridge, "_rendered", lambda *given, **named: next(days) + rendered(*given, **named))
    assert isinstance(bridge.between(USER, Said("5", None), HIGHER), Bridge)
