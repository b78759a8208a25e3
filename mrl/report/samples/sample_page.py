"""Answers as one self-contained page with a search: the page makes no requests.

Its content security policy admits the page's one script by its hash and no other, so that no text of a policy can run.
"""

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from typing import Any

from mrl.report.page_style import style_sheet
from mrl.report.samples.answer_filter import printable, shown_words
from mrl.report.samples.conversations import RULES as CONVERSATION_RULES
from mrl.report.samples.conversations import conversation, conversation_html

SCRIPT = """
const words = document.getElementById("words"), told = document.getElementById("told");
const kind = document.getElementById("kind"), policy = document.getElementById("policy");
const rows = [...document.querySelectorAll("article")].map(part => [part, part.textContent.toLowerCase()]);
function search() {
  const asked = words.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let shown = 0;
  for (const [part, text] of rows) {
    const fits = asked.every(word => text.includes(word)) && (!kind.value || part.dataset.kind === kind.value)
      && (!policy.value || part.dataset.policy === policy.value);
    part.hidden = !fits;
    shown += fits;
  }
  told.textContent = shown + " of " + rows.length;
}
for (const asked of [words, kind, policy]) asked.addEventListener("input", search);
search();
"""
RULES = """
form{position:sticky;top:0;background:var(--ground);padding:12px 0;display:flex;gap:10px;flex-wrap:wrap;
align-items:center}
input,select{font:inherit;color:inherit;background:var(--card);border:1px solid var(--rule);border-radius:8px;
padding:6px 10px}
input{flex:1;min-width:220px}
article{background:var(--card);border-radius:10px;padding:12px 16px;margin:12px 0}
article h2{font-size:14px;margin:0 0 8px;border:0;padding:0;font-weight:600}
article pre{font:13px/1.45 ui-monospace,"DejaVu Sans Mono",monospace;white-space:pre-wrap;overflow-wrap:anywhere;
margin:6px 0 0}
article pre.asked{color:var(--soft)}
[data-kind=rescue]{border-left:4px solid var(--policy)}
#told{color:var(--soft)}
"""
MAX_TEXT_CHARS = 1 << 20
"""Most characters of one message: more than a rollout file keeps."""
KINDS = {"success": "successes", "failed": "failures", "rescue": "rescues"}


def sample_page(name: str, rows: Sequence[dict[str, Any]], policies: Sequence[str], *, success_reward: float) -> str:
    """Return the page of the answers `rows` of the run `name`, in the order given."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    allowed = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = escape(f"{name}: answers")
    choices = _choice("policy", "all policies", {policy: policy for policy in policies})
    choices += _choice("kind", "all answers", KINDS)
    search = '<input id="words" type="search" placeholder="words in prompt or answer" aria-label="search">'
    body = "".join(_article(row, list(policies), success_reward) for row in rows)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(allowed)}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{style_sheet(len(policies))}{RULES}{CONVERSATION_RULES}</style></head><body><main><header><h1>{title}</h1></header>"
        f'<form>{search}{choices}<span id="told"></span></form>{body}</main><script>{SCRIPT}</script></body></html>\n'
    )


def _choice(name: str, all_of_them: str, values: dict[str, str]) -> str:
    options = "".join(f'<option value="{escape(value)}">{escape(text)}</option>' for value, text in values.items())
    return f'<select id="{name}" aria-label="{name}"><option value="">{all_of_them}</option>{options}</select>'


def _article(row: dict[str, Any], policies: list[str], success_reward: float) -> str:
    reward, policy = row.get("reward"), str(row.get("policy", ""))
    succeeded = isinstance(reward, int | float) and reward >= success_reward
    kind = "rescue" if row.get("kind") == "rescue" else "success" if succeeded else "failed"
    return (
        f'<article data-kind="{kind}" data-policy="{escape(policy)}"{_colour(str(row.get("source", "")), policies)}>'
        f'<h2><span{_colour(policy, policies)}><span class="policy">{escape(policy)}</span></span>'
        f"{escape(shown_words(row).removeprefix(policy))}</h2>"
        f'<pre class="asked">{_text(row.get("prompt"))}</pre>{_answer(row)}</article>'
    )


def _answer(row: dict[str, Any]) -> str:
    if conversation(row):
        return conversation_html(row, max_chars=MAX_TEXT_CHARS)
    return f"<pre>{_text(row.get('completion'))}</pre>"


def _colour(name: str, policies: list[str]) -> str:
    """Attribute `class` that gives an element's content the colour of a policy; empty for an unknown policy."""
    return f' class="c{policies.index(name)}"' if name in policies else ""


def _text(value: object) -> str:
    return escape(printable(str(value or "")).encode("utf-8", "backslashreplace").decode())
