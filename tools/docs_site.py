"""Layout of the pages of docs/ for the builder of the documentation's site; `bash tools/docs.sh` calls both.

    python tools/docs_site.py [--docs FOLDER] [--into FOLDER] [--draft]

The order of the pages is that of the links in docs/index.md, and its headings are the parts of the site. A page that is
listed and missing, or there and not listed, ends the command with exit code 1; with --draft it is only reported. Files
outside of docs/ are no part of the site: links to them become their paths. Nothing but the standard library is needed.
"""

import argparse
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
INDEX = "index.md"
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```.*?^```)", re.DOTALL | re.MULTILINE)
LOOK = """
[project.theme]
font = false
features = [
    "navigation.top", "navigation.tracking", "navigation.footer", "toc.follow",
    "content.code.copy", "search.highlight",
]

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"
toggle.icon = "lucide/moon"
toggle.name = "Dark"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
toggle.icon = "lucide/sun"
toggle.name = "Light"

# What plain Markdown has, and no more: a "~" or ":" in a sentence stays what it is, and lists keep their numbers.
[project.markdown_extensions]
tables = {}
sane_lists = {}
attr_list = {}
toc = { permalink = true }
pymdownx.betterem = {}
pymdownx.superfences = {}
pymdownx.highlight = { pygments_lang_class = true }
pymdownx.tasklist = { custom_checkbox = true }
"""
STYLE = """/* Wide tables are read, not guessed: words stay whole, and the table scrolls. */
.md-typeset table:not([class]) td, .md-typeset table:not([class]) th { min-width: 4rem; padding: .45em .9em; }
.md-typeset table:not([class]) td code { overflow-wrap: normal; word-break: normal; }
"""


class Part(NamedTuple):
    """A heading of the index and the pages below it, as (title, path)."""

    title: str
    pages: list[tuple[str, str]]


def parts_of(index: str) -> list[Part]:
    """Return the second-level headings of an index page, with the pages that their lists link to, each page once.

    Links in sentences are no entries of the list.
    """
    parts, seen = [], {INDEX}
    for line in index.splitlines():
        if line.startswith("## "):
            parts.append(Part(line.removeprefix("## ").strip(), []))
        elif parts and re.match(r"\s*(\d+\.|[-*|])\s", line):
            for title, target in LINK.findall(line):
                path = target.partition("#")[0]
                if path.endswith(".md") and "://" not in path and not path.startswith("..") and path not in seen:
                    seen.add(path)
                    parts[-1].pages.append((title.replace("`", ""), path))
    return [part for part in parts if part.pages]


def faults_of(parts: Sequence[Part], there: Sequence[str]) -> list[str]:
    """Descriptions of pages that are listed and missing, and of pages that are there and not listed."""
    listed = [path for part in parts for _, path in part.pages]
    lines = [f"{INDEX} lists {path}, which is not there" for path in listed if path not in there]
    return lines + [f"{path} is there, and {INDEX} does not list it" for path in there if path not in (*listed, INDEX)]


def nav_of(parts: Sequence[Part], there: Sequence[str]) -> str:
    """Return the builder's list of pages: the parts with the pages that are there, then pages that are not listed."""
    listed = {path for part in parts for _, path in part.pages} | {INDEX}
    rest = Part("More", [(Path(path).stem.replace("-", " "), path) for path in there if path not in listed])
    lines = [f'    {{ "Overview" = "{INDEX}" }},'] if INDEX in there else []
    for part in (*parts, rest):
        pages = [f'{{ "{quoted(title)}" = "{path}" }}' for title, path in part.pages if path in there]
        if pages:
            lines.append(f'    {{ "{quoted(part.title)}" = [' + ", ".join(pages) + "] },")
    return "\n".join(["nav = [", *lines, "]"])


def quoted(text: str) -> str:
    """Escape text for the quotes of TOML."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def page_of(text: str, path: str, docs: Path) -> str:
    """Return a page for the site: links that leave docs/ become their text with the path; code stays as it is."""
    folder = (docs / path).parent

    def shown(link: re.Match[str]) -> str:
        said, target = link[1], link[2]
        file = (folder / target.partition("#")[0]).resolve()
        if "://" in target or target.startswith(("#", "mailto:")) or file.is_relative_to(docs.resolve()):
            return link[0]
        place = os.path.relpath(file, docs.resolve().parent)
        return said if place in said else f"{said} (`{place}`)"

    pieces = FENCE.split(text)
    return "".join(piece if piece.startswith("```") else LINK.sub(shown, piece) for piece in pieces)


def lay_out(docs: Path, into: Path) -> list[str]:
    """Write the builder's configuration and the pages; return the faults of the list of pages."""
    there = sorted(file.relative_to(docs).as_posix() for file in docs.rglob("*.md"))
    parts = parts_of((docs / INDEX).read_text(encoding="utf-8")) if INDEX in there else []
    shutil.rmtree(into / "pages", ignore_errors=True)
    shutil.copytree(docs, into / "pages")
    for path in there:
        text = (docs / path).read_text(encoding="utf-8")
        (into / "pages" / path).write_text(page_of(text, path, docs), encoding="utf-8")
    (into / "pages" / "site.css").write_text(STYLE, encoding="utf-8")
    head = ["[project]", 'site_name = "mrl"', 'site_description = "Mutual reinforcement learning of language models"']
    head += ['docs_dir = "pages"', 'site_dir = "site"', "use_directory_urls = false", 'extra_css = ["site.css"]']
    head += ['copyright = "The mrl authors, Apache-2.0"', nav_of(parts, there)]
    (into / "zensical.toml").write_text("\n".join(head) + "\n" + LOOK, encoding="utf-8")
    return faults_of(parts, there) if INDEX in there else [f"{docs / INDEX} is not there"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the pages")
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "docs", help="folder to make the site in")
    parser.add_argument("--draft", action="store_true", help="tell of missing pages, and go on")
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    faults = lay_out(options.docs, options.into)
    print("\n".join(faults), end="\n" * bool(faults), file=sys.stderr)
    return 0 if options.draft else bool(faults)


if __name__ == "__main__":
    sys.exit(main())
