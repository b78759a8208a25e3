"""`mrl engine-env ENGINE [--cpu] [--path | --check]`: make the Python environment of an inference engine.

The environment is apart from mrl's own. It lies in $MRL_ENGINE_HOME (default ~/.cache/mrl/engines), named by a hash of
its recipe: it is made once, and every run finds it again.
"""

import argparse
import os
import shutil
import sys

from mrl.engines.environment import ENGINES, RECIPES, environment_folder, is_made
from mrl.errors import ConfigError, EngineError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: engine, kind of device, and whether to print or check without making."""
    parser.add_argument("engine", choices=ENGINES, metavar="ENGINE", help=" or ".join(ENGINES))
    parser.add_argument(
        "--cpu", action="store_true", help="make the environment for CPUs, for tests; default: for NVIDIA GPUs"
    )
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--path", action="store_true", help="print the path of the environment's python, even if it does not exist yet"
    )
    check = (
        "only check on the package index that the packages for GPUs exist and are compatible; downloads metadata only"
    )
    asked.add_argument("--check", action="store_true", help=check)


def run(arguments: argparse.Namespace) -> int:
    """Make the environment if it is missing, and print its python as the last line."""
    kind = "cpu" if arguments.cpu else "gpu"
    if arguments.check and arguments.cpu:
        wanted = "the packages for GPUs; the list for CPUs omits some dependencies on purpose"
        raise ConfigError(
            "--check cannot be combined with --cpu", where="mrl engine-env", wanted=wanted, cure="remove --cpu"
        )
    folder = environment_folder(arguments.engine, kind)
    if not arguments.check and (arguments.path or is_made(arguments.engine, kind)):
        print(folder / "bin" / "python")
        return 0
    bash = shutil.which("bash")
    if bash is None:
        raise EngineError(
            "bash, which makes the environment, is not installed", where="mrl engine-env", cure="install bash"
        )
    action = "check" if arguments.check else "make"
    words = [bash, str(RECIPES / "engine_env.sh"), action, arguments.engine, kind, str(folder), sys.executable]
    sys.stdout.flush()
    os.execv(bash, words)  # a signal that ends this command reaches the script, which then cleans up
