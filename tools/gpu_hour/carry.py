"""Wheels for a machine that has torch and no network: fetched here into one folder, installed there from it.

Fetched are the packages that a run needs beside torch and its dependencies, in the versions of constraints.txt, and
pytest with the packages that the tests in `tests/gpu` need. The vocabularies of two families go along, packed.
"""

import hashlib
import importlib.metadata
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".gpu_hour"
PYTHON = "3.12"
MAX_BYTES = 60_000_000
GLIBC = (17, 24, 26, 27, 28, 31, 34)
"""Minor versions of glibc 2 whose wheels the other machine can take, each named, as pip matches platforms exactly."""
ROOTS = ("mrl[lora]", "pytest", "pytest-timeout", "hypothesis", "sentencepiece")
"""Packages to carry. Not reasoning-gym, which needs a package without wheels: the quickstart leaves out its tasks."""
THERE = ("torch", "triton", "numpy", "setuptools", "pip")
"""Packages that the other machine has, with all that torch needs."""
VOCABULARIES, PACKED = "vocabularies", ".json.xz"
"""Subfolder and file ending of the packed tokenizer files for the stage `run`."""
LEFT_OUT = ("hf-xet",)
"""Packages of no use without network."""
INSTALLED = "MRL_GPU_HOUR_SITE"


def carry(folder: Path = FOLDER, python: str = PYTHON) -> int:
    """Fetch the wheels and pack the vocabularies. Return 1 when pip failed or they take more than 60 MB, else 0."""
    wheels = folder / "wheels"
    for earlier in (wheels, folder / VOCABULARIES, *folder.glob("site-*")):
        shutil.rmtree(earlier, ignore_errors=True)
    _pack_vocabularies(folder / VOCABULARIES)
    wheels.mkdir(parents=True)
    pins = [
        f"{name}=={importlib.metadata.version(name)}"
        for name in sorted(needed(ROOTS, beside={*needed(THERE), *LEFT_OUT}))
    ]
    platforms = [word for minor in GLIBC for word in ("--platform", f"manylinux_2_{minor}_x86_64")]
    platforms += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"]
    target = ("--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms)
    words = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), *target, *pins)
    done = _said(words)
    if done.returncode:
        print(f"gpu_hour: pip failed: {done.stderr.strip()[-500:]}", file=sys.stderr)
    size = sum(file.stat().st_size for file in (*wheels.iterdir(), *(folder / VOCABULARIES).iterdir()))
    print(f"gpu_hour: {len(pins)} wheels and the vocabularies, {size / 1e6:.1f} MB, for Python {python} in {folder}")
    if size > MAX_BYTES:
        print(f"gpu_hour: more than {MAX_BYTES / 1e6:.0f} MB", file=sys.stderr)
    return int(size > MAX_BYTES or done.returncode != 0)


def _pack_vocabularies(folder: Path) -> None:
    import real_vocabularies  # needs packages that only the tests bring

    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("qwen", "tekken"):
            made = real_vocabularies.make_folder(name, Path(scratch)) / "tokenizer.json"
            (folder / f"{name}{PACKED}").write_bytes(lzma.compress(made.read_bytes()))


def needed(roots: Iterable[str], beside: Iterable[str] = ()) -> set[str]:
    """Distributions of this environment that `roots` need, themselves included, without `mrl` and those of `beside`."""
    from packaging.requirements import Requirement

    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    left = [Requirement(root) for root in roots]
    while left:
        one = left.pop()
        name = re.sub(r"[-_.]+", "-", one.name).lower()
        for extra in {"", *one.extras}:
            if (name, extra) in seen or name in beside:
                continue
            seen.add((name, extra))
            try:
                requires = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:  # a dependency for another system or Python
                continue
            found.add(name)
            wanted = map(Requirement, requires)
            left += [need for need in wanted if need.marker is None or need.marker.evaluate({"extra": extra})]
    return found - {"mrl"}


def install(argv: list[str]) -> None:
    """Install carried wheels, if there are any, beside them, and run this command again with them on its path."""
    wheels = sorted(map(str, (FOLDER / "wheels").glob("*.whl")))
    if not wheels or os.environ.get(INSTALLED) or _has_environment():
        return
    names = hashlib.sha256(" ".join(wheels).encode()).hexdigest()[:8]
    site = FOLDER / f"site-{sys.version_info.major}.{sys.version_info.minor}-{names}"
    if not site.exists():
        with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
            making = Path(scratch) / "site"
            options = ("--no-index", "--no-deps", "--no-compile", "--target", str(making))
            done = _said((sys.executable, "-m", "pip", "install", "-q", *options, *wheels))
            if done.returncode:
                sys.exit(f"gpu_hour: the carried wheels cannot be installed: {done.stderr.strip()[-500:]}")
            with suppress(OSError):  # another stage was faster
                making.rename(site)
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(site)])
    os.execve(
        sys.executable, [sys.executable, "-m", "gpu_hour", *argv], os.environ | {"PYTHONPATH": path, INSTALLED: "1"}
    )


def _has_environment() -> bool:
    """Whether this is the environment that `tools/setup.sh` makes, which lacks nothing."""
    return Path(sys.prefix) == ROOT / ".venv"


def _said(words: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, capture_output=True, text=True, check=False)
