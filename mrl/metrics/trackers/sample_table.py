"""Tables of samples for trackers: a bounded number of answers of a step, from the step's rollout file.

The supervisor names the file, and the tracker's process reads it: no step waits for a disk.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from mrl.metrics.rollout_files import policy_of, read_rollouts, step_of

COLUMNS = ("policy", "step", "prompt", "answer", "reward", "rescued by")
SERIES = "samples"
"""Last segment of a table's name: POLICY/samples."""
MAX_TEXT_CHARS = 4_000
"""Most characters of one prompt or answer in a table; the file has the whole text."""
LEFT_OUT = " [...]"


class SampleFile(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rollout file of one step of one policy, of which a tracker is to show some answers."""

    path: str
    """`rollouts/step_N/POLICY.jsonl.gz`."""
    num_rows: int
    """Most rows of the table."""
    time_unix_s: float

    @property
    def policy(self) -> str:
        """Policy that trained on the answers."""
        return policy_of(Path(self.path))

    @property
    def step(self) -> int:
        """Step that trained on the answers."""
        return step_of(Path(self.path))


Row = tuple[str, int, str, str, float | None, str]
"""Values of `COLUMNS`; the reward is None where it was no finite number, "rescued by" is empty for an own answer."""


class SampleTable(msgspec.Struct, frozen=True, kw_only=True):
    """Table of answers that a tracker shows for one step of one policy."""

    policy: str
    step: int
    time_unix_s: float
    rows: list[Row]

    @property
    def name(self) -> str:
        """Name of the table's series."""
        return f"{self.policy}/{SERIES}"


def read_table(file: SampleFile) -> SampleTable:
    """Return the table of a file: rescues first, for at most half of the rows, then own answers from all over the step.

    Raises FileNotFoundError when no answers can be read there: the files of a run stay within a bound, and old files
    are removed.
    """
    found = list(read_rollouts(Path(file.path)))
    if not found:
        raise FileNotFoundError(f"no answers in {file.path}")
    rescues = [row for row in found if row.get("kind") == "rescue"]
    own = [row for row in found if row.get("kind") != "rescue"]
    shown = rescues[: max(file.num_rows // 2, file.num_rows - len(own))]
    shown += _spread(own, file.num_rows - len(shown))
    rows = [_row(row, file) for row in shown]
    return SampleTable(policy=file.policy, step=file.step, time_unix_s=file.time_unix_s, rows=rows)


def _spread(rows: Sequence[dict[str, Any]], num: int) -> list[dict[str, Any]]:
    """Return `num` of the rows at even distances, with the first row."""
    num = min(num, len(rows))
    return [rows[place * len(rows) // num] for place in range(num)]


def _row(row: dict[str, Any], file: SampleFile) -> Row:
    rescued_by = str(row.get("source", "")) if row.get("kind") == "rescue" else ""
    texts = _shortened(str(row.get("prompt", ""))), _shortened(str(row.get("completion", "")))
    return (file.policy, file.step, *texts, row.get("reward"), rescued_by)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + LEFT_OUT
