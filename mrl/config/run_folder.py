"""The folder of one run: the places of its files, and the rules for making, clearing and continuing it.

`<run.folder>/<run.name>/` holds config.json (resolved), metrics.jsonl, timeline.jsonl, units.jsonl, logs/attempt_N,
rollouts, unheard, pair_cards, checkpoints, lives, weights, kept_versions, evaluation, evals, exchange, endpoints, keys,
requests, crash, report.html. Files that only processes of one host share lie in that host's local folder. A run folder
appears whole or not at all. It is never overwritten without `clean`, never continued without `resume`, and never
touched while a supervisor lives in it.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from mrl.config.file_modes import check_writers, folder_mode
from mrl.config.locks import lock_folder, remove_left, try_lock, unlock
from mrl.config.resume import check_from_start, check_same_meaning, check_steps_left
from mrl.config.run_epochs import RunEpochs
from mrl.config.schema import RunConfig
from mrl.config.validation_errors import explain_earlier
from mrl.errors import RunFolderError
from mrl.files import replace_file
from mrl.plugins import use_modules

log = structlog.get_logger()

MIB = 1024 * 1024
LOCK = "lock"
"""File that the supervisor has locked while it lives."""
LOCAL_FOLDER = "MRL_LOCAL_FOLDER"
"""Environment variable with the folder on this host that all processes of the run there share."""
SUBFOLDERS = (
    "logs", "rollouts", "checkpoints", "weights", "evaluation", "exchange", "endpoints", "keys", "crash"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of everything inside one run's folder."""

    path: Path

    @property
    def config_json(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.json"

    @property
    def metrics_jsonl(self) -> Path:
        """All metrics, written by the supervisor alone."""
        return self.path / "metrics.jsonl"

    @property
    def timeline_jsonl(self) -> Path:
        """Work and waits of every role, written by the supervisor alone."""
        return self.path / "timeline.jsonl"

    @property
    def units_jsonl(self) -> Path:
        """Every transition of a unit's lease, written by the allocator alone."""
        return self.path / "units.jsonl"

    @property
    def logs(self) -> Path:
        """Folder of attempt_N/<process>.log and of the link `latest`."""
        return self.path / "logs"

    @property
    def endpoints(self) -> Path:
        """Folder with one file per bound socket."""
        return self.path / "endpoints"

    @property
    def unheard(self) -> Path:
        """Metrics that ended roles left for the supervisor."""
        return self.path / "unheard"

    @property
    def keys(self) -> Path:
        """The run's CURVE keys (mode 0700)."""
        return self.path / "keys"

    @property
    def stacks(self) -> Path:
        """Stacks of roles that were asked for them by SIGUSR1, one file each."""
        return self.path / "crash" / "stacks"

    @property
    def exchange(self) -> Path:
        """Folder of the exchange's file."""
        return self.path / "exchange"

    @property
    def evaluation(self) -> Path:
        """Results of evaluations."""
        return self.path / "evaluation"

    @property
    def report_html(self) -> Path:
        """The report page."""
        return self.path / "report.html"

    @property
    def crash(self) -> Path:
        """Folder with one JSON file per role that ended with an error."""
        return self.path / "crash"

    @property
    def rollouts(self) -> Path:
        """Answers that were trained on, step_N/<policy>.jsonl.gz, and samples of others, step_N/<policy>.jsonl."""
        return self.path / "rollouts"

    @property
    def pair_cards(self) -> Path:
        """Error of a log-ratio that the tokenizers of two policies alone cause, one JSON file per pair."""
        return self.path / "pair_cards"

    def weights(self, policy: str) -> Path:
        """Published weights of one policy."""
        return self.path / "weights" / policy

    def checkpoints(self, policy: str) -> Path:
        """Checkpoints of one policy, step_N below it."""
        return self.path / "checkpoints" / policy

    def checkpoint_steps(self, policy: str) -> set[int]:
        """Return the steps of which a policy has a whole checkpoint."""
        names = (found.name.removeprefix("step_") for found in self.checkpoints(policy).glob("step_*"))
        return {int(name) for name in names if name.isdecimal()}

    def lives(self, policy: str) -> RunEpochs:
        """Return the lives of one policy's learner, noted in lives/<policy>.json and beside its checkpoints."""
        file = self.path / "lives" / f"{policy}.json"
        return RunEpochs(policy, file=file, checkpoints=self.checkpoints(policy), weights=self.weights(policy))


def run_folder_of(config: RunConfig) -> RunFolder:
    """Return the folder of the run of `config`."""
    return RunFolder((Path(config.run.folder) / config.run.name).resolve())


def create_run_folder(
    config: RunConfig,
    *,
    clean: bool = False,
    resume: bool = False,
    from_start: Collection[str] = (),
    closing: ExitStack | None = None,
) -> RunFolder:
    """Make the folder of a new run, or open it again with `resume`; `clean` deletes the earlier run first.

    The policies `from_start` of a run that is resumed begin anew. The folder is locked before anything in it changes,
    and stays locked until `closing` is closed, if there is one.
    Raises RunFolderError, with nothing half-written, when the folder exists (or, with `resume`, does not), is no run of
    mrl, is in use, cannot be written, or has too little free disk.
    """
    folder = run_folder_of(config)
    check_run_folder(config, clean=clean, resume=resume, from_start=from_start)
    with ExitStack() as own:
        try:
            if resume:
                own.callback(lock_run_folder(folder))
                _check_resumed(folder, config, from_start)
                folder.path.chmod(folder_mode(config))
                write_json(folder.config_json, dump_config(config))
                for policy in from_start:
                    folder.lives(policy).start_over()
            else:
                _make(folder.path, dump_config(config), own, replace=clean, mode=folder_mode(config))
        except OSError as error:
            raise RunFolderError(
                f"cannot write to the run folder ({error.strerror})",
                where=str(folder.path),
                cure="choose another --run.folder",
            ) from error
        if closing is not None:
            closing.enter_context(own.pop_all())
    return folder


def check_run_folder(
    config: RunConfig, *, clean: bool = False, resume: bool = False, from_start: Collection[str] = ()
) -> None:
    """Raise what `create_run_folder` would raise, without touching the disk."""
    folder = run_folder_of(config)
    path, where = folder.path, str(folder.path)
    if clean and resume:
        raise RunFolderError("--clean and --resume cannot be used together", where=where, cure="use only one of them")
    check_from_start(from_start, config, resume=resume, where=where)
    if os.path.exists(path) and not path.is_dir():
        raise RunFolderError("the path is a file", where=where, wanted="a folder", cure="choose another --run.name")
    filled = os.path.isdir(path) and any(path.iterdir())
    if resume and not filled:
        raise RunFolderError("there is no run to resume", where=where, cure="leave out --resume")
    if filled:
        _check_filled(path, clean=clean, resume=resume)
    if resume:
        _check_resumed(folder, config, from_start)
    check_disk(path, config.run.min_free_mib)


def check_disk(path: Path, min_free_mib: int) -> None:
    """Raises RunFolderError where a run's folder cannot be made at `path`, or has too little room there."""
    parent = path
    while not os.path.exists(parent):  # unlike Path.exists, never raises
        parent = parent.parent
    if not parent.is_dir():
        raise RunFolderError(
            "the path is a file, but a folder is needed", where=str(parent), cure="choose another --run.folder"
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RunFolderError(
            "cannot write to this folder (permission denied)", where=str(parent), cure="choose another --run.folder"
        )
    free_mib = shutil.disk_usage(parent).free // MIB
    if free_mib < min_free_mib:
        raise RunFolderError(
            "not enough free disk space",
            where=str(parent),
            got=f"{free_mib} MiB",
            wanted=f">= {min_free_mib} MiB (run.min_free_mib)",
            cure="free some space, or choose another --run.folder",
        )


def read_run_config(run_folder: Path, *, is_own: bool = True) -> RunConfig:
    """Return a run's resolved configuration; if `is_own`, modules are found where it says. Raises RunFolderError."""
    file = RunFolder(run_folder).config_json
    try:
        config = RunConfig.model_validate_json(file.read_text(encoding="utf-8"))
        if is_own:
            use_modules(config.run.modules)
        return config
    except FileNotFoundError:
        raise RunFolderError(
            "not a run folder (no config.json)", where=str(run_folder), cure="give the folder of a run, runs/<name>"
        ) from None
    except ValidationError as error:
        raise explain_earlier(error, file) from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"config.json cannot be read ({str(error).splitlines()[0]})", where=str(file)) from None


def start_attempt(folder: RunFolder) -> Path:
    """Make logs/attempt_N for the next N, with a copy of config.json, and point logs/latest at it."""
    folder.logs.mkdir(parents=True, exist_ok=True)
    numbers = [int(path.name[8:]) for path in folder.logs.glob("attempt_*") if path.name[8:].isdigit()]
    attempt = folder.logs / f"attempt_{max(numbers, default=0) + 1}"
    attempt.mkdir()
    if folder.config_json.exists():
        shutil.copyfile(folder.config_json, attempt / "config.json")
    link = folder.logs / ".latest"
    link.unlink(missing_ok=True)
    link.symlink_to(attempt.name)
    link.rename(folder.logs / "latest")
    return attempt


def local_folder() -> Path | None:
    """Return the folder of the run on this host; None in a process that no supervisor started."""
    named = os.environ.get(LOCAL_FOLDER)
    return Path(named) if named else None


def socket_file(name: str) -> Path | None:
    """Return the path of a server's socket file on this host; None in a process that no supervisor started."""
    local = local_folder()
    return local / name if local else None


def lock_run_folder(folder: RunFolder) -> Callable[[], None]:
    """Mark the folder as in use until the returned function is called or the process ends, however it ends.

    Raises RunFolderError when another supervisor lives in it, or its file system takes no locks.
    """
    held = lock_folder(folder.path, LOCK)
    if held is None:
        raise _in_use(folder.path, supervisor_of(folder.path) or "unknown")
    return lambda: unlock(held)


def supervisor_of(path: Path) -> str | None:
    """Return a run folder's supervisor as a process id in text, or None. Raises RunFolderError for want of locks."""
    try:
        file = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return None if try_lock(file, path) else os.pread(file, 32, 0).decode(errors="replace").strip()
    finally:
        os.close(file)


def dump_config(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as plain JSON values."""
    return config.model_dump(mode="json")


def write_json(path: Path, value: object) -> None:
    """Replace the file at `path` by `value` as JSON, atomically and durably."""
    replace_file(path, (json.dumps(value, indent=2) + "\n").encode())


def _check_filled(path: Path, *, clean: bool, resume: bool) -> None:
    where = str(path)
    if not is_run(path):
        raise RunFolderError(
            "the folder exists but is not a run of mrl (it has no config.json), so it was not changed",
            where=where,
            cure="choose another --run.name or --run.folder",
        )
    if (holder := supervisor_of(path)) is not None:
        raise _in_use(path, holder)
    if not clean and not resume:
        raise RunFolderError(
            "the run already exists", where=where, cure="use --resume, --clean (deletes it), or another --run.name"
        )


def _check_resumed(folder: RunFolder, config: RunConfig, from_start: Collection[str]) -> None:
    where = str(folder.path)
    check_writers(folder.path)
    check_same_meaning(read_run_config(folder.path, is_own=False), config, where=where)
    saved = {name: folder.checkpoint_steps(name) for name in config.learning if name not in from_start}
    for name, steps in saved.items():
        folder.lives(name).check_not_lost(steps, together=config.learning if config.run.sync else ())
    check_steps_left(saved, config, where=where)


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run, and not of a model, which has a config.json too."""
    try:
        tables = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(tables, dict) and {"run", "policies", "tasks"} <= set(tables)


def _in_use(path: Path, holder: str) -> RunFolderError:
    return RunFolderError(
        "the run is still running",
        where=str(path),
        got=f"supervisor pid {holder}",
        cure=f"run `mrl stop {path}`, or choose another --run.name",
    )


def _make(path: Path, config: dict[str, Any], own: ExitStack, *, replace: bool, mode: int) -> None:
    """Build the folder under a temporary name and rename it, so that it appears whole, and locked, or not at all.

    With `replace`, an earlier run is locked, renamed out of the way only once the new folder is complete, then deleted.
    A run that somebody else begins meanwhile at `path` stays.
    """
    made = [parent for parent in path.parents if not os.path.exists(parent)]
    building = path.parent / f".{path.name}.new-{os.getpid()}"
    doomed = path.parent / f".{path.name}.old-{os.getpid()}"
    replace = replace and path.exists()
    with ExitStack() as earlier:
        if replace:
            earlier.callback(lock_run_folder(RunFolder(path)))
            remove_left(path.parent, f".{path.name}.old-")
        try:
            building.mkdir(parents=True)
            building.chmod(mode)
            for name in SUBFOLDERS:
                (building / name).mkdir(parents=True)
            (building / "keys").chmod(0o700)
            write_json(building / "config.json", config)
            own.callback(lock_run_folder(RunFolder(building)))
            if replace:
                path.rename(doomed)
            _put_in_place(building, path)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            if replace and doomed.exists() and not path.exists():
                doomed.rename(path)
            for parent in made:
                if os.path.isdir(parent) and not any(parent.iterdir()):
                    parent.rmdir()
            raise
        shutil.rmtree(doomed, ignore_errors=True)
        if doomed.exists():  # the new run is there all the same
            log.warning("the earlier run could not be deleted completely; delete the rest by hand", left=str(doomed))


def _put_in_place(building: Path, path: Path) -> None:
    try:
        building.rename(path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and is_run(path):  # it was begun in this moment
            raise _in_use(path, supervisor_of(path) or "unknown") from None
        raise
