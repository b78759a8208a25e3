"""`mrl exchange keys RUN list | make ROLE [POLICY] | revoke NAME`: manage keys that may connect to a run's servers."""

import argparse
import sys
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Column, Table

from mrl.config.run_folder import RunFolder, read_run_config
from mrl.errors import ConfigError
from mrl.transport.allow_list import KeyEntry, fingerprint, read_entries
from mrl.transport.grants import POLICY_ROLES, ROLES, Grant
from mrl.transport.keys import client_file, load_keys, make_client_key, revoke_client_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: run and action."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, runs/<name>")
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|make|revoke")
    actions.add_parser("list", help="show all keys, including revoked ones")
    make = actions.add_parser("make", help="make a key where none exists, or the earlier one was revoked")
    make.add_argument("role", choices=ROLES, metavar="ROLE", help=f"role that the key is for: {', '.join(ROLES)}")
    make.add_argument(
        "policy",
        nargs="?",
        default="",
        metavar="POLICY",
        help=f"policy of the role, only for {' and '.join(POLICY_ROLES)}",
    )
    revoke = actions.add_parser("revoke", help="revoke a key; its connections are closed within a second")
    revoke.add_argument("name", metavar="NAME", help="name of the key as `list` shows it, for example worker/qwen")


def run(arguments: argparse.Namespace) -> int:
    """List keys, or make or revoke a key and print its name.

    Raises RunFolderError when there is no run or the run has no keys, ConfigError for a policy that the run does not
    have, a name that is taken, or an unknown name.
    """
    policies = read_run_config(arguments.run).policies
    folder = RunFolder(arguments.run).keys
    load_keys(folder)
    match arguments.action:
        case "make":
            _make(folder, arguments.role, arguments.policy, list(policies))
        case "revoke":
            revoked = revoke_client_key(folder, arguments.name)
            print(f"revoked {revoked.grant.name} ({fingerprint(revoked.public)})")
        case _:
            console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
            console.print(_table(read_entries(folder)))
    return 0


def _make(folder: Path, role: str, policy: str, policies: list[str]) -> None:
    grant = Grant(role, policy)
    if policy and policy not in policies:
        raise ConfigError("no such policy", where=str(folder.parent), got=policy, wanted=", ".join(policies))
    made = make_client_key(folder, grant)
    print(f"made {grant.name} ({fingerprint(made.public)}) in {client_file(folder, grant)}")


def _table(entries: list[KeyEntry]) -> Table:
    table = Table(Column("name", no_wrap=True), "role", "policy", "fingerprint", "made", "revoked", box=box.SIMPLE_HEAD)
    for entry in entries:
        grant = entry.grant
        times = (_time(entry.made_unix_s), _time(entry.revoked_unix_s))
        table.add_row(grant.name, grant.role, grant.policy or "-", fingerprint(entry.public), *times)
    return table


def _time(unix_s: float | None) -> str:
    return "-" if unix_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
