"""The turns of an episode in a policy's own tokens: sampled turns stay as they are, and messages to the policy follow.

The text between two turns, the bridge, is read off the chat template. With a placeholder X for the policy's turn,

    closing = the text after X in render([user, X])
    bridge  = closing + the text by which render([user, X, *new], to be answered) is longer than render([user, X])

so that no turn is ever rendered or tokenized again in the row in which it was sampled. Where the template drops the
reasoning of earlier turns, the policy is to see these turns without it, and `anew` gives the beginning of a new row.
Where `prompt.history` is "sampled", the policy goes on seeing all that it sampled, in one row.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import numpy as np
import numpy.typing as npt

from mrl.config.policy_tables import PromptTable
from mrl.errors import ModelFolderError
from mrl.models.chat_template import AS_IT_IS, TURN, messages_of, plain_text, refused, use_template
from mrl.models.load_policy import load_tokenizer
from mrl.models.prompting import bare_token_ids
from mrl.records.episodes import Message, ToolCall, as_chat

Int32s = npt.NDArray[np.int32]

TOLD = "XqTOLDqX"
"""Stands for a message to the policy, to see whether a template writes the message at all."""
ASKED = Message(role="user", content="?")
"""The message that the placeholder answers."""
PROBE = {"user": Message(role="user", content="A?"), "tool": Message(role="tool", content="B", name="f")}
BEGIN_REASONING, END_REASONING = "<think>", "</think>"
FOR_TOOLS = "tool_use"
"""Name of the template that transformers takes where there are tools."""
PROBE_TURNS = 4
"""Turns of a probe: with so many, a template that keeps only the newest turns' reasoning drops that of the first."""
PROBE_CALL = ToolCall(name="f", arguments='{"x":"y"}')


class TurnRenderer:
    """Messages of episodes <-> ids under one policy's tokenizer. Any thread may call it, one at a time."""

    def __init__(self, folder: Path, prompt: PromptTable = AS_IT_IS, *, eos_ids: Collection[int]) -> None:
        """`prompt` says what stands around every prompt, `eos_ids` end a turn.

        Raises ModelFolderError without a usable tokenizer, and for a template that changes what a turn says.
        """
        self._folder, self._prompt, self._eos_ids = folder, prompt, frozenset(eos_ids)
        self._tokenizer = load_tokenizer(folder)
        use_template(self._tokenizer, prompt)
        self.template = str(self._tokenizer.chat_template or "")
        """The chat template as text; "" for a model that is prompted by lines of plain text."""
        self._closing = ""
        if self.template:
            self._closing = self._behind_turn(self._render([ASKED, _turn()], to_be_answered=False))

    def check(self, *, has_tools: bool) -> None:
        """Prove that the template has a bridge for users' messages, and for tools' answers where there are tools.

        Raises ModelFolderError where rendering a longer conversation changes what was said before, or a call is lost.
        """
        self.bridge([], (), [PROBE["user"]])
        if has_tools and self.template:
            self.bridge([], (PROBE_CALL,), [PROBE["tool"]])
            if self._call_text((PROBE_CALL,), "") is None:
                raise self.refused("does not render the tool calls of a turn")

    @property
    def drops_reasoning(self) -> bool:
        """Whether the template renders earlier turns without their reasoning, whatever the policy sees of them."""
        turn = Message(role="assistant", content=f"{BEGIN_REASONING}\n{TURN}\n{END_REASONING}\n\n{TURN}")
        chat = [ASKED, *(turn, PROBE["user"]) * PROBE_TURNS]
        return bool(self.template) and self._rendered_anew(chat, (), 0) is not None

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Int32s:
        """Return the [P] ids of an episode's prompt: its first messages, to be answered, and its tools (as JSON
        schemas).

        Raises ModelFolderError when the template refuses them.
        """
        if not self.template:
            text = plain_text(_joined(messages), where=str(self._folder), prefill=self._prompt.assistant_prefill)
            return self.plain(text)
        return self._ids(self._opening_text(messages, tools) + self._prompt.assistant_prefill)

    def anew(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, since: int = 0
    ) -> tuple[Int32s, int] | None:
        """Return the [P] ids of a whole conversation, to be answered, where the template drops reasoning of turns.

        Only turns from message `since` on have reasoning that the policy sees in its present row. With the ids comes
        the index of the message from which on the new row shows reasoning. None where all reasoning stays, and where
        the policy sees all that it sampled. Raises ModelFolderError as `opening` does.
        """
        if self._prompt.history != "template" or not self.template:
            return None
        return self._rendered_anew(messages, tools, since)

    def _rendered_anew(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], since: int
    ) -> tuple[Int32s, int] | None:
        marks = {
            place: f"XqREASONING{place}qX"
            for place, message in enumerate(messages)
            if place >= since and message.role == "assistant" and END_REASONING in message.content
        }
        if not marks:
            return None
        marked = [_marked(one, marks[place]) if place in marks else one for place, one in enumerate(messages)]
        rendered = self._opening_text(marked, tools)
        kept = [place for place, mark in marks.items() if mark in rendered]
        return None if len(kept) == len(marks) else (self.opening(messages, tools), min(kept, default=len(messages)))

    def plain(self, text: str) -> Int32s:
        """Return [P] ids of a text without a template, with the special tokens that the tokenizer puts before it."""
        return np.asarray(bare_token_ids(self._tokenizer, text), dtype=np.int32)

    def name(self, token_id: int) -> str:
        """Return the name of a token in the vocabulary; "" for an id beyond it."""
        return str(self._tokenizer.convert_ids_to_tokens(token_id) or "")

    def is_end(self, token_id: int) -> bool:
        """Whether the token ends a turn."""
        return token_id in self._eos_ids

    def bridge(self, turn_ids: Sequence[int], tool_calls: Sequence[ToolCall], messages: Sequence[Message]) -> Int32s:
        """Return the [B] ids between a turn of the policy, which made these calls, and its next turn.

        An end of turn that the policy sampled itself is not written again. An end that it did not sample, as in a turn
        cut at the limit, is. Raises ModelFolderError when the template refuses the messages, or has no bridge to them.
        """
        bridge_ids = self._ids_behind(self._bridge_text(tool_calls, messages) + self._prompt.assistant_prefill)
        if not len(turn_ids) or turn_ids[-1] not in self._eos_ids or not bridge_ids.size:
            return bridge_ids
        # Llama's <|eom_id|> closes a turn as <|eot_id|> does; where only roles open turns, the next role is written.
        is_said = bridge_ids[0] == turn_ids[-1] or (bool(self._closing) and bridge_ids[0] in self._eos_ids)
        return bridge_ids[1:] if is_said else bridge_ids

    def said(self, content: str, tool_calls: Sequence[ToolCall]) -> str | None:
        """Return the text of a turn that others wrote, with calls in the policy's own syntax, without what closes the
        turn.

        None where the template has no way to write the calls.
        """
        return self._call_text(tool_calls, content) if tool_calls else content

    def turn(self, text: str, *, eos_id: int | None, is_begun: bool = False) -> Int32s:
        """Return the [T] ids of a turn that others wrote, in own tokens, closed by `eos_id`. With `is_begun`, `text` is
        the rest of a turn.
        """
        end = () if eos_id is None else (eos_id,)
        ids = self._ids_behind(text) if is_begun and text else self._ids(text)
        return np.concatenate([ids, np.array(end, dtype=np.int32)])

    def text(self, turn_ids: Sequence[int]) -> str:
        """Return a sampled turn as text, with its special tokens, without the token that ended it."""
        is_ended = bool(len(turn_ids)) and turn_ids[-1] in self._eos_ids
        ids = list(turn_ids[:-1] if is_ended else turn_ids)
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _opening_text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        given = {"tools": list(tools)} if tools else {}
        return self._rendered(self._opening_chat(messages), to_be_answered=True, **given)

    def _opening_chat(self, messages: Sequence[Message]) -> list[Mapping[str, Any]]:
        """Return the messages for the template, after the system message and examples that stand before each prompt."""
        around = messages_of([(message.role, message.content) for message in messages], self._prompt)
        own = messages[messages[0].role == "system" :]  # calls and tools' names in them stay
        return [*around[: len(around) - len(own)], *as_chat(own)]

    def _bridge_text(self, tool_calls: Sequence[ToolCall], messages: Sequence[Message]) -> str:
        if not self.template:
            return plain_text(_joined(messages), where=str(self._folder))
        before = [ASKED, _turn(tool_calls)]
        has_tools = bool(tool_calls) or any(message.role == "tool" for message in messages)
        alone = self._render(before, to_be_answered=False, has_tools=has_tools)
        longer = self._render([*before, *messages], to_be_answered=True, has_tools=has_tools)
        if TURN in alone:  # else the template drops text beside calls, and the whole rendering has to be there again
            alone, longer = self._behind_turn(alone), self._behind_turn(longer)
        if not longer.startswith(alone):
            raise self.refused("changes earlier messages when later ones are added")
        told = longer.removeprefix(alone)
        if any(message.content.strip() not in told for message in messages):  # as JSON perhaps, or not at all
            marked = [msgspec.structs.replace(one, content=f"{TOLD}{place}") for place, one in enumerate(messages)]
            shown = self._render([*before, *marked], to_be_answered=True, has_tools=has_tools)
            if any(one.content not in shown for one in marked):
                raise self.refused("leaves out a message after a turn")
        return self._closing + told

    def _call_text(self, tool_calls: Sequence[ToolCall], content: str) -> str | None:
        """Return content and calls as the template writes them; None where it leaves calls out or cannot write them."""
        if not self.template:
            return None
        try:
            asked = self._render([ASKED], to_be_answered=True, has_tools=True)
            said = self._render([ASKED, _turn(tool_calls)], to_be_answered=False, has_tools=True)
            behind = self._behind_turn(said) if TURN in said else ""  # calls may hold the placeholder themselves
        except ModelFolderError:
            return None
        if TURN in said:  # white space parts calls from what is said before them, and stands there once
            bare = behind.lstrip()
            is_parted = not content or content.endswith(behind.removesuffix(bare))
            said = content + (bare if is_parted else behind)
        elif said.startswith(asked):  # the template drops what is said beside calls
            said = said.removeprefix(asked)
        else:
            return None
        calls = said.removesuffix(self._closing)
        return calls if all(call.name in calls for call in tool_calls) else None

    def _behind_turn(self, rendered: str) -> str:
        """Return the text after the placeholder. Raises ModelFolderError where the placeholder is not there exactly
        once.
        """
        parts = rendered.split(TURN)
        if len(parts) != 2:
            raise self.refused("does not render each turn exactly once and unchanged")
        return parts[1]

    def _render(self, messages: Sequence[Message], *, to_be_answered: bool, has_tools: bool = False) -> str:
        """Render messages; with `has_tools`, by the template for tools where a model has several."""
        named = self._tokenizer.chat_template
        for_tools = has_tools and isinstance(named, dict) and FOR_TOOLS in named
        given = {"chat_template": FOR_TOOLS} if for_tools else {}
        return self._rendered(as_chat(messages), to_be_answered=to_be_answered, **given)

    def _rendered(self, chat: Sequence[Mapping[str, Any]], *, to_be_answered: bool, **given: Any) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in chat],
                add_generation_prompt=to_be_answered,
                tokenize=False,
                **given,
                **self._prompt.template_options,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise refused(self._folder, error, self._prompt) from error
        return str(rendered)

    def _ids_behind(self, text: str) -> Int32s:
        """Return ids of a text that follows other text: without the space that some vocabularies put before a first
        word.
        """
        end = self._tokenizer.eos_token
        ids = self._ids(f"{end}{text}") if end else self._ids(text)
        return ids[1:] if end and ids[0] == self._tokenizer.eos_token_id else self._ids(text)

    def _ids(self, text: str) -> Int32s:
        return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def refused(self, why: str, *, cure: str = "") -> ModelFolderError:
        """Return the error for a template that cannot be used for episodes."""
        return ModelFolderError(
            f"the chat template {why}",
            where=str(self._folder),
            wanted="a template with which a conversation can continue",
            cure=cure or "set policies.X.prompt.chat_template to a file with another template",
        )


def _turn(tool_calls: Sequence[ToolCall] = ()) -> Message:
    return Message(role="assistant", content=TURN, tool_calls=tuple(tool_calls))


def _marked(message: Message, mark: str) -> Message:
    """Return the turn with `mark` as its reasoning, to see whether a template drops it."""
    reasoning, end, rest = message.content.partition(END_REASONING)
    begin = f"{BEGIN_REASONING}\n" if BEGIN_REASONING in reasoning else ""
    return Message(message.role, f"{begin}{mark}\n{end}{rest}", message.tool_calls)


def _joined(messages: Sequence[Message]) -> str:
    return "\n".join(message.content for message in messages)
