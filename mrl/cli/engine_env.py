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
        "--cpu", action="store_true", help="make it for tests without a GPU; else it is for NVIDIA GPUs"
    )
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--path", action="store_true", help="only print where the environment's python is, or would be")
    check = "only ask the package index whether the packages for GPUs can be had and fit together; gets metadata alone"
    asked.add_argument("--check", action="store_true", help=check)


def run(arguments: argparse.Namespace) -> int:
    """Make the environment if it is missing, and print its python as the last line."""
    kind = "cpu" if arguments.cpu else "gpu"
    if arguments.check and arguments.cpu:
        wanted = "the list for GPUs; the one for CPUs leaves out what its packages name"
        raise ConfigError("--check beside --cpu", where="mrl engine-env", wanted=wanted, cure="leave --cpu out")
    folder = environment_folder(arguments.engine, kind)
    if not arguments.check and (arguments.path or is_made(arguments.engine, kind)):
        print(folder / "bin" / "python")
        return 0
    bash = shutil.which("bash")
    if bash is None:
        raise EngineError("no bash, which makes the environment", where="mrl engine-env", cure="install bash")
    action = "check" if arguments.check else "make"
    words = [bash, str(RECIPES / "engine_env.sh"), action, arguments.engine, kind, str(folder), sys.executable]
    sys.stdout.flush()
    os.execv(bash, words)  # a signal that ends this command reaches the script, which then cleans up
