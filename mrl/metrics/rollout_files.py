"""`rollouts/step_N/<policy>.jsonl.gz`: every answer that a policy trained on at a step, as compressed JSON lines.

The learner of the policy writes them, one whole file a step. pandas reads one as it is:
`pandas.read_json("runs/x/rollouts/step_7/qwen.jsonl.gz", lines=True)`. docs/samples.md lists the columns.

The files of a policy stay within a bound: when they outgrow it, every second of the steps that are left goes, and from
then on only steps of the wider stride are kept, and the newest. What is there covers the whole run at any time.
"""

import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from mrl.files import replace_file
from mrl.metrics.jsonl import parse_line
from mrl.records.told_turns import ToldTurn

LEVEL = 3
"""Of compression: a higher one takes several times as long for a tenth of the bytes."""
STEP, ENDING = "step_", ".jsonl.gz"


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One answer that was trained on, with its prompt. Names of fields are the columns."""

    policy: str
    step: int
    kind: str
    """"rollout" for an own answer, "rescue" for one of a peer on a prompt where the own group failed."""
    task: str
    prompt_id: str
    """The same in all policies of the run."""
    prompt: str
    completion: str
    reward: float
    rewards: dict[str, float] = {}
    """Parts of the reward by name, where the verifier gave several."""
    failure: str = ""
    """Why the verifier gave no reward."""
    source: str
    """The policy that wrote the answer."""
    finish_reason: str = ""
    """"stop" when the policy ended the answer itself; empty for a peer's."""
    tokens: int | None = None
    """Of the answer, with its closing EOS; None for a peer's."""
    logprob_mean: float | None = None
    """Nats per token as sampled; None for a peer's."""
    oldest_step: int | None = None
    """Step of the oldest version that sampled one of the tokens."""
    newest_step: int | None = None
    """Step of the newest version that sampled one of the tokens."""
    opening: str = ""
    """Of an episode: its first messages as the policy was shown them, special tokens included."""
    turns: list[ToldTurn] = []
    """Of an episode: who said what behind them, which `completion` tells as one text."""


class RolloutFiles:
    """Writes the files of one policy, within `max_bytes` of them."""

    def __init__(self, folder: Path, policy: str, max_bytes: int) -> None:
        """`folder` is `rollouts` of the run; steps of an earlier life, which are there already, count."""
        self._folder, self._policy, self._max_bytes = folder, policy, max_bytes
        self._sizes = {step_of(path): path.stat().st_size for path in rollout_files(folder, policy)}
        self._stride = 1

    def write(self, step: int, rows: Sequence[Rollout]) -> None:
        """Write one step, in place of what is there of it.

        Later steps, which a resume has voided, are removed, and earlier ones where all take too much.
        Raises OSError when the disk is full; nothing half-written is left.
        """
        data = gzip.compress(b"".join(msgspec.json.encode(row) + b"\n" for row in rows), LEVEL, mtime=0)
        path = self._path(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            replace_file(path, data, sync=False)
        except FileNotFoundError:  # another policy has just removed the folder, which was empty
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, data, sync=False)
        self._sizes[step] = len(data)
        self._remove(later for later in list(self._sizes) if later > step)
        self._thin(step)
        while self._stride <= step and sum(self._sizes.values()) > self._max_bytes:
            self._stride *= 2
            self._thin(step)

    def _thin(self, newest: int) -> None:
        self._remove(step for step in list(self._sizes) if step % self._stride and step != newest)

    def _remove(self, steps: Iterable[int]) -> None:
        for step in steps:
            path = self._path(step)
            path.unlink(missing_ok=True)
            with suppress(OSError):  # another policy, or the supervisor, has something of that step
                path.parent.rmdir()
            del self._sizes[step]

    def _path(self, step: int) -> Path:
        return path_of(self._folder, self._policy, step)


def path_of(folder: Path, policy: str, step: int) -> Path:
    """The file of one step of a policy, whether it is there or not."""
    return folder / f"{STEP}{step}" / f"{policy}{ENDING}"


def rollout_files(folder: Path, policy: str = "*") -> list[Path]:
    """The files of a run, of one policy or all, ordered by step, then policy."""
    paths = [path for path in folder.glob(f"{STEP}*/{policy}{ENDING}") if step_of(path) >= 0]
    return sorted(paths, key=lambda path: (step_of(path), path.name))


def step_of(path: Path) -> int:
    """The step that a file is of; -1 for a file of another kind."""
    number = path.parent.name.removeprefix(STEP)
    return int(number) if number.isdecimal() and path.name.endswith(ENDING) else -1


def policy_of(path: Path) -> str:
    """The policy that a file is of."""
    return path.name.removesuffix(ENDING)


def read_rollouts(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of one file, in the order of training; what cannot be read costs itself and all behind it.

    Values that were no finite number are None.
    """
    try:
        with gzip.open(path, "rb") as file:
            yield from (row for line in file if (row := parse_line(line)) is not None)
    except (OSError, EOFError, zlib.error):
        return
