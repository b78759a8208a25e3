"""`mrl COMMAND ...`: find the command, run it, and turn every expected error into one line."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from mrl.config.nearest_key import nearest
from mrl.config.overrides import tell_overrides
from mrl.errors import ConfigError, MRLError, RunFolderError, UserError
from mrl.files import DISK_FULL
from mrl.process_start import importing, prepare


class Command(NamedTuple):
    """Module and summary of one command."""

    module: str
    summary: str
    takes_overrides: bool = False
    is_role: bool = False
    """Whether the command is one process of a run, for launchers and the supervisor to call."""


COMMANDS: dict[str, Command] = {
    "quickstart": Command(
        "mrl.cli.quickstart",
        "train two small policies that learn from each other, on this machine",
        takes_overrides=True,
    ),
    "train": Command("mrl.cli.train", "train the policies of the configuration CONFIG", takes_overrides=True),
    "launch": Command(
        "mrl.cli.launch", "train the policies of CONFIG on several hosts, also through SLURM", takes_overrides=True
    ),
    "join": Command("mrl.cli.join_run", "run this host's processes of a run on several hosts"),
    "stop": Command("mrl.cli.stop", "end a run, or one policy of it, from any host"),
    "init": Command("mrl.cli.init", "write a commented configuration for models and data of your own"),
    "check": Command("mrl.cli.check", "validate CONFIG and print the resolved plan", takes_overrides=True),
    "fetch": Command("mrl.cli.fetch", "download the models of CONFIG from the hub before a run", takes_overrides=True),
    "policies": Command("mrl.cli.policies", "make the small local policies of CONFIG", takes_overrides=True),
    "report": Command("mrl.cli.write_report", "write report.html of a run and print its path"),
    "samples": Command("mrl.cli.samples", "show answers of a run: prompts, rewards, who rescued whom"),
    "inspect": Command(
        "mrl.cli.inspect_exchange", "show what the exchange of a run holds and passes on, and who waits"
    ),
    "eval": Command("mrl.cli.evaluate", "measure runs and models on held-out prompts (pass@k), or compare results"),
    "export": Command("mrl.cli.export", "write a policy of a run as a Hugging Face folder"),
    "align": Command("mrl.cli.align", "compare two tokenizers: a pair card, or one text in the tokens of both"),
    "bandit": Command("mrl.cli.bandit", "study gains and costs of sharing on a bandit: tables and plots"),
    "schema": Command("mrl.cli.print_schema", "print the JSON schema of configurations, for editors"),
    "compare": Command(
        "mrl.cli.compare", "train CONFIG under several sharing regimes and compare the results", takes_overrides=True
    ),
    "doctor": Command("mrl.cli.doctor", "show what this machine has, and test each engine on it"),
    "engine-env": Command("mrl.cli.engine_env", "make the Python environment of an inference server: vllm, sglang"),
    "version": Command("mrl.cli.print_version", "print the versions of mrl and of the packages that it uses"),
    "exchange keys": Command("mrl.cli.exchange_keys", "list, make or revoke the keys that may connect to a run"),
    "exchange": Command("mrl.cli.roles", "the exchange daemon, which passes records between policies", is_role=True),
    "allocator": Command("mrl.cli.roles", "the allocator, which shares slots or units between policies", is_role=True),
    "gateway": Command("mrl.cli.roles", "the gateway, where agents ask policies over HTTP", is_role=True),
    "learner": Command("mrl.cli.roles", "one rank of a policy's learner", is_role=True),
    "worker": Command("mrl.cli.roles", "one rollout worker of a policy", is_role=True),
    "kept-version": Command(
        "mrl.cli.roles", "a server of one kept checkpoint, for requests through the gateway", is_role=True
    ),
}
MEANT: dict[str, str] = {
    "run": "train", "start": "train", "resume": "train CONFIG --resume", "continue": "train CONFIG --resume",
    "evaluate": "eval", "evaluation": "eval", "pass@k": "eval", "results": "report", "metrics": "report",
    "plot": "report", "show": "report", "status": "inspect", "see": "inspect", "dump": "inspect", "watch": "inspect",
    "rollouts": "samples", "answers": "samples", "completions": "samples", "browse": "samples", "sample": "samples",
    "validate": "check", "plan": "check", "lint": "check", "dry-run": "check", "config": "check",
    "new": "init", "create": "init", "template": "init", "example": "quickstart", "demo": "quickstart",
    "save": "export", "convert": "export", "kill": "stop", "end": "stop", "cancel": "stop",
    "slurm": "launch --slurm", "sbatch": "launch --slurm", "submit": "launch --slurm --submit",
    "keys": "exchange keys", "engine": "engine-env", "engines": "engine-env", "setup": "engine-env",
    "vllm": "engine-env vllm", "sglang": "engine-env sglang", "info": "doctor", "env": "doctor", "download": "fetch",
    "help": "--help", "ablate": "compare", "benchmark": "compare", "tokenizers": "align", "models": "policies make",
}  # fmt: skip
"""Words that people try in place of a command -> the command that they mean."""


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(message, where=self.prog, cure=f"see `{self.prog} --help`")


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 2 for a mistake that the user can cure, 1 for other failures."""
    prepare()
    try:
        code = _run(list(sys.argv[1:] if words is None else words))
        sys.stdout.flush()
        return code
    except UserError as error:
        return _tell(error, 2)
    except MRLError as error:
        return _tell(error, 1)
    except BrokenPipeError:  # the reader of stdout left, as `head` does
        _drop_output()
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        _drop_output()
        return _tell(disk_full(error), 2)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0 if words else 2
    name, *rest = words
    if rest and f"{name} {rest[0]}" in COMMANDS:
        name, rest = f"{name} {rest[0]}", rest[1:]
    name = "version" if name == "--version" else name
    if name not in COMMANDS:
        near = MEANT.get(name) or nearest(name, [known for known, one in COMMANDS.items() if not one.is_role])
        cure = f"did you mean `mrl {near}`?" if near else "see `mrl --help`"
        raise ConfigError("no such command", where="mrl", got=name, cure=cure)
    command = COMMANDS[name]
    with importing():
        module = importlib.import_module(command.module)
    parser = Parser(prog=f"mrl {name}", description=command.summary, allow_abbrev=False)
    parser.set_defaults(command=name, overrides=[])
    if command.takes_overrides:
        parser.epilog = "Every key of CONFIG can be set here: --key.path VALUE or --key.path=VALUE."
    module.add_arguments(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    own, overrides = split_overrides(rest, flags) if command.takes_overrides else (rest, [])
    arguments = parser.parse_args(own)
    arguments.overrides = overrides
    try:
        return int(module.run(arguments))
    except UserError as error:
        tell_overrides(error, str(getattr(arguments, "config", "")), overrides)
        raise


def split_overrides(words: Sequence[str], flags: set[str]) -> tuple[list[str], list[str]]:
    """Split into (words of the command itself, dotted overrides with their values), each in the order given.

    argparse cannot do this: it would take the value of an unknown option for a positional argument.
    """
    own: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--" or word.partition("=")[0] in flags:
            own.append(word)
            continue
        overrides.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return own, overrides


def _help() -> str:
    lines = ["usage: mrl COMMAND ...", "", "mutual reinforcement learning of language models (arXiv 2605.07244)", ""]
    rows: dict[bool, list[str]] = {is_role: [] for is_role in (False, True)}
    for name, command in COMMANDS.items():
        rows[command.is_role].append(f"  {name:<13} {command.summary}")
    roles = ["", "processes of a run, which `mrl train` starts:", "", *rows[True]]
    return "\n".join([*lines, *rows[False], *roles, "", "`mrl COMMAND --help` shows the arguments of a command."])


def disk_full(error: OSError) -> RunFolderError:
    """Return the error for a full disk, or for a full quota of the user."""
    cure = "free some space there and continue the run with --resume, or choose a --run.folder on another disk"
    return RunFolderError(
        error.strerror or "the disk is full", where=str(error.filename or ""), cure=cure if error.filename else ""
    )


def _drop_output() -> None:
    """Discard buffered output, so that its writing raises nothing at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(error: MRLError, code: int) -> int:
    for one in (error, *(error.more if isinstance(error, UserError) else ())):
        sys.stderr.write(f"mrl: error: {' '.join(str(one).split())}\n")
    return code
