r"""The tokens between what a policy sampled and its next turn, by its chat template; what was sampled stays as it is.

    prompt │ sampled ... <|im_end|> │ \n<|im_start|>user\n ... <|im_end|>\n<|im_start|>assistant\n │ sampled ...
             never rendered again     the bridge: what the template puts behind the turn

The conversation is rendered without and with the new messages. In place of what the policy said in its last turn stands
a mark, because a template may trim or spell it otherwise. What is rendered has to begin with what was there, and the
bridge is what stands behind the mark; so it is right whatever the policy said.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt

from mrl.config.policy_tables import PromptTable
from mrl.errors import ModelFolderError
from mrl.models.chat_template import AS_IT_IS, refused
from mrl.models.load_policy import load_tokenizer

Chat = dict[str, Any]
"""A message as chat templates take it; that of the policy holds all of what it said as `content`, its calls in it, and
the calls besides as `tool_calls`."""
Ids = npt.NDArray[np.int32]

PLAIN = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
)
"""How a model without a chat template is asked: lines of the environment, and its own turns, each up to its EOS."""
MARK, THOUGHT = "Zq7xSAIDk9", "Zq7xTHOUGHTk9"
OPEN_THOUGHT, CLOSE_THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Said:
    """What a policy sampled in its last turn: its text without the token that ended it, and that token.

    `end_id` is None for a turn that was cut, and for one that ended with a stop string.
    """

    text: str
    end_id: int | None
    tool_calls: tuple[Chat, ...] = ()
    """Its calls, each {"type": "function", "function": {"name": ..., "arguments": {...}}}."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """What stands between a turn and the next one: `ids` [B] int32, given by the environment and never trained on.

    `end` says how the turn ended: "closed" by the template's own token, "cut" where the bridge closes it, "other" for
    another token that the template ends turns with, "foreign" for an EOS that it does not know, which stays in the row
    with the template's own one behind it.
    """

    text: str
    ids: Ids
    end: str


@dataclass(frozen=True, slots=True)
class Branch:
    """The row cannot go on, because the template now renders what was there otherwise: a new row begins.

    `ids` [P] int32 are its prompt, the whole conversation as the template has it. `kept` is the bridge with which the
    old row could go on all the same, as a policy would see that was never rendered anew.
    """

    text: str
    ids: Ids
    kept: Bridge
    why: str


class TurnBridge:
    """Prompts, and what stands between turns, under one policy's tokenizer and chat template."""

    def __init__(self, folder: Path, prompt: PromptTable = AS_IT_IS, *, policy: str = "") -> None:
        """Raises ModelFolderError, with policy and template, where no conversation of two turns can be told apart."""
        self._folder, self._prompt, self._policy = folder, prompt, policy
        self._tokenizer = load_tokenizer(folder)
        template = prompt.chat_template or self._tokenizer.chat_template or ""
        self._is_plain = not template
        self._template = str(template) or PLAIN
        self._special_tokens = {
            name: token for name, token in self._tokenizer.special_tokens_map.items() if isinstance(token, str)
        }
        self._with_calls = False
        self._check([{"role": "user", "content": "b"}])

    @property
    def template(self) -> str:
        """The chat template; "" for a model without one."""
        return "" if self._is_plain else self._template

    def check_tools(self, tools: Sequence[Chat]) -> None:
        """Raises ModelFolderError for a template that takes no answers of tools."""
        answer = [{"role": "tool", "content": "b", "name": "f"}]
        try:
            self._check(answer, tools)
        except ModelFolderError:
            self._with_calls = True  # it wants to see the calls that are answered
            self._check(answer, tools)

    def first(self, messages: Sequence[Chat], tools: Sequence[Chat] = ()) -> Ids:
        """[P] int32: the prompt of an episode. Raises ModelFolderError when the template refuses it."""
        return self._prompt_ids(self._rendered(messages, tools))

    def between(
        self, before: Sequence[Chat], said: Said, after: Sequence[Chat], tools: Sequence[Chat] = ()
    ) -> Bridge | Branch:
        """What stands between `said`, the turn behind the messages `before`, and the turn behind those `after`.

        Raises ModelFolderError where the template cannot be used for them.
        """
        found = self._between(before, said, after, tools)
        if isinstance(found, Branch) and found.why.startswith("earlier"):
            found = self._between(before, said, after, tools)  # a date in the template may have changed meanwhile
        return found

    def _between(
        self, before: Sequence[Chat], said: Said, after: Sequence[Chat], tools: Sequence[Chat]
    ) -> Bridge | Branch:
        there = self._rendered(before, tools)
        marked = _marked(said.text, opens=there.rstrip().endswith(OPEN_THOUGHT))
        calls = list(said.tool_calls) if self._with_calls else []
        turn: Chat = {"role": "assistant", "content": marked.text} | ({"tool_calls": calls} if calls else {})
        whole = self._rendered([*before, turn, *after], tools)
        behind = self._behind_calls(before, turn, whole, tools) if calls else whole.rpartition(MARK)[2]
        if not calls and MARK not in whole:
            raise self._refusal("it does not render what the policy said")
        bridge = self._bridge(behind, said.end_id)
        if whole.startswith(there if calls else there + marked.text):
            return bridge
        why = "earlier reasoning is dropped" if marked.has_thought and THOUGHT not in whole else "earlier turns differ"
        spoken: Chat = {"role": "assistant", "content": said.text} | ({"tool_calls": calls} if calls else {})
        anew = self._rendered([*before, spoken, *after], tools)
        return Branch(anew, self._prompt_ids(anew), bridge, why)

    def _behind_calls(self, before: Sequence[Chat], turn: Chat, whole: str, tools: Sequence[Chat]) -> str:
        """What stands behind the calls of the last turn, which the template spells in its own way."""
        closed = self._rendered([*before, turn], tools, asks=False)
        plain = self._rendered([*before, {"role": "assistant", "content": MARK}], tools, asks=False)
        closing = plain.rpartition(MARK)[2]
        if not whole.startswith(closed) or not closed.endswith(closing):
            raise self._refusal("a turn with tool calls is rendered otherwise once it is answered")
        return closing + whole[len(closed) :]

    def _bridge(self, text: str, end_id: int | None) -> Bridge:
        """The bridge from the text behind a turn; the token that the engine sampled there is left out of it."""
        if end_id is None:
            return Bridge(text, self._ids(text), "cut")
        end = str(self._tokenizer.decode([end_id], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if text.startswith(end):
            rest = text[len(end) :]
            return Bridge(rest, self._ids(rest, behind=end_id), "closed")
        ids = self._ids(text)
        closes = int(ids[0]) if len(ids) else None
        if end in self._template and closes in self._tokenizer.all_special_ids:
            rest = text[len(str(self._tokenizer.decode([closes], skip_special_tokens=False))) :]
            return Bridge(rest, self._ids(rest, behind=end_id), "other")
        return Bridge(text, ids, "foreign")

    def _ids(self, text: str, *, behind: int | None = None) -> Ids:
        """The tokens of a text that stands behind a special token: it is cut with one before it.

        Some tokenizers put a space before a text's first word.
        """
        anchor_id = behind if behind is not None else self._tokenizer.eos_token_id
        anchor = "" if anchor_id is None else self._tokenizer.convert_ids_to_tokens(anchor_id)
        found = self._tokenizer(f"{anchor}{text}", add_special_tokens=False)["input_ids"]
        if anchor and found and found[0] == anchor_id:
            return _frozen(found[1:])
        return _frozen(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _prompt_ids(self, text: str) -> Ids:
        return _frozen(self._tokenizer(text, add_special_tokens=self._is_plain)["input_ids"])

    def _rendered(self, messages: Sequence[Chat], tools: Sequence[Chat], *, asks: bool = True) -> str:
        """The conversation as text; with `asks` up to where the policy's turn begins."""
        from transformers.utils.chat_template_utils import render_jinja_template

        prefill = self._prompt.assistant_prefill
        said = [
            one | {"content": prefill + one["content"]} if prefill and one["role"] == "assistant" else one
            for one in messages
        ]
        conversation = _numbered([*self._opening(messages), *said], keep_calls=self._with_calls)
        options: dict[str, Any] = self._special_tokens | self._prompt.template_options
        try:
            found: Any = render_jinja_template(
                [conversation],
                tools=list(tools) or None,
                chat_template=self._template,
                add_generation_prompt=asks,
                **options,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise self._refusal(f"it refuses a conversation of several turns: {error}", error) from error
        return str(found[0][0]) + prefill * asks

    def _opening(self, messages: Sequence[Chat]) -> list[Chat]:
        """The policy's system message and examples, which stand before what an environment says."""
        has_own = bool(messages) and messages[0]["role"] == "system"
        system = [{"role": "system", "content": self._prompt.system}] * bool(self._prompt.system and not has_own)
        shots = [
            {"role": role, "content": text}
            for shot in self._prompt.few_shot
            for role, text in (("user", shot.user), ("assistant", shot.assistant))
        ]
        return [*system, *([] if has_own else shots)]

    def _check(self, after: Sequence[Chat], tools: Sequence[Chat] = ()) -> None:
        """Two turns of the policy with `after` between them, the first one ended by the model's EOS."""
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
        before: list[Chat] = [{"role": "user", "content": "a"}]
        said = Said("c", self._tokenizer.eos_token_id, (call,))
        found = self._between(before, said, after, tools)
        bridge = found.kept if isinstance(found, Branch) else found
        told = self._tokenizer.decode(bridge.ids.tolist(), skip_special_tokens=False)
        if "b" not in str(told):
            raise self._refusal("new messages do not stand behind what the policy said")
        again = [*before, {"role": "assistant", "content": "c", "tool_calls": [call]}, *after]
        self._between(again, said, [{"role": "user", "content": "d"}], tools)

    def _refusal(self, what: str, error: Exception | None = None) -> ModelFolderError:
        """One line that names policy and template."""
        of = refused(self._folder, error or ValueError(what), self._prompt)
        where = f"policies.{self._policy}: {of.where}" if self._policy else of.where
        return ModelFolderError(
            f"the chat template cannot be used for episodes: {' '.join(what.split())}",
            where=where,
            wanted="a template that renders further turns behind those that were there",
            cure="give the policy another one, prompt.chat_template, or leave it out of tasks with environments",
        )


@dataclass(frozen=True, slots=True)
class _Marked:
    """Marks in place of what a policy said."""

    text: str
    has_thought: bool


def _marked(text: str, *, opens: bool) -> _Marked:
    """`opens`: the prompt has opened the reasoning, so that what is sampled does not."""
    if CLOSE_THOUGHT not in text:
        return _Marked(MARK, has_thought=False)
    begun = "" if opens else f"{OPEN_THOUGHT}\n"
    return _Marked(f"{begun}{THOUGHT}\n{CLOSE_THOUGHT}\n\n{MARK}", has_thought=True)


def _numbered(messages: Sequence[Chat], *, keep_calls: bool) -> list[Chat]:
    """With an id for every call and the answer to it, as some templates want; without `keep_calls` calls are text."""
    found: list[Chat] = []
    made = answered = 0
    for message in messages:
        one = dict(message)
        if calls := one.pop("tool_calls", None):
            if keep_calls:
                one["tool_calls"] = [call | {"id": f"call{made + place:05d}"} for place, call in enumerate(calls)]
                one["content"] = ""
            answered, made = made, made + len(calls)
        if one["role"] == "tool":
            one["tool_call_id"] = f"call{min(answered, max(0, made - 1)):05d}"
            answered += 1
        found.append(one)
    return found


def _frozen(ids: Sequence[int]) -> Ids:
    found = np.asarray(ids, dtype=np.int32)
    found.flags.writeable = False
    return found
