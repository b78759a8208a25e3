"""The turns of a policy that names its family: by its chat template, and by the package `renderers` where the template
has no bridge.

The template is the reference. `check` proves on conversations that template and package write the same, token by token.
Where the template has a bridge, that bridge is used. Where it has none, the package gives one: the policy's sampled
tokens have to stand before it unchanged, and after a turn as the family writes it the bridge has to equal the same part
of a whole rendering.
"""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import normalizers

from mrl.config.policy_tables import PromptTable
from mrl.errors import ModelFolderError
from mrl.models.families.family_calls import FamilyCall, Tools, for_package, is_whole, read_call, tags_of
from mrl.models.families.renderers_package import KEY, renderer_of
from mrl.models.turn_renderer import ASKED, END_REASONING, PROBE, PROBE_CALL, TURN, Int32s, TurnRenderer
from mrl.records.episodes import MAX_TURN_CALLS, NAMELESS, Message, ToolCall, as_chat

ARGUMENT = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
PROBE_TOOL = {"type": "function", "function": {"name": PROBE_CALL.name, "description": "g", "parameters": ARGUMENT}}
PROOFS: dict[str, tuple[Message, tuple[Mapping[str, Any], ...]]] = {
    "user": (Message(role="assistant", content=TURN), ()),
    "tool": (Message(role="assistant", content="", tool_calls=(PROBE_CALL,)), (PROBE_TOOL,)),
}
"""Role of an answer -> the turn that it answers and the tools, in the conversation by which the bridge is proved."""
END_THOUGHT = {"gemma4": "<channel|>"}
"""Family -> the mark that ends reasoning, where it is not that of most families."""
SHOWN_CHARS, BEFORE_CHARS = 30, 10
"""Characters shown of a difference, and of the equal text beside it."""


class FamilyTurnRenderer(TurnRenderer):
    """Messages of episodes <-> ids, for a policy whose family the package `renderers` knows."""

    def __init__(self, folder: Path, prompt: PromptTable, *, eos_ids: Collection[int]) -> None:
        """Load tokenizer and renderer. Raises what TurnRenderer and `renderer_of` do, and ModelFolderError for a model
        without a chat template.
        """
        super().__init__(folder, prompt, eos_ids=eos_ids)
        self.family = prompt.family
        if not self.template:
            raise ModelFolderError(
                "no chat template to compare prompt.family with",
                where=f"{KEY} = {self.family!r}",
                wanted="a chat template in the model's folder, or prompt.chat_template",
            )
        self._renderer = renderer_of(self._tokenizer, self.family, prompt.template_options)
        self.thought_end = END_THOUGHT.get(self.family, END_REASONING)
        """The mark that ends reasoning; a call within reasoning is none."""
        self.mark, self._is_tagged = "", False
        """The token that begins tool calls; "" where they begin with none, or are not read back. `_is_tagged`: whether
        their arguments stand between tags."""
        self._end_ids: dict[str, int] = {}
        """Role of an answer whose bridge the package gives -> the id with which the family ends the turn before it."""
        self._learn_calls()

    def check(self, *, has_tools: bool) -> None:
        """Prove that template and package write the same, and that there is a bridge, as TurnRenderer does.

        Raises ModelFolderError with the first difference, where neither has a bridge, and where sampling would go on
        after the token with which the family ends a turn before an answer.
        """
        for role in ("user", *["tool"] * has_tools):
            if self._is_by_package(role) and self._eos_ids and (end := self._end_ids[role]) not in self._eos_ids:
                raise ModelFolderError(
                    f"the family ends a turn before {role} messages with a token that is not an EOS of the model",
                    where=f"{KEY} = {self.family!r}",
                    got=", ".join(map(self.name, sorted(self._eos_ids))),
                    wanted=self.name(end),
                    cure=f"add {end} to eos_token_id in the folder's generation_config.json",
                )

    @cached_property
    def bridged(self) -> frozenset[str]:
        """Roles to whose messages the template has no bridge, and the package has one that was proved."""
        found = set()
        for role in PROOFS:
            with contextlib.suppress(ModelFolderError):
                found |= {role} if self._is_by_package(role) else set()
        return frozenset(found)

    def bridge(self, turn_ids: Sequence[int], tool_calls: Sequence[ToolCall], messages: Sequence[Message]) -> Int32s:
        """Return [B] ids as TurnRenderer does; by the package where it was proved, and the template has no bridge."""
        if messages and {message.role for message in messages} <= self.bridged:
            names = [call.name for call in tool_calls] + [NAMELESS] * len(messages)
            told = [
                msgspec.structs.replace(one, name=one.name or name) for one, name in zip(messages, names, strict=False)
            ]
            before, turn, end = self.opening([ASKED])[:1].tolist(), list(turn_ids), self._end_ids[messages[0].role]
            # The package goes on only after the family's own end of a turn: it is added to a turn that ended otherwise.
            for said, added in ((turn, []), ([end], [end] * (turn[-1:] != [end]))):
                found = self._by_package(before, said, told)
                if found is not None:
                    behind = np.array([*added, *found[1 + len(said) :]], dtype=np.int32)
                    return np.concatenate([behind, self._ids_behind(self._prompt.assistant_prefill)])
        return super().bridge(turn_ids, tool_calls, messages)

    def calls(self, text: str, tools: Tools) -> list[FamilyCall]:
        """Return the calls in a text that begins with a call. `tools` (JSON schemas) say which arguments are texts.

        At most one call more than a turn may make is returned.
        """
        blocks = [self.mark + part for part in text.split(self.mark)[1 : MAX_TURN_CALLS + 2]]
        whole = [block for block in blocks if not self._is_tagged or is_whole(block)]
        read = [FamilyCall("", None, "malformed structure")] * (len(blocks) - len(whole))
        try:
            ids = self._ids_as_said("".join(whole))
            found = self._renderer.parse_response(ids, tools=for_package(tools) or None).tool_calls
            read = [read_call(call, tools, is_tagged=self._is_tagged) for call in found] + read
        except Exception:  # noqa: BLE001 - whatever a policy says, it has said no call
            return [FamilyCall("", None, "malformed structure")]
        if len({call.token_span for call in found}) < len(whole):
            read.append(FamilyCall("", None, "a call after the end of the turn, or inside another call"))
        return read or [FamilyCall("", None, "no call")]

    def _is_by_package(self, role: str) -> bool:
        """Whether the package gives the bridge to an answer of this role. Raises ModelFolderError where the proof
        fails.
        """
        (turn, tools), answer = PROOFS[role], PROBE[role]
        given = {"tools": list(tools)} if tools else {}
        asked, chat = self._opening_chat([ASKED]), self._opening_chat([ASKED, turn, answer])
        opening, whole = self._by_family(asked, tools).token_ids, self._by_family(chat, tools)
        self._compare(self._rendered(asked, to_be_answered=True, **given), self._decoded(opening), opening)

        start, end = _sampled(whole, len(chat) - 2)
        said, behind = self._decoded(whole.token_ids[start:end]), whole.token_ids[end:]
        said = said.rpartition(END_REASONING)[2].lstrip("\n")  # templates treat earlier reasoning in their own ways
        wanted = said + self._decoded(behind)
        self._compare(self._rendered(chat, to_be_answered=True, **given), wanted, behind, is_whole=False)
        try:
            super().bridge([], turn.tool_calls, [answer])
        except ModelFolderError:
            # The token with which the family ends a turn is either sampled or part of the bridge.
            turns = (whole.token_ids[start:end], whole.token_ids[start : end - 1])
            if not any(self._by_package(whole.token_ids[:start], one, [answer]) == whole.token_ids for one in turns):
                raise
            self._end_ids[role] = whole.token_ids[end - 1]
            return True
        return False

    def _by_family(self, chat: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Any:
        """Return the package's rendering of a conversation, to be answered."""
        try:
            return self._renderer.render(list(chat), tools=list(tools) or None, add_generation_prompt=True)
        except Exception as error:
            what = "the renderers package cannot render a conversation of this family"
            where, got = f"{KEY} = {self.family!r}", " ".join(str(error).split())[:200]
            raise ModelFolderError(what, where=where, got=got, cure="remove prompt.family") from error

    def _compare(self, by_template: str, by_family: str, last_ids: list[int], *, is_whole: bool = True) -> None:
        """Raises ModelFolderError unless both texts are the same, or the first ends in the second, with these ids at
        its end.
        """
        is_one = by_template == by_family if is_whole else by_template.endswith(by_family)
        if not is_one or self._ids(by_template).tolist()[-len(last_ids) :] != last_ids:
            raise self._otherwise(by_template, by_family, step=1 if is_whole else -1)

    def _by_package(self, before: list[int], turn_ids: list[int], messages: Sequence[Message]) -> list[int] | None:
        """Return all ids that the policy sees at its next turn, by the package; None unless they begin with `before`
        and `turn_ids`.
        """
        try:
            found = self._renderer.bridge_to_next_turn(before, turn_ids, as_chat(messages))
        except Exception:  # noqa: BLE001 - a turn that the package cannot go on from
            return None
        seen = [*before, *turn_ids]
        return list(found.token_ids) if found is not None and found.token_ids[: len(seen)] == seen else None

    def _learn_calls(self) -> None:
        turn, tools = PROOFS["tool"]
        try:
            rendered = self._by_family(as_chat([ASKED, turn, PROBE["tool"]]), tools)
        except ModelFolderError:  # a family without calls
            return
        start, end = _sampled(rendered, 1)
        said = self._decoded(rendered.token_ids[start:end])
        said = said.rpartition(END_REASONING)[2].strip()
        first = self._tokenizer.convert_ids_to_tokens(self._ids(said)[:1].tolist())
        self._is_tagged = bool(tags_of(said))
        self.mark = first[0] if first and first[0] in self._tokenizer.get_added_vocab() else ""
        if self.mark and self.calls(said, [PROBE_TOOL]) != [FamilyCall(PROBE_CALL.name, PROBE_CALL.values, "")]:
            self.mark = ""

    def _ids_as_said(self, text: str) -> list[int]:
        """Return the ids of a sampled text, in which letters that a tokenizer composes (NFC) stay as they were."""
        backend = self._tokenizer.backend_tokenizer
        if not isinstance(normalizer := backend.normalizer, normalizers.NFC):
            return self._ids(text).tolist()
        backend.normalizer = normalizers.Sequence([])
        try:
            return self._ids(text).tolist()
        finally:
            backend.normalizer = normalizer

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    def _otherwise(self, by_template: str, by_family: str, *, step: int) -> ModelFolderError:
        """Return the error with the place where the texts differ first or, with a `step` of -1, last."""
        one, other = by_template[::step], by_family[::step]
        pairs = enumerate(zip(one, other, strict=False))
        place = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
        shown = slice(max(0, place - BEFORE_CHARS), place + SHOWN_CHARS)
        return ModelFolderError(
            "the chat template and the family render a conversation differently",
            where=f"{KEY} = {self.family!r}",
            got=one[shown][::step],
            wanted=repr(other[shown][::step]),
            cure="set prompt.family to the model's own family, use prompt.template_options that both read, or "
            "remove prompt.family",
        )


def _sampled(rendered: Any, message: int) -> tuple[int, int]:
    """Return begin and end, among the ids of a rendering, of the part of a message that a policy samples."""
    own = [place for place, index in enumerate(rendered.message_indices) if index == message]
    sampled = [place for place in own if rendered.sampled_mask[place]]
    return (sampled[0], sampled[-1] + 1) if sampled else (0, 0)


def turn_renderer_of(folder: Path, prompt: PromptTable, *, eos_ids: Collection[int]) -> TurnRenderer:
    """Return the spelling of a policy's turns: by its chat template, and by its family too where it names one. Raises
    as both do.
    """
    make = FamilyTurnRenderer if prompt.family else TurnRenderer
    return make(folder, prompt, eos_ids=eos_ids)
