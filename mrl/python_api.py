"""mrl from Python: configurations, runs in processes of their own, and what runs left in their folders.

    config = mrl.load("quickstart", {"run.steps": 20})
    run = mrl.train(config, on_step=print)
    table = pandas.DataFrame(run.metrics(policy="qwen"))
    run.policies["qwen"].export("qwen-trained")

A run is that of `mrl train`, with the same processes and the same folder. It is a child of this program and ends with
it.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from mrl.config.load import parse_toml, read_text, resolve
from mrl.config.run_folder import RunFolder, read_run_config, run_folder_of
from mrl.config.schema import RunConfig
from mrl.config.shipped_configs import config_file
from mrl.errors import RoleFailed, UserError
from mrl.metrics.jsonl import each_metrics, parse_line
from mrl.parent_death import command

__all__ = ["Policy", "Run", "Step", "load", "open", "train"]

CONFIGURATION = "configuration"
"""What messages call one that lies in no file."""
ERROR = "mrl: error: "
"""Opens a line that says why a command failed."""
LOSS = "loss/total"
"""Is among the metrics of every step, and of nothing else that a learner tells."""
POLL_S = 0.2
END_S = 120.0
"""Beyond `supervision.stop_s`, until a run that was asked to end is killed."""


@dataclass(frozen=True, slots=True)
class Step:
    """One learner step of one policy, as it was told when it was done."""

    policy: str
    step: int
    values: dict[str, float | None]
    """Metric -> value; docs/reference/metrics.md lists them. None where it was no finite number."""


class Policy:
    """One policy of a run that learns."""

    def __init__(self, run: "Run", name: str) -> None:
        self._run, self.name = run, name

    @property
    def steps(self) -> list[int]:
        """Steps with a checkpoint, oldest first."""
        from mrl.weights.checkpoint_store import CheckpointStore  # imports torch

        return CheckpointStore(RunFolder(self._run.path).checkpoints(self.name), self.name).steps()

    def export(self, to: str | Path | None = None, *, step: int | None = None, dtype: str = "model") -> Path:
        """Write a checkpoint, the newest by default, as a Hugging Face folder; returns its path.

        Its weights are in `dtype`, "float32", "bfloat16" or "float16", or as in the model that the policy was trained
        from. Raises RunFolderError when there is no such step or the place is taken, CheckpointError when it is not
        sound, ConfigError for another dtype.
        """
        from mrl.cli.export import export
        from mrl.processes.preparation.hub_models import check_here, located

        check_here(self._run.config, [self.name], self._run.path)
        place = Path(to) if to is not None else None
        config, folder = located(self._run.config), RunFolder(self._run.path)
        return export(config, folder, self.name, step, place, dtype=dtype)


class Run:
    """A run that is over, or goes on, as its folder shows it; every call reads what is there now."""

    def __init__(self, path: Path) -> None:
        """Raises RunFolderError where there is no run."""
        self.config = read_run_config(path)
        self.path = path.resolve()
        self.policies = {name: Policy(self, name) for name in self.config.learning}

    def metrics(self, policy: str = "", *, role: str = "learner") -> list[dict[str, Any]]:
        """One flat row per record of a kind of role, for example "learner", "worker" or "exchange"; "" takes all.

        Columns are time_unix_s, role, policy, step, and the metrics. Steps that a resume voided are among them.
        """
        return [
            {name: line[name] for name in ("time_unix_s", "role", "policy", "step")} | line["values"]
            for line in each_metrics(RunFolder(self.path).metrics_jsonl)
            if isinstance(line.get("values"), dict)
            and line["role"].partition("/")[0].startswith(role)
            and policy in ("", line["policy"])
        ]

    def samples(
        self,
        policy: str = "",
        *,
        step: int | None = None,
        task: str = "",
        failed: bool = False,
        rescued: bool = False,
        held_out: bool = False,
        find: str = "",
    ) -> Iterator[dict[str, Any]]:
        """Answers that were trained on, newest step first; columns are in docs/samples.md.

        With `held_out` those to held-out prompts, of which a run keeps some of every evaluation.

        Raises RunFolderError where none are kept, or for a policy, task or step that is not there.
        """
        from mrl.report.samples.wanted_answers import Wanted, select

        kinds = {"failed": failed, "rescued": rescued, "held_out": held_out}
        wanted = Wanted(policy=policy, step=step, task=task, words=find, **kinds)
        return select(RunFolder(self.path), self.config, wanted)

    def report(self) -> Path:
        """Write report.html into the run folder; returns its path."""
        from mrl.report.page import write_report

        return write_report(self.path)

    def __repr__(self) -> str:
        """With the path."""
        return f"mrl.open({str(self.path)!r})"


def load(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """The validated configuration of a TOML file, of a shipped one ("quickstart"), or of tables as a file has them.

    `overrides` are laid over it, as {"run.steps": 20}. Raises ConfigError, as `mrl check` would say it.
    """
    pairs = [(tuple(key.split(".")), value) for key, value in (overrides or {}).items()]
    if isinstance(source, Mapping):
        return resolve(dict(source), pairs, where=CONFIGURATION).config
    path = config_file(str(source))
    return resolve(parse_toml(read_text(path), where=str(path)), pairs, where=str(path)).config


def open(path: str | Path) -> Run:
    """The run in a folder. Raises RunFolderError where there is none."""
    return Run(Path(path))


def train(
    config: RunConfig,
    *,
    clean: bool = False,
    resume: bool = False,
    on_step: Callable[[Step], object] | None = None,
    on_line: Callable[[str], object] = print,
) -> Run:
    """Train to the end, as `mrl train` does, and return the run.

    `on_step` is called with every learner step, `on_line` with every line that the command prints. An exception of
    either, as KeyboardInterrupt, ends the run first. Raises UserError for what the user can cure, RoleFailed when the
    run cannot go on.
    """
    flags = ["--clean"] * clean + ["--resume"] * resume
    folder = run_folder_of(config)
    steps = _NewSteps(folder.metrics_jsonl, from_end=resume)
    with tempfile.TemporaryDirectory(prefix="mrl-") as temporary:
        path = Path(temporary) / f"{config.run.name}.toml"
        path.write_text(tomli_w.dumps(_without_none(config.model_dump(mode="json", exclude_unset=True))))
        argv = (sys.executable, "-m", "mrl", "train", str(path), *flags)
        with _Child(command(os.getpid(), argv), str(path), config.supervision.stop_s + END_S) as child:
            while child.is_running(POLL_S):
                _tell(child.lines(), on_line, steps, on_step)
            _tell(child.lines(), on_line, steps, on_step)
    child.check()
    return Run(folder.path)


def _tell(
    lines: list[str],
    on_line: Callable[[str], object],
    steps: "_NewSteps",
    on_step: Callable[[Step], object] | None,
) -> None:
    for line in lines:
        on_line(line)
    if on_step:
        for step in steps.read():
            on_step(step)


class _Child:
    """A command whose output, both streams in one, is read by a thread; ended within a bound when its block ends."""

    def __init__(self, argv: list[str], config: str, bound_s: float) -> None:
        """`config` is the name of a file that its user knows nothing of."""
        self._config, self._bound_s = config, bound_s
        self._process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        self._lock, self._lines, self._errors = threading.Lock(), list[str](), list[str]()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *_: object) -> None:
        """Asked first, as Ctrl-C does, so that its processes end in their order."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(self._bound_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(POLL_S)

    def is_running(self, wait_s: float) -> bool:
        """Whether it goes on after so many seconds."""
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return True
        self._reader.join(self._bound_s)
        return False

    def lines(self) -> list[str]:
        """What it printed since the last call."""
        with self._lock:
            lines, self._lines = self._lines, []
        return lines

    def check(self) -> None:
        """Raises UserError or RoleFailed when it failed, with its own words."""
        code, why = self._process.returncode, "; ".join(self._errors)
        if code == 2:
            raise UserError(why or "mrl train ended with exit code 2")
        if code:
            raise RoleFailed(why or f"mrl train ended with exit code {code}")

    def _read(self) -> None:
        assert self._process.stdout
        with self._process.stdout as output:
            for told in output:
                line = told.rstrip("\n").replace(self._config, CONFIGURATION)
                with self._lock:
                    self._lines.append(line)
                if line.startswith(ERROR):
                    self._errors.append(line.removeprefix(ERROR))


class _NewSteps:
    """Learner steps as they are appended to a metrics file."""

    def __init__(self, path: Path, *, from_end: bool) -> None:
        """`from_end` leaves out what is there; else what is there belongs to a run that is about to be cleared."""
        self._path = path
        known = path.stat() if path.exists() else None
        self._offset = known.st_size if known and from_end else 0
        self._cleared = _identity(known) if known and not from_end else None

    def read(self) -> list[Step]:
        """The new ones, in order."""
        try:
            with self._path.open("rb") as file:
                now = os.fstat(file.fileno())
                if _identity(now) == self._cleared:
                    return []
                self._offset = min(self._offset, now.st_size)  # a damaged end may have been cut off
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        self._offset += len(whole) + bool(whole)
        found = (parse_line(line) for line in whole.split(b"\n"))
        return [
            Step(line["policy"], line["step"], line["values"])
            for line in found
            if line and line["role"].startswith("learner/") and LOSS in line.get("values", {})
        ]


def _identity(stat: os.stat_result) -> tuple[int, int, int]:
    """Of a file that nobody writes; the number of its inode alone may be given out again."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _without_none(value: Any) -> Any:
    """Tables as TOML can hold them: a key without a value is left out."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
