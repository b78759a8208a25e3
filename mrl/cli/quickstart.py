"""`mrl quickstart [--clean | --resume] [--show] [--key.path VALUE ...]`: train the shipped configuration.

Every call is a new run, runs/quickstart, runs/quickstart-2, ..., unless --run.name, --clean or --resume is given. At
the end the command prints other commands to try.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

from mrl.cli import train
from mrl.config.load import load_config
from mrl.config.run_folder import run_folder_of
from mrl.config.shipped_configs import config_file

CONFIG = "quickstart"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: what becomes of an earlier run, and whether the configuration is only printed."""
    parser.set_defaults(config=config_file(CONFIG))
    train.add_earlier(parser)
    parser.add_argument("--show", action="store_true", help="print the configuration, to copy and change; run nothing")


def run(arguments: argparse.Namespace) -> int:
    """Train on this host, then print commands to try next."""
    path = arguments.config
    if arguments.show:
        print(path.read_text(encoding="utf-8"), end="")
        return 0
    is_named = any(word.partition("=")[0] == "--run.name" for word in arguments.overrides)
    overrides = list(arguments.overrides)
    config = load_config(path, overrides)
    first = run_folder_of(config).path
    if first.exists() and not (is_named or arguments.clean or arguments.resume):
        name = _unused(first)
        new = _from_here(first.with_name(name))
        print(
            f"{_from_here(first)} exists and is kept; this run is {new} (use --clean to replace, --resume to continue)",
            flush=True,
        )
        config = load_config(path, [*overrides, "--run.name", name])
    code = train.train(config, clean=arguments.clean, resume=arguments.resume, where=str(path))
    if code == 0:
        print("\n".join(next_steps(run_folder_of(config).path)))
    return code


def next_steps(run_folder: Path) -> list[str]:
    """Return the lines of commands to try next, as this shell can call them."""
    mrl, shown = how_called(), _from_here(run_folder)
    rows = (
        (f"{mrl} inspect {shown}", "what the policies shared with each other"),
        (f"{mrl} export {shown} --policy qwen", "a policy as a Hugging Face folder"),
        (f"{mrl} compare {CONFIG}", "the same with and without sharing, on three seeds"),
        (f"{mrl} {CONFIG} --show > my.toml", f"a configuration to change; then {mrl} check my.toml"),
        (f"{mrl} --help", "all commands"),
    )
    width = max(len(command) for command, _ in rows)
    return ["next:", *(f"  {command:<{width}}  {what}" for command, what in rows)]


def how_called() -> str:
    """Return `mrl` where the shell finds this installation, else the path to its `mrl` from the working folder."""
    beside = Path(sys.executable).parent / "mrl"
    found = shutil.which("mrl")
    if not beside.exists() or (found and os.path.samefile(found, beside)):
        return "mrl"
    return _from_here(beside)


def _unused(folder: Path) -> str:
    number = 2
    while folder.with_name(f"{folder.name}-{number}").exists():
        number += 1
    return f"{folder.name}-{number}"


def _from_here(path: Path) -> str:
    """Return the path, relative to the working folder where it lies in there."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
