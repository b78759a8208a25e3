"""Part of the report on answers on which verifiers failed: their share, and the first of every kind of failure."""

from html import escape

from mrl.report.number_format import percent
from mrl.report.run_data import RunData

MAX_TEXT_CHARS = 300


def unjudged_table(data: RunData) -> str:
    """Return this part as HTML; empty where every verifier always gave a reward."""
    shown = [sample for sample in data.samples if sample.get("kind") == "unjudged"]
    shares = {policy: _share(data, policy) for policy in data.policies}
    if not shown and not any(shares.values()):
        return ""
    told = ", ".join(f"{percent(share)} of the answers of {policy}" for policy, share in shares.items() if share)
    head = "<thead><tr><th>policy</th><th>task</th><th>failure</th><th>prompt</th><th>answer</th></tr></thead>"
    rows = "".join(
        "<tr>" + "".join(f'<td class="text">{_text(sample.get(key))}</td>' for key in _KEYS) + "</tr>"
        for sample in shown
    )
    table = f'<div class="scroll"><table class="samples">{head}<tbody>{rows}</tbody></table></div>' * bool(rows)
    return f"<p>{escape(f'Verifiers gave no reward for {told}.')}</p>" * bool(told) + table


_KEYS = ("policy", "task", "failure", "prompt", "completion")


def _share(data: RunData, policy: str) -> float:
    """Share of a policy's answers on which verifiers failed, mean over steps."""
    shares = [share for _, share in data.series(policy, "verify/failed_share")]
    return sum(shares) / len(shares) if shares else 0.0


def _text(value: object) -> str:
    return escape(str(value or "")[:MAX_TEXT_CHARS].encode("utf-8", "backslashreplace").decode())
