"""`rollouts/step_N/<policy>.jsonl.gz`: every answer that a policy trained on at a step, as compressed JSON lines.

The policy's learner writes one whole file a step. pandas reads such a file as it is:
`pandas.read_json("runs/x/rollouts/step_7/qwen.jsonl.gz", lines=True)`. docs/samples.md lists the columns.

The files of a policy stay within a bound of bytes. When they outgrow it, every second of the kept steps is removed, and
from then on only steps of this wider stride are kept, and the newest step. So the files always cover the whole run.
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
from mrl.records.readable_turns import ReadableTurn

LEVEL = 3
"""Level of compression: a higher level takes several times as long to save a tenth of the bytes."""
STEP, ENDING = "step_", ".jsonl.gz"


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One answer that was trained on, with its prompt. The names of the fields are the columns of the file."""

    policy: str
    step: int
    kind: str
    """"rollout" for an own answer, "rescue" for a peer's answer to a prompt on which the whole own group failed."""
    task: str
    prompt_id: str
    """Id of the prompt, the same for all policies of the run."""
    prompt: str
    completion: str
    reward: float
    rewards: dict[str, float] = {}
    """Parts of the reward by name, where the verifier gave several."""
    failure: str = ""
    """Why the verifier gave no reward; empty where it gave one."""
    source: str
    """Policy that wrote the answer."""
    finish_reason: str = ""
    """"stop" when the policy ended the answer itself; empty for a peer's answer."""
    tokens: int | None = None
    """Number of tokens of the answer, with its closing EOS; None for a peer's answer."""
    logprob_mean: float | None = None
    """Mean log-probability of the tokens as sampled, in nats; None for a peer's answer."""
    oldest_step: int | None = None
    """Step of the oldest version that sampled one of the tokens."""
    newest_step: int | None = None
    """Step of the newest version that sampled one of the tokens."""
    opening: str = ""
    """First messages of an episode as the policy was shown them, with special tokens; empty for other answers."""
    turns: list[ReadableTurn] = []
    """Turns of an episode after its opening, which `completion` holds as one text; empty for other answers."""


class RolloutFiles:
    """Writes the files of one policy, at most `max_bytes` of them."""

    def __init__(self, folder: Path, policy: str, max_bytes: int) -> None:
        """`folder` is `rollouts` of the run; files that an earlier process of the learner left there count."""
        self._folder, self._policy, self._max_bytes = folder, policy, max_bytes
        self._sizes = {step_of(path): path.stat().st_size for path in rollout_files(folder, policy)}
        self._stride = 1

    def write(self, step: int, rows: Sequence[Rollout]) -> None:
        """Write one step, in place of an earlier file of this step.

        Files of later steps, which a resume has voided, are removed, and earlier steps where all files take too much.
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
            with suppress(OSError):  # another policy, or the supervisor, has a file of that step
                path.parent.rmdir()
            del self._sizes[step]

    def _path(self, step: int) -> Path:
        return path_of(self._folder, self._policy, step)


def path_of(folder: Path, policy: str, step: int) -> Path:
    """Return the path of a policy's file of one step, whether the file exists or not."""
    return folder / f"{STEP}{step}" / f"{policy}{ENDING}"


def rollout_files(folder: Path, policy: str = "*") -> list[Path]:
    """Return the files of a run, of one policy or all, ordered by step, then policy."""
    paths = [path for path in folder.glob(f"{STEP}*/{policy}{ENDING}") if step_of(path) >= 0]
    return sorted(paths, key=lambda path: (step_of(path), path.name))


def step_of(path: Path) -> int:
    """Return the step of a rollout file; -1 for another file."""
    number = path.parent.name.removeprefix(STEP)
    return int(number) if number.isdecimal() and path.name.endswith(ENDING) else -1


def policy_of(path: Path) -> str:
    """Return the policy of a rollout file."""
    return path.name.removesuffix(ENDING)


def read_rollouts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of one file, in the order of training. Damage of the compressed data ends the file there.

    A line without an object is left out. Values that were no finite number are None.
    """
    try:
        with gzip.open(path, "rb") as file:
            yield from (row for line in file if (row := parse_line(line)) is not None)
    except (OSError, EOFError, zlib.error):
        return
