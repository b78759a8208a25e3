"""The README is short, its map is the tree, and every path that it or a page of docs/ names exists."""

import re
from pathlib import Path

import pytest

from tests.support.pages import PAGES, README, ROOT, blocks, prose

MOST_LINES = 200
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
PATH = re.compile(r"(?:mrl|tools|configs|launchers|tests|docs|\.ci)/[A-Za-z0-9_./*-]*")
SECOND_SENTENCE = re.compile(r"[\w`)]{3}\. [A-Z]")
ROOM = re.compile(r"^  (\w+)/ ", re.MULTILINE)


def named_paths(markdown: str) -> list[str]:
    """Paths of the repository that stand in code, inline or fenced, in order of appearance."""
    words = [word.strip("`'\"(),:;") for code in CODE.findall(markdown) for word in code.split()]
    return list(dict.fromkeys(word.rstrip(".") for word in words if PATH.fullmatch(word)))


def missing_paths(root: Path, markdown: str) -> list[str]:
    """Named paths that do not exist; one with stars needs at least one match."""
    return [path for path in named_paths(markdown) if not any(root.glob(path.rstrip("/")))]


def long_lines(markdown: str) -> list[str]:
    """Lines of running text that hold more than one sentence; tables and lists may."""
    lines = [line for line in prose(markdown).splitlines() if line[:1] not in tuple("|-!0123456789")]
    return [line for line in lines if SECOND_SENTENCE.search(line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_path_on_a_page_exists(page: Path) -> None:
    """No page names a file or folder that is not there."""
    assert missing_paths(ROOT, page.read_text(encoding="utf-8")) == []


def test_the_readme_is_short() -> None:
    """It is read to its end, one sentence a line."""
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert long_lines(text) == []


def test_the_map_of_the_code_is_the_tree() -> None:
    """The map has every folder and module of mrl/, and no other folder; and every folder of the root with code."""
    (tree,) = [block for block in blocks(README.read_text(encoding="utf-8")) if block.startswith("mrl/\n")]
    inside = [path for path in (ROOT / "mrl").iterdir() if not path.name.startswith("__")]
    assert sorted(ROOM.findall(tree)) == sorted(path.name for path in inside if path.is_dir())
    assert [path.name for path in inside if path.is_file() and path.name not in tree] == []
    assert [name for name in ("configs/", "docs/", "launchers/", "tests/", "tools/") if f"\n{name}" not in tree] == []


def test_paths_are_found_in_code_only() -> None:
    """Inline code, commands and fenced blocks count; prose, other folders and module names do not."""
    text = "See `mrl/a.py`, `bash tools/b.sh`, mrl/prose.py, `runs/x/`, `mrl.c`.\n"
    text += "```\nmrl train configs/d.toml\nmrl/\n```\n"

    assert named_paths(text) == ["mrl/a.py", "tools/b.sh", "configs/d.toml", "mrl/"]


def test_a_missing_path_is_found(tmp_path: Path) -> None:
    """A file, a folder and a pattern without a match are each named; what exists is not."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "setup.sh").touch()
    text = "`tools/setup.sh` `tools/` `tools/*.sh` `tools/gone.sh` `configs/` `tests/*/test_x.py`"

    assert missing_paths(tmp_path, text) == ["tools/gone.sh", "configs/", "tests/*/test_x.py"]


def test_a_second_sentence_is_found() -> None:
    """In running text; not in a table, a list or a block, nor behind an abbreviation within a sentence."""
    text = "One. Two.\n| one. Two. |\n- One. Two.\n```\none. Two.\n```\nDr. GRPO and GRPO.\nOne.\nTwo.\n"
    assert long_lines(text) == ["One. Two."]
