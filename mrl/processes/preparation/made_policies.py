"""Small local policies, made once and cached by their content.

A made policy lies in `$MRL_CACHE/policies/<hash>` (default ~/.cache/mrl), where the hash covers everything that the
policy depends on. Parallel processes, one per core, make policies, so that this process never imports torch.
"""

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.markup import escape

import mrl
from mrl.config.locks import try_lock
from mrl.config.policy_tables import MakeTable
from mrl.config.schema import RunConfig
from mrl.config.task_tables import PoolTable, TaskTable
from mrl.errors import MRLError, RunFolderError, UserError
from mrl.parent_death import SUPERVISOR_PID, command
from mrl.processes.planning.log_lines import reason_in
from mrl.processes.planning.plan import environment

VERIFYING = {
    "verifier",
    "evaluator",
    "trusted_answers",
    "verifier_processes",
    "verifier_timeout_s",
    "verifier_memory_mib",
    "max_turns",
    "max_episode_tokens",
    "episode_s",
    "episode_cpu_s",
    "command",
    "agent_memory_mib",
    "environment_processes",
    "environment_memory_mib",
}
"""Keys of a task that do not change its examples."""
MAKING_FOLDERS = "models", "tasks", "tasks/games"
"""Folders of the package whose modules, without those of subfolders, a made policy depends on."""
POLL_S = 0.1
SAY_EVERY_S, TELL_EVERY_S = 0.5, 10.0
"""Seconds between reports of a maker's progress, and between their prints where there is no terminal."""
LAST_LINE_BYTES = 200
BAR_CHARS = 24


def resolve_policies(config: RunConfig, *, console: Console) -> RunConfig:
    """Return `config` with the absolute model folder of every policy; policies that the cache lacks are made first."""
    names = [name for name, policy in config.policies.items() if policy.make is not None]
    folders = make_policies(config, names, force=False, console=console)
    policies = {
        name: policy.model_copy(update={"model": str(folders.get(name, Path(policy.model).absolute()))})
        for name, policy in config.policies.items()
    }
    return config.model_copy(update={"policies": policies})


def recipe_of(config: RunConfig, name: str) -> dict[str, Any]:
    """Return the tables on which the making of one policy depends, as JSON values."""
    table = config.policies[name].make
    assert table is not None
    tasks = {
        task: entry.model_dump(mode="json", exclude=VERIFYING)
        for task, entry in config.tasks.items()
        if entry.operation or entry.source == "environment"
    }
    return {"make": table.model_dump(mode="json"), "tasks": tasks, "pool_seed": config.pool.seed}


def cached_folder(recipe: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder in which the policy of this recipe lies or will lie.

    The folder's name also changes with the code that makes policies and with the package that tasks come from.
    """
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode())
    package = Path(mrl.__file__).parent
    for source in sorted(path for folder in MAKING_FOLDERS for path in (package / folder).glob("*.py")):
        digest.update(source.read_bytes())
    with suppress(importlib.metadata.PackageNotFoundError):
        digest.update(importlib.metadata.version("reasoning-gym").encode())
    root = environ.get("MRL_CACHE") or Path.home() / ".cache" / "mrl"
    return Path(root).absolute() / "policies" / digest.hexdigest()[:16]


def is_made(folder: Path) -> bool:
    """Whether the cache holds the policy; folders appear whole or not at all."""
    return (folder / "config.json").is_file()


def make_policies(config: RunConfig, names: Sequence[str], *, force: bool, console: Console) -> dict[str, Path]:
    """Return the folder of every named policy; missing policies are made in parallel.

    Raises UserError for the first policy that a mistake prevents, MRLError for other failures.
    """
    recipes = {name: recipe_of(config, name) for name in names}
    folders = {name: cached_folder(recipe) for name, recipe in recipes.items()}
    # Two policies of one recipe share one folder, which is made once.
    waiting = list({folders[name]: name for name in names if force or not is_made(folders[name])}.values())
    under_way: list[_Making] = []
    with ExitStack() as stack:
        shown = MakingLine(console, stack) if waiting else None
        while waiting or under_way:
            while waiting and len(under_way) < len(os.sched_getaffinity(0)):
                name = waiting.pop(0)
                console.print(f"making policy {name}, once; it is kept for later runs", highlight=False)
                under_way.append(stack.enter_context(_making(name, recipes[name], folders[name])))
            time.sleep(POLL_S)
            if shown is not None:
                shown.show([making.progress for making in under_way], time.monotonic())
            for making in [one for one in under_way if one.process.poll() is not None]:
                under_way.remove(making)
                making.conclude()
                seconds = time.monotonic() - making.since_s
                console.print(
                    f"made policy {making.name} in {seconds:.0f} s: {making.folder}", highlight=False, soft_wrap=True
                )
    return folders


class MakingLine:
    """Progress of the policies being made: on a terminal a line that changes, elsewhere lines every few seconds."""

    def __init__(self, console: Console, stack: ExitStack) -> None:
        """The line on a terminal disappears when `stack` ends."""
        self._console, self._told_s = console, time.monotonic()
        self._status = stack.enter_context(console.status("starting")) if console.is_terminal else None

    def show(self, lines: Sequence[str], now_s: float) -> None:
        """Show these lines: on a terminal at once, elsewhere every TELL_EVERY_S."""
        if self._status is not None:
            self._status.update(escape("   ".join(lines)))
        elif now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            for line in lines:
                self._console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class _Making:
    name: str
    folder: Path
    process: "subprocess.Popen[bytes]"
    said: IO[bytes]
    told: IO[bytes]
    """Files with the maker's errors (`said`) and its progress (`told`)."""
    since_s: float

    @property
    def progress(self) -> str:
        """Progress that the maker printed last. Read with `pread`: the file's offset is where the maker writes."""
        number = self.told.fileno()
        told = os.pread(number, LAST_LINE_BYTES, max(0, os.fstat(number).st_size - LAST_LINE_BYTES))
        whole = told.decode(errors="replace").rpartition("\n")[0].splitlines()
        return whole[-1] if whole else f"{self.name}: collecting examples, {time.monotonic() - self.since_s:.0f} s"

    def conclude(self) -> None:
        """Raises UserError (the maker exited with 2) or MRLError unless the policy was made."""
        if self.process.returncode == 0:
            return
        self.said.seek(0)
        reason = reason_in(self.said.read().decode(errors="replace").splitlines())
        told = f"policy {self.name} cannot be made: {reason}"
        raise UserError(told) if self.process.returncode == 2 else MRLError(told)


@contextmanager
def _making(name: str, recipe: Mapping[str, Any], folder: Path) -> Iterator[_Making]:
    """Start a process that makes one policy; kill it when the block ends first."""
    with ExitStack() as files:
        said, told = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        file = files.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json"))
        json.dump(recipe, file)
        file.flush()
        words = ("policies", "build", file.name, "--policy", name, "--into", str(folder))
        bound = os.environ | environment(1) | {SUPERVISOR_PID: str(os.getpid())}
        argv = command(os.getpid(), (sys.executable, "-m", "mrl", *words))
        process = subprocess.Popen(argv, env=bound, stdin=subprocess.DEVNULL, stdout=told, stderr=said)
        try:
            yield _Making(name, folder, process, said, told, time.monotonic())
        finally:
            process.kill()
            process.wait()


def build_policy(recipe: Mapping[str, Any], name: str, folder: Path) -> None:
    """Make one policy in this process, and print the progress of its warm start.

    A policy that another process was making, for example of another run of a comparison, is not made twice.
    """
    with _turn(folder, name) as has_waited:
        if not (has_waited and is_made(folder)):
            _build(recipe, name, folder)


@contextmanager
def _turn(folder: Path, name: str) -> Iterator[bool]:
    """Wait until no other process makes the policy of this folder. Yields whether one did."""
    has_waited = False
    with ExitStack() as files:
        # Without locks each process makes the policy; and making it tells why nothing can be written there.
        with suppress(RunFolderError, OSError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = files.enter_context(folder.with_suffix(".lock").open("a"))
            while not try_lock(lock.fileno(), folder):
                if not has_waited:
                    print(f"{name}: another process is making it", flush=True)
                has_waited = True
                time.sleep(POLL_S)
        yield has_waited


def _build(recipe: Mapping[str, Any], name: str, folder: Path) -> None:
    from mrl.models.make import make_policy
    from mrl.tasks.warm_start_examples import collect_examples

    make = MakeTable.model_validate_json(json.dumps(recipe["make"]))
    tasks = {task: TaskTable.model_validate_json(json.dumps(table)) for task, table in recipe["tasks"].items()}
    pool = PoolTable(seed=recipe["pool_seed"])
    examples = collect_examples(tasks, pool, skilled_in=make.skilled_in, rare_share=make.rare_share)
    make_policy(make, examples, folder, on_step=_teller(name, make.warm_start_steps))


def _teller(name: str, num_steps: int) -> Callable[[int, float], None]:
    """Return a callback that prints the progress of the warm start and the seconds left."""
    began_s = time.monotonic()
    told_s = [began_s]

    def on_step(step: int, _loss: float) -> None:
        now_s = time.monotonic()
        if now_s - told_s[0] >= SAY_EVERY_S:
            told_s[0] = now_s
            left_s = (now_s - began_s) / max(1, step) * (num_steps - step)
            bar = "#" * round(BAR_CHARS * step / num_steps)
            print(f"{name:<6.12} [{bar:.<{BAR_CHARS}}] {step / num_steps:4.0%}, {left_s:.0f} s left", flush=True)

    return on_step
