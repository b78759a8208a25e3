"""mrl from Python: configurations, runs in processes of their own, and the folders of runs.

    config = mrl.load("quickstart", {"run.steps": 20})
    run = mrl.train(config, on_step=print)
    table = pandas.DataFrame(run.metrics(policy="qwen"))
    run.policies["qwen"].export("qwen-trained")

A run has the same processes and the same folder as with `mrl train`. It is a child of this program and ends with it.
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
from mrl.config.nearest_key import nearest
from mrl.config.overrides import tell_overrides
from mrl.config.run_folder import RunFolder, read_run_config, run_folder_of
from mrl.config.schema import RunConfig
from mrl.config.shipped_configs import config_file
from mrl.errors import ConfigError, RoleFailed, RunFolderError, UserError
from mrl.metrics.jsonl import each_metrics, parse_line
from mrl.parent_death import command

__all__ = ["Policy", "Run", "Step", "load", "open", "train"]

CONFIGURATION, OVERRIDES = "configuration", "overrides"
"""Names in messages: of a configuration that lies in no file, and of the keys that replace its own."""
ERROR = "mrl: error: "
"""Beginning of a line that says why a command failed."""
LOSS = "loss/total"
"""Metric that marks a line as a learner step: every step has it, and no other line of a learner."""
POLL_S = 0.2
END_S = 120.0
"""Seconds, on top of `supervision.stop_s`, until a run that was asked to end is killed."""


@dataclass(frozen=True, slots=True)
class Step:
    """One finished learner step of one policy."""

    policy: str
    step: int
    values: dict[str, float | None]
    """Metric -> value, None where the value was not finite; docs/reference/metrics.md lists the metrics."""


class Policy:
    """One learning policy of a run."""

    def __init__(self, run: "Run", name: str) -> None:
        self._run, self.name = run, name

    @property
    def steps(self) -> list[int]:
        """Learner steps with a checkpoint, oldest first."""
        from mrl.weights.checkpoint_store import CheckpointStore  # imports torch

        return CheckpointStore(RunFolder(self._run.path).checkpoints(self.name), self.name).steps()

    def export(self, to: str | Path | None = None, *, step: int | None = None, dtype: str = "model") -> Path:
        """Write a step's checkpoint, by default the newest, as a Hugging Face folder; return its path.

        Its weights are in `dtype`, "float32", "bfloat16" or "float16", or with "model" as in the model that the policy
        was trained from. Raises RunFolderError when there is no such step or `to` is taken, CheckpointError when the
        checkpoint is not sound, ConfigError for another dtype, MissingError where the policy's model is not here.
        """
        from mrl.cli.export import export
        from mrl.processes.preparation.hub_models import check_here, located

        check_here(self._run.config, [self.name], self._run.path)
        place = Path(to) if to is not None else None
        config, folder = located(self._run.config), RunFolder(self._run.path)
        return export(config, folder, self.name, step, place, dtype=dtype)


class Run:
    """A run that is over or goes on, seen through its folder; every call reads the folder anew."""

    def __init__(self, path: Path) -> None:
        """Raises RunFolderError where `path` holds no run."""
        self.config = read_run_config(path)
        self.path = path.resolve()
        self.policies = {name: Policy(self, name) for name in self.config.learning}

    def metrics(self, policy: str = "", *, role: str = "learner") -> list[dict[str, Any]]:
        """Return one flat row per line of metrics.jsonl from a kind of role: "learner", "worker", ...; "" for all.

        Columns are time_unix_s, role, policy, step, and the metrics. Steps that a resume voided are included.
        Raises RunFolderError for an unknown policy.
        """
        if policy and policy not in self.config.policies:
            near = nearest(policy, self.config.policies)
            raise RunFolderError(
                "no policy of this name",
                where=str(self.path),
                got=policy,
                wanted=f"one of {', '.join(self.config.policies)}",
                cure=f"did you mean {near}?" if near else "",
            )
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
        """Return answers that were trained on, newest step first; docs/samples.md lists the columns.

        With `held_out`, return answers to held-out prompts instead; a run keeps some of every evaluation.

        Raises RunFolderError where no answers are kept, and for an unknown policy, task or step.
        """
        from mrl.report.samples.answer_filter import AnswerFilter, select

        kinds = {"failed": failed, "rescued": rescued, "held_out": held_out}
        wanted = AnswerFilter(policy=policy, step=step, task=task, words=find, **kinds)
        return select(RunFolder(self.path), self.config, wanted)

    def report(self) -> Path:
        """Write report.html into the run folder; return its path."""
        from mrl.report.page import write_report

        return write_report(self.path)

    def __repr__(self) -> str:
        """Expression that opens the run again."""
        return f"mrl.open({str(self.path)!r})"


def load(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Return the validated configuration of a TOML file, a shipped file ("quickstart"), or a dict with a file's tables.

    `overrides` replace keys, as {"run.steps": 20}. Raises ConfigError with the message of `mrl check`.
    """
    pairs = [(tuple(key.split(".")), value) for key, value in (overrides or {}).items()]
    where = CONFIGURATION if isinstance(source, Mapping) else str(config_file(str(source)))
    try:
        tables = dict(source) if isinstance(source, Mapping) else parse_toml(read_text(Path(where)), where=where)
        return resolve(tables, pairs, where=where).config
    except UserError as error:
        words = [f"--{key}={value}" for key, value in (overrides or {}).items()]
        tell_overrides(error, where, words, told_as=OVERRIDES)
        raise


def open(path: str | Path) -> Run:
    """Return the run in a folder. Raises RunFolderError where the folder holds none."""
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

    `on_step` is called with every learner step, `on_line` with every line that the command prints. An exception in
    either, or KeyboardInterrupt, ends the run before it propagates. Raises UserError for what the user can cure,
    RoleFailed when the run cannot go on.
    """
    if not isinstance(config, RunConfig):
        told = type(config).__name__
        raise ConfigError("not a configuration", where="mrl.train", got=told, wanted="what mrl.load returns")
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
    """A running command whose stdout and stderr a thread reads as one stream; ended in bounded time with its block."""

    def __init__(self, argv: list[str], config: str, bound_s: float) -> None:
        """`config`: path of a temporary file, which the lines are not to show. `bound_s`: seconds until a kill."""
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
        """Interrupt the command as Ctrl-C does, so that its processes end in order; kill it after the bound."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(self._bound_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(POLL_S)

    def is_running(self, wait_s: float) -> bool:
        """Wait `wait_s` for the command to end; return whether it still runs."""
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return True
        self._reader.join(self._bound_s)
        return False

    def lines(self) -> list[str]:
        """Return the lines printed since the last call."""
        with self._lock:
            lines, self._lines = self._lines, []
        return lines

    def check(self) -> None:
        """Raises UserError or RoleFailed, with the command's own message, when the command failed."""
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
    """Reader of the learner steps that are appended to a metrics file."""

    def __init__(self, path: Path, *, from_end: bool) -> None:
        """`from_end`: skip the lines already there (resume). Else they belong to a run about to be cleared."""
        self._path = path
        known = path.stat() if path.exists() else None
        self._offset = known.st_size if known and from_end else 0
        self._cleared = _identity(known) if known and not from_end else None

    def read(self) -> list[Step]:
        """Return the steps appended since the last call, in order."""
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
    """Return (inode, size, mtime) of a file that no process writes; the inode number alone may be reused."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _without_none(value: Any) -> Any:
    """Return tables as TOML can hold them: without keys whose value is None."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
