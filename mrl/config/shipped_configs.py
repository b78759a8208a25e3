"""Configurations that lie in the package itself, by their names: for whoever has no copy of the repository."""

from pathlib import Path

SHIPPED = Path(__file__).parent / "shipped"


def config_file(word: str) -> Path:
    """The file that CONFIG on a command line names: a path, else a shipped one that has this name."""
    path, shipped = Path(word), SHIPPED / f"{word}.toml"
    return shipped if not path.exists() and path.name == word and shipped.is_file() else path
