"""Replacing a file so that readers see the old content or the new one, never half of either."""

import os
import tempfile
from pathlib import Path


def replace_file(path: Path, data: bytes, *, mode: int = 0o644, sync: bool = True) -> None:
    """Write `data` under a temporary name beside `path`, then rename; `sync` forces it to the disk first.

    On any error the old file stays and nothing else is left. Raises OSError.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            if sync:
                os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
