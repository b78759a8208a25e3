"""Names of models and data sets on the Hugging Face hub, and the folders of the hub's cache that hold them."""

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
COMMIT = re.compile(r"[0-9a-f]{40}")
MAIN = "main"


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository on the hub: its id and kind, and the wanted branch, tag or commit ("" is the main branch)."""

    id: str
    revision: str = ""
    kind: Literal["model", "dataset"] = "model"

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}" if self.revision else self.id

    @property
    def commit(self) -> str:
        """Commit that the name is pinned to; "" when its revision is a branch or tag."""
        return self.revision if COMMIT.fullmatch(self.revision) else ""

    @property
    def what(self) -> str:
        """Kind of the repository, in words for messages."""
        return "model" if self.kind == "model" else "data set"

    def at(self, commit: str) -> "HubName":
        """Return the same name, pinned to this commit."""
        return replace(self, revision=commit)


@dataclass(frozen=True, slots=True)
class AskedBy:
    """Origin of a wanted name: the key of the configuration that names it, and the command that fetches it."""

    key: str
    fetch: str


def parse_name(text: str, revision: str = "") -> HubName | None:
    """Return the model that `ID` or `ID@REVISION` names; None for a text that is no id, such as a path."""
    found, at, own = text.partition("@")
    return HubName(found, own if at else revision) if ID.fullmatch(found) else None


def not_here(name: HubName) -> str:
    """Return the message for a name that is neither a folder on this machine nor in its cache of the hub."""
    return f"no such folder here, and the {name.what} {name} of the hub is not on this machine"


def download(source: str, folder: Path, *files: str) -> str:
    """Return the shell command that downloads `source` (ID or ID@REVISION) into `folder`.

    The command takes the whole repository, or only those of `files` that exist in it.
    """
    name = parse_name(source)
    words = ["hf", "download", name.id if name else source or "NAME"]
    words += ["--revision", name.revision] if name and name.revision else []
    for file in files:
        words += ["--include", file]
    return shlex.join([*words, "--local-dir", str(folder)])


def snapshot(name: HubName) -> Path:
    """Folder of the hub's cache that holds, or will hold, a repository at its commit."""
    return _held(name) / "snapshots" / name.commit


def listing_file(name: HubName) -> Path:
    """File beside the snapshots in which `mrl fetch` lists the files of a data set at its commit."""
    return _held(name) / "mrl" / f"{name.commit}.json"


def last_commit(name: HubName) -> str:
    """Commit that the name's revision meant when last fetched to this machine; "" when it was never fetched."""
    if name.commit:
        return name.commit
    try:
        told = (_held(name) / "refs" / (name.revision or MAIN)).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
    return told if COMMIT.fullmatch(told) else ""


def _held(name: HubName) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=name.id, repo_type=name.kind)
    return Path(constants.HF_HUB_CACHE).expanduser().absolute() / folder
