"""TRL's environment, made once in the user's cache, with the torch and transformers that mrl runs on.

Its packages are pinned in PINS, its folder is named by a hash of all versions. TRL is never installed beside mrl: it
would bring pandas, pyarrow and accelerate into the environment of every user.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from mrl.engines.environment import RECIPES

PINS = ("trl==1.13.0", "accelerate==1.15.0", "datasets==5.2.0", "requests==2.34.2")
SHARED = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
"""Packages of the version that this process has: both sides run the same kernels."""
TORCH_INDEX = RECIPES / "torch_index.sh"
INSTALL_S = 1800.0


def requirements() -> list[str]:
    """Packages to install. torch comes without its local tag, which pip takes from whatever index has it."""
    return [*PINS, *(f"{name}=={version(name).partition('+')[0]}" for name in SHARED)]


def environment_folder(wanted: Sequence[str]) -> Path:
    """Folder of the environment with these packages, which may not exist yet."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    digest = hashlib.sha256("\n".join([*sorted(wanted), sys.version]).encode()).hexdigest()
    return (Path(cache) if cache else Path.home() / ".cache") / "mrl" / "bench" / f"trl-{digest[:12]}"


def trl_python(wanted: Sequence[str]) -> Path:
    """Return the interpreter of the environment, which is made now if it is missing. It is whole, or not there.

    Raises RuntimeError with pip's last words when it cannot be made.
    """
    folder = environment_folder(wanted)
    python = folder / "bin" / "python"
    if python.exists():
        return python
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.making.", dir=folder.parent) as scratch:
        making = Path(scratch) / "environment"
        print(f"making {folder} (1.5 GB, some minutes)", flush=True)
        _run([sys.executable, "-m", "venv", str(making)])
        index = _run(["bash", str(TORCH_INDEX), str(making / "bin" / "python")]).split()
        install = [str(making / "bin" / "python"), "-m", "pip", "install", "--no-input", "-q"]
        if index:  # an index of torch alone: no other package may come from there
            _run([*install, "--no-deps", *index, *(name for name in wanted if name.startswith("torch=="))])
        _run([*install, *wanted])
        making.rename(folder)
    return python


def _run(argv: Sequence[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv[:4])} ... failed: {done.stderr.strip()[-2000:]}")
    return done.stdout
