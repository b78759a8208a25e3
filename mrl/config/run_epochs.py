"""Lives of a policy's learner: how many there were, and how far its checkpoints came; written twice, in two folders.

`checkpoints/<policy>/run_epoch` and `lives/<policy>.json` both hold the run epoch of the newest life, so that losing
one of them, or all checkpoints, does not let a version be used twice. The second also holds the newest step that was
saved, so that a policy whose checkpoints are gone is told from one that never had any.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from mrl.errors import RunFolderError
from mrl.files import replace_file

MAX_RUN_EPOCH = 2**31
SET_ASIDE = "set_aside_"
"""Beginning of the name of a folder for checkpoints that were set aside."""


class RunEpochsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of `lives/<policy>.json`."""

    run_epoch: int = -1
    saved_step: int = 0


class RunEpochs:
    """The lives of one policy's learner in a run folder."""

    def __init__(self, policy: str, *, file: Path, checkpoints: Path, weights: Path) -> None:
        """`file` lies apart from the policy's `checkpoints`. Published `weights` show that there were lives."""
        self._policy, self._checkpoints, self._weights = policy, checkpoints, weights
        self._file, self._counter = file, checkpoints / "run_epoch"

    @property
    def saved_step(self) -> int:
        """Newest step of which there was a checkpoint; 0 where there was none, or where that is not known."""
        return (self._noted() or RunEpochsFile()).saved_step

    def begin(self) -> int:
        """Count a new life, durably, and return its run epoch; no version is ever used twice.

        Raises RunFolderError when there were lives and their number is not known, OSError.
        """
        noted, counted = self._noted(), self._counted()
        known = [epoch for epoch in (noted.run_epoch if noted else None, counted) if epoch is not None]
        if not known and self._has_lived():
            raise RunFolderError(
                "the run epoch of this policy's learner is missing or damaged",
                where=str(self._counter),
                wanted=f"a whole number here or in {self._file}",
                cure=f"write a number to {self._counter.name} above every EPOCH in logs/ (version=EPOCH.STEP)",
            )
        epoch = max(known, default=-1) + 1
        self._note(RunEpochsFile(epoch, noted.saved_step if noted else 0))
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        replace_file(self._counter, str(epoch).encode())
        return epoch

    def saved(self, step: int) -> None:
        """Note that there is a checkpoint of this step. Raises OSError."""
        self._note(RunEpochsFile((self._noted() or RunEpochsFile()).run_epoch, step))

    def check_not_lost(self, steps: Collection[int], *, together: Collection[str] = ()) -> None:
        """Raises RunFolderError where there were checkpoints and there are none; `steps`: of the checkpoints there.

        `together` are the policies that can only begin anew with this one.
        """
        if self.saved_step and not steps:
            anew = f"start this policy from scratch: --resume --policy-from-start {self._policy}"
            if len(together) > 1:
                names = " ".join(f"--policy-from-start {name}" for name in together)
                anew = f"start all policies from scratch, because they step together: --resume {names}"
            raise RunFolderError(
                f"all checkpoints of {self._policy} are missing; the newest one was of step {self.saved_step}",
                where=str(self._checkpoints),
                cure=f"restore one, or {anew}",
            )

    def all_damaged(self, steps: Sequence[int], *, together: bool) -> RunFolderError:
        """Return the error for a policy none of whose checkpoints is sound: no restart would find anything else.

        With `together` all policies go on from one step.
        """
        anew = f"start this policy from scratch: --resume --policy-from-start {self._policy}"
        if together:
            anew = f"delete step_{steps[0]} of every policy, so that all resume from the step before"
        return RunFolderError(
            f"every checkpoint from which {self._policy} could resume is damaged; see its log",
            where=str(self._checkpoints),
            got=", ".join(f"step_{step}" for step in steps),
            cure=f"restore an intact one, or {anew}",
        )

    def start_over(self) -> None:
        """Let the policy begin anew: move its checkpoints into a folder beside them. Raises OSError."""
        found = sorted(self._checkpoints.glob("step_*"))
        if found:
            number = 1 + sum(1 for _ in self._checkpoints.glob(f"{SET_ASIDE}*"))
            aside = self._checkpoints / f"{SET_ASIDE}{number}"
            aside.mkdir()
            for path in found:
                path.rename(aside / path.name)
        self._note(RunEpochsFile((self._noted() or RunEpochsFile()).run_epoch))

    def _has_lived(self) -> bool:
        """Whether anything but a readable number shows that the learner has lived."""
        traces = (self._counter.exists(), self._file.exists(), any(self._checkpoints.glob("step_*")))
        return any(traces) or any(self._weights.glob("*/manifest.json"))

    def _noted(self) -> RunEpochsFile | None:
        try:
            life = msgspec.json.decode(self._file.read_bytes(), type=RunEpochsFile)
        except (OSError, ValueError, RecursionError):
            return None
        return life if 0 <= life.run_epoch < MAX_RUN_EPOCH and life.saved_step >= 0 else None

    def _counted(self) -> int | None:
        try:
            text = self._counter.read_bytes()[:16].strip()
        except OSError:
            return None
        return int(text) if text.isdigit() and int(text) < MAX_RUN_EPOCH else None

    def _note(self, life: RunEpochsFile) -> None:
        self._file.parent.mkdir(exist_ok=True)
        replace_file(self._file, msgspec.json.encode(life))
