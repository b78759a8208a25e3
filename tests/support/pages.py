"""The written pages of the repository, and the code in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted(page for page in (ROOT / "docs").rglob("*.md") if "reference" not in page.parts)]
"""README and the pages of docs/, without generated ones."""

_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")


def blocks(markdown: str, language: str | None = None) -> list[str]:
    """Return the fenced blocks in order, all or those of one language ("" for blocks without one)."""
    return [body for _, named, body in _BLOCK.findall(markdown) if language in (None, named)]


def inline_code(markdown: str) -> list[str]:
    """Return the code within lines, in order."""
    return _INLINE.findall(prose(markdown))


def prose(markdown: str) -> str:
    """Return the page without its fenced blocks."""
    return _BLOCK.sub("", markdown)
