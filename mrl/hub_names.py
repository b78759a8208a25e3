"""What has a name on the Hugging Face hub: models and data sets by their ids, and where the hub's cache holds them."""

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
COMMIT = re.compile(r"[0-9a-f]{40}")
MAIN = "main"


@dataclass(frozen=True, slots=True)
class Name:
    """A repository on the hub: its id, and the branch, tag or commit that was asked for ("" is the main branch)."""

    id: str
    revision: str = ""
    kind: Literal["model", "dataset"] = "model"

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}" if self.revision else self.id

    @property
    def commit(self) -> str:
        """The commit that it is pinned to, or ""."""
        return self.revision if COMMIT.fullmatch(self.revision) else ""

    @property
    def what(self) -> str:
        """Its kind, in words."""
        return "model" if self.kind == "model" else "data set"

    def at(self, commit: str) -> "Name":
        """The same at this commit."""
        return replace(self, revision=commit)


@dataclass(frozen=True, slots=True)
class AskedBy:
    """Who asks for it: the key of the configuration that names it, and the command that gets it."""

    key: str
    fetch: str


def parse_name(text: str, revision: str = "") -> Name | None:
    """The model that `ID` or `ID@REVISION` names; None for what has no form of an id, such as a path."""
    found, at, own = text.partition("@")
    return Name(found, own if at else revision) if ID.fullmatch(found) else None


def not_here(name: Name) -> str:
    """What is wrong with a name that may be meant for something on this machine, or for something on the hub."""
    return f"no such folder here, and the {name.what} {name} of the hub is not on this machine"


def download(source: str, folder: Path, *files: str) -> str:
    """The command that gets what a `source`, ID or ID@REVISION, names: all of it, or what there is of these files."""
    name = parse_name(source)
    words = ["hf", "download", name.id if name else source or "NAME"]
    words += ["--revision", name.revision] if name and name.revision else []
    for file in files:
        words += ["--include", file]
    return shlex.join([*words, "--local-dir", str(folder)])


def snapshot(name: Name) -> Path:
    """The folder in the hub's cache that holds, or will hold, a repository at its commit."""
    return _held(name) / "snapshots" / name.commit


def listing_file(name: Name) -> Path:
    """The file beside the snapshots in which `mrl fetch` notes what files a data set has at its commit."""
    return _held(name) / "mrl" / f"{name.commit}.json"


def last_commit(name: Name) -> str:
    """The commit that its revision was when it was last fetched to this machine; "" when it never was."""
    if name.commit:
        return name.commit
    try:
        told = (_held(name) / "refs" / (name.revision or MAIN)).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
    return told if COMMIT.fullmatch(told) else ""


def _held(name: Name) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=name.id, repo_type=name.kind)
    return Path(constants.HF_HUB_CACHE).expanduser().absolute() / folder
