"""`mrl fetch CONFIG [--key.path VALUE ...]`: fetch all models and data sets of a configuration from the hub.

This serves hosts without a network, whose cache (HF_HOME) this host sees. CONFIG may be a run's folder too: then
exactly its commits are fetched. Files that are there are not fetched again; a fetch that was broken off goes on with
the next file.
"""

import argparse
from functools import partial
from pathlib import Path

from mrl.config.load import load_config
from mrl.config.run_folder import read_run_config
from mrl.config.schema import RunConfig
from mrl.config.shipped_configs import config_file
from mrl.errors import ConfigError
from mrl.processes.preparation.hub_data import shown_data
from mrl.processes.preparation.hub_models import fetched, located, named, pinned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument: configuration."""
    parser.add_argument("config", type=config_file, metavar="CONFIG", help="TOML file, `quickstart`, or a run's folder")


def run(arguments: argparse.Namespace) -> int:
    """Fetch models and data sets, and print the commit and the folder of every policy's model."""
    where, tell = str(arguments.config), partial(print, flush=True)
    config = pinned(_read(arguments), where=where, on_note=tell)
    config = fetched(config, config.policies, where=where, tell=tell)
    for name, policy in config.policies.items():
        if policy.make is not None:
            print(f"{name}: made on this machine (`mrl policies make {where}` makes it beforehand)")
        else:
            print(f"{name}: {named(policy) or 'a local folder'}: {Path(policy.model).absolute()}")
    for line in filter(None, (shown_data(task, table) for task, table in config.tasks.items())):
        print(line)
    return 0


def _read(arguments: argparse.Namespace) -> RunConfig:
    if not arguments.config.is_dir():
        return load_config(arguments.config, arguments.overrides)
    if arguments.overrides:
        raise ConfigError(
            "keys cannot be set for the folder of a run", where="mrl fetch", got=" ".join(arguments.overrides)
        )
    return located(read_run_config(arguments.config))
