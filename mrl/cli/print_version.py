"""`mrl version`."""

import argparse
import importlib.metadata
import platform

import mrl

LIBRARIES = ("torch", "transformers", "pyzmq", "msgspec", "pydantic", "reasoning-gym")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Print versions, read from package metadata so that nothing heavy is imported."""
    print(f"mrl {mrl.__version__} (python {platform.python_version()}, {platform.system()} {platform.machine()})")
    for name in LIBRARIES:
        try:
            print(f"  {name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"  {name} is not installed")
    return 0
