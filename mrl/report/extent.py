"""How much a report would have to read, found out without reading it."""

import os
from collections.abc import Iterator
from pathlib import Path

from mrl.config.run_folder import RunFolder


def is_small(folder: RunFolder, *, max_bytes: int, max_files: int) -> bool:
    """Whether what a report reads (metrics, timeline, evaluations, samples, residuals) stays within both bounds.

    Stops looking as soon as it does not.

    What cannot be looked at counts nothing.
    """
    total_bytes = 0
    for number, path in enumerate(_inputs(folder), start=1):
        total_bytes += _size(path)
        if number > max_files or total_bytes > max_bytes:
            return False
    return True


def _inputs(folder: RunFolder) -> Iterator[Path]:
    yield from (path for path in (folder.metrics_jsonl, folder.timeline_jsonl) if path.exists())
    for root in (folder.evaluation, folder.rollouts, folder.residuals):
        for parent, _, names in os.walk(root):
            yield from (Path(parent) / name for name in names)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
