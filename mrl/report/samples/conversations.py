"""Episodes as conversations: the author and text of every message, and whether its tokens were sampled or given.

Rows come from files, which anybody may have written: a malformed row is shown as far as it can be read, and all text
is escaped.
"""

from collections.abc import Iterator
from html import escape
from typing import Any, NamedTuple

from mrl.report.number_format import count
from mrl.report.samples.answer_filter import HELD_OUT, printable

ROLES = ("system", "user", "assistant", "tool")
BARE = "text"
"""Stands in place of a role for given text without roles."""
RULES = """
.talk{list-style:none;margin:8px 0 0;padding:0;display:grid;gap:6px;min-width:min(420px,100%)}
.talk li{border-left:3px solid var(--rule);padding:2px 0 2px 12px}
.talk li.sampled{border-left-color:var(--policy,var(--ink))}
.talk li.behind{border-left-style:dashed}
td>.talk,td>details{margin-top:0}
.talk .who{font-size:12px;color:var(--soft)}
.talk .sampled .who b{color:var(--policy,var(--ink))}
.talk pre{font:13px/1.45 ui-monospace,"DejaVu Sans Mono",monospace;white-space:pre-wrap;overflow-wrap:anywhere;margin:0}
.talk .call{display:inline-block;font:13px/1.45 ui-monospace,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere;
background:var(--ground);border:1px solid var(--rule);border-radius:6px;padding:1px 8px;margin-top:2px}
"""
"""Style rules of a page that shows conversations."""


class ShownMessage(NamedTuple):
    """One message of a conversation."""

    role: str
    tool: str
    """Name of the tool whose answer the message is; "" in other messages."""
    text: str
    calls: tuple[str, ...]
    """`name(arguments)` of every tool call in the message."""
    is_sampled: bool
    tokens: int | None
    """Tokens of the whole turn, on its first message alone; None on its other messages, and in a peer's turn."""
    begins_row: bool
    """Whether a row of tokens begins here: the policy saw from here on the conversation as its template renders it."""
    is_rewritten: bool
    """Whether the messages of this turn are the whole conversation from here on, since an agent rewrote it."""
    is_bare: bool
    """Whether the turn is text without roles that an agent gave, or was sampled after such a text."""
    is_behind: bool
    """Whether the environment said it after the last turn, so that no row has its tokens."""


def conversation(row: dict[str, Any]) -> list[ShownMessage]:
    """Return the messages of an episode after its opening; empty for an answer that is no episode."""
    return [said for turn in _dicts(row.get("turns")) for said in _said(turn)]


def _said(turn: dict[str, Any]) -> Iterator[ShownMessage]:
    is_sampled = turn.get("is_sampled") is True
    tokens = turn.get("tokens") if isinstance(turn.get("tokens"), int) else None
    is_behind = tokens == 0 and not is_sampled
    for place, message in enumerate(_dicts(turn.get("messages"))):
        role, calls = str(message.get("role", "")), _dicts(message.get("tool_calls"))
        is_bare = turn.get("is_bare") is True
        yield ShownMessage(
            BARE if is_bare and not is_sampled else role if role in ROLES else "?",
            str(message.get("name", "")),
            str(message.get("content", "")),
            tuple(f"{call.get('name')}({call.get('arguments')})" for call in calls),
            is_sampled,
            None if place or is_behind else tokens,
            not place and turn.get("begins_row") is True,
            turn.get("is_rewritten") is True,
            is_bare,
            is_behind,
        )


def _dicts(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list | tuple) else []


def fate(said: ShownMessage, row: dict[str, Any]) -> str:
    """Describe in words whether a message's tokens were sampled or given, and whether they were trained on."""
    tokens = "" if said.tokens is None else f", {count(said.tokens)} tokens"
    if said.is_behind:
        return "after the last turn, not in the row"
    if said.is_bare and not said.is_sampled:
        return f"given{tokens}{', a new row' * said.begins_row}: text without roles, not trained on"
    if said.begins_row and said.is_rewritten:
        return f"given{tokens}, a new row: the conversation as the agent rewrote it, not trained on"
    if said.begins_row:
        return f"given{tokens}, a new row with the whole conversation as the template renders it, not trained on"
    if not said.is_sampled:
        return f"given{tokens}, not trained on"
    if row.get("kind") == HELD_OUT:
        return f"sampled{tokens}, held out: not trained on"
    return f"said by {row.get('source')}, imitated" if row.get("kind") == "rescue" else f"sampled{tokens}, trained on"


def conversation_html(row: dict[str, Any], *, max_chars: int) -> str:
    """Return an episode as an HTML list, texts cut at `max_chars`. Its sampled turns have the colour `--policy`."""
    opening = str(row.get("opening") or "")
    items = [_item("given", "opening", "as the policy saw it", _text(opening, max_chars))] * bool(opening)
    for said in conversation(row):
        who = f"{said.role} {said.tool}" if said.tool else said.role
        body = _text(said.text, max_chars) + "".join(
            f'<code class="call">{_escaped(call, max_chars)}</code>' for call in said.calls
        )
        kind = "sampled" if said.is_sampled else "given behind" if said.is_behind else "given"
        items.append(_item(kind, who, fate(said, row), body))
    return f'<ol class="talk">{"".join(items)}</ol>'


def _item(kind: str, who: str, what: str, body: str) -> str:
    head = f"<b>{_escaped(who, 80)}</b> &middot; {_escaped(what, 200)}"
    return f'<li class="{kind}"><div class="who">{head}</div>{body}</li>'


def _text(text: str, max_chars: int) -> str:
    return f"<pre>{_escaped(text, max_chars)}</pre>" if text else ""


def _escaped(text: str, max_chars: int) -> str:
    cut = text if len(text) <= max_chars else text[:max_chars] + " [...]"
    return escape(printable(cut).encode("utf-8", "backslashreplace").decode())
