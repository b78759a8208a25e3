"""`mrl version`: print the versions of mrl and of its main libraries."""

import argparse
import importlib.metadata
import platform

import mrl

LIBRARIES = ("torch", "transformers", "pyzmq", "msgspec", "pydantic", "reasoning-gym")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Print versions from package metadata, so that no heavy library is imported."""
    print(f"mrl {mrl.__version__} (python {platform.python_version()}, {platform.system()} {platform.machine()})")
    for name in LIBRARIES:
        try:
            print(f"  {name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"  {name} is not installed")
    return 0
