"""Names of models on the Hugging Face hub, and the command of its own that gets what one names."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Name:
    """A model on the hub: its id, and the branch, tag or commit that was asked for ("" is the main branch)."""

    id: str
    revision: str = ""

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}" if self.revision else self.id

    @property
    def commit(self) -> str:
        """The commit that it is pinned to, or ""."""
        return self.revision if COMMIT.fullmatch(self.revision) else ""

    def at(self, commit: str) -> "Name":
        """The same model at this commit."""
        return Name(self.id, commit)


def parse_name(text: str, revision: str = "") -> Name | None:
    """The model that `ID` or `ID@REVISION` names; None for what has no form of an id, such as a path."""
    found, at, own = text.partition("@")
    return Name(found, own if at else revision) if ID.fullmatch(found) else None


def not_here(name: Name) -> str:
    """What is wrong with a name that may be meant for a folder, or for a model of the hub."""
    return f"no such folder here, and the model {name} of the hub is not on this machine"


def download(source: str, folder: Path, *files: str) -> str:
    """The command that gets what a `source`, ID or ID@REVISION, names: all of it, or what there is of these files."""
    name = parse_name(source)
    words = ["hf", "download", name.id if name else source or "NAME"]
    words += ["--revision", name.revision] if name and name.revision else []
    for file in files:
        words += ["--include", file]
    return shlex.join([*words, "--local-dir", str(folder)])
