"""`mrl policies make CONFIG [--policy NAME] [--force]`: make small local policies, once, in a cache."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from mrl.config.load import load_config
from mrl.config.shipped_configs import config_file
from mrl.errors import ConfigError
from mrl.parent_death import die_with_supervisor
from mrl.processes.preparation.made_policies import build_policy, make_policies


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: action, configuration, policies. Child processes of `make` run the action `build`."""
    parser.add_argument(
        "action", choices=("make", "build"), metavar="make", help="make the policies that are not in the cache yet"
    )
    parser.add_argument("config", type=config_file, metavar="CONFIG", help="TOML file, or `quickstart`")
    parser.add_argument("--policy", default="", metavar="NAME", help="make only this policy")
    parser.add_argument("--force", action="store_true", help="make policies again, even if the cache holds them")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Make policies and print their folders."""
    if arguments.action == "build":
        die_with_supervisor()
        build_policy(json.loads(arguments.config.read_text(encoding="utf-8")), arguments.policy, arguments.into)
        return 0
    config = load_config(arguments.config, arguments.overrides)
    names = [name for name, policy in config.policies.items() if policy.make is not None]
    if arguments.policy and arguments.policy not in names:
        wanted = ", ".join(names) or "a policy with a `make` table"
        raise ConfigError(
            "no policy of this name with a `make` table",
            where=str(arguments.config),
            got=arguments.policy,
            wanted=wanted,
        )
    chosen = [arguments.policy] if arguments.policy else names
    console = Console(stderr=True, force_terminal=sys.stderr.isatty())
    folders = make_policies(config, chosen, force=arguments.force, console=console)
    for name in chosen:
        print(f"{name} {folders[name]}")
    return 0
