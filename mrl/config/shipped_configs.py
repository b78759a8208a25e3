"""Configurations that lie in the package itself, by name, for use without a copy of the repository."""

from pathlib import Path

SHIPPED = Path(__file__).parent / "shipped"


def config_file(word: str) -> Path:
    """Return the file that CONFIG on a command line names: a path, else the shipped configuration of this name."""
    path, shipped = Path(word), SHIPPED / f"{word}.toml"
    return shipped if not path.exists() and path.name == word and shipped.is_file() else path
