"""Permissions of a run's files: for its user alone, or readable for its group too."""

import os
from pathlib import Path

from mrl.config.schema import RunConfig
from mrl.errors import RunFolderError

OTHERS_WRITE = 0o022
"""Permission bits by which group and others may write."""


def folder_mode(config: RunConfig) -> int:
    """Return the mode of the run folder."""
    return 0o750 if config.run.shared_with_group else 0o700


def limit_modes(config: RunConfig) -> int:
    """Keep other users out of all files that this process, and processes it starts, will make.

    Returns the earlier mask.
    """
    return os.umask(0o777 & ~folder_mode(config))


def check_writers(run_folder: Path) -> None:
    """Raises RunFolderError where others may write a run's configuration, which names commands that roles run."""
    for path in (run_folder, run_folder / "config.json"):
        mode = path.stat().st_mode & 0o777 if path.exists() else 0
        if mode & OTHERS_WRITE:
            raise RunFolderError(
                "other users can write to it, and so decide which commands the run executes",
                where=str(path),
                got=f"{mode:04o}",
                wanted=f"{mode & ~OTHERS_WRITE:04o}",
                cure=f"check the content of {run_folder / 'config.json'}, then run `chmod go-w {path}`",
            )
