"""The folder that the processes of one run share on one host, for sockets, boards and meeting places.

It lies on a file system of the host's own, apart from the run folder, which other hosts may see through a network. Its
path is short, as paths of sockets have to be. It is private (0700), since its content is trusted.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mrl.config.run_folder import LOCAL_FOLDER
from mrl.config.schema import RunConfig
from mrl.engines.temporary_folder import TemporaryFolder
from mrl.errors import ConfigError
from mrl.transport.server import MAX_IPC_PATH_BYTES

PREFIX = "mrl-run-"
RANDOM_CHARS = 8
"""Number of characters that `tempfile.mkdtemp` appends to the prefix."""


@contextmanager
def local_folder_of(config: RunConfig) -> Iterator[Path]:
    """Make a local folder, which children of this process find by their environment; remove it at the end.

    The folder of a supervisor that was killed is removed when the next run begins. Raises ConfigError as `parent_of`.
    """
    parent = parent_of(config)
    try:
        made = TemporaryFolder(parent=parent, prefix=PREFIX)
    except OSError as error:
        raise _refusal(parent, f"cannot be used ({error.strerror})") from None
    os.environ[LOCAL_FOLDER] = str(made.path)
    try:
        yield made.path
    finally:
        os.environ.pop(LOCAL_FOLDER, None)
        made.remove()


def parent_of(config: RunConfig) -> Path:
    """Return the local folder's parent: `run.local_folder`, else the temporary folder, or /tmp where that is unusable.

    The user's runtime folder is no candidate: it vanishes with the user's last login on the host, and a batch job is no
    login. Raises ConfigError where no parent is usable.
    """
    if config.run.local_folder:
        parent = Path(config.run.local_folder).expanduser().absolute()
        why = why_not(config, parent)
        if why:
            raise _refusal(parent, why)
        return parent
    candidates = [Path(tempfile.gettempdir()), Path("/tmp")]
    refused = {parent: why_not(config, parent) for parent in candidates}
    usable = [parent for parent, why in refused.items() if not why]
    if not usable:
        raise _refusal(candidates[-1], refused[candidates[-1]])
    return usable[0]


def why_not(config: RunConfig, parent: Path) -> str:
    """Return why no local folder can be made in `parent`; "" where it can."""
    if not parent.is_dir():
        return "not a folder on this host"
    if not os.access(parent, os.W_OK | os.X_OK):
        return "not writable"
    names = [f"learner-{name}" for name in config.learning] + ["exchange", "allocator", "telemetry"]
    longest = parent / (PREFIX + "x" * RANDOM_CHARS) / max(names, key=len)
    too_many = len(os.fsencode(longest)) - MAX_IPC_PATH_BYTES
    return f"socket paths would be {too_many} bytes over the limit of {MAX_IPC_PATH_BYTES}" * (too_many > 0)


def _refusal(parent: Path, why: str) -> ConfigError:
    return ConfigError(
        f"run.local_folder: {why}",
        got=str(parent),
        wanted="a folder local to each host, with a short path, for sockets and files in memory",
        cure="set --run.local_folder to such a folder, for example /dev/shm",
    )
