"""Every path that the README names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
PATH = re.compile(r"(?:mrl|tools|configs|launchers|tests|\.ci)/[A-Za-z0-9_./*-]*")


def named_paths(markdown: str) -> list[str]:
    """Paths of the repository that stand in code, inline or fenced, in order of appearance."""
    words = [word.strip("`'\"(),:;") for code in CODE.findall(markdown) for word in code.split()]
    return list(dict.fromkeys(word.rstrip(".") for word in words if PATH.fullmatch(word)))


def missing_paths(root: Path, markdown: str) -> list[str]:
    """Named paths that do not exist; one with stars needs at least one match."""
    return [path for path in named_paths(markdown) if not any(root.glob(path.rstrip("/")))]


def test_every_path_in_the_readme_exists() -> None:
    """The README exists and names no file or folder that is not there."""
    assert missing_paths(ROOT, (ROOT / "README.md").read_text(encoding="utf-8")) == []


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
