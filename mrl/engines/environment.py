"""Python environments of engines: one per engine, since each pins a torch of its own; made by `mrl engine-env`.

An environment lies at `<home>/<engine>-<cpu|gpu>-<hash>`. The hash covers the constraints and the recipe, so an
environment that was made from another version of them lies at another path.
"""

import hashlib
import os
from pathlib import Path

from mrl.errors import EngineError

ENGINES = ("vllm", "sglang")
RECIPES = Path(__file__).parent / "recipes"
HASH_DIGITS = 12


def engines_home() -> Path:
    """Folder of all engine environments: `$MRL_ENGINE_HOME`, or `mrl/engines` in the user's cache."""
    home = os.environ.get("MRL_ENGINE_HOME", "")
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return Path(home) if home else (Path(cache) if cache else Path.home() / ".cache") / "mrl" / "engines"


def environment_folder(engine: str, device: str, *, recipes: Path = RECIPES) -> Path:
    """Path of the environment of `engine` for "cpu" or "gpu", made or not. Raises EngineError for an unknown engine."""
    constraints, recipe = recipes / f"{engine}-{device}.txt", recipes / f"{engine}.sh"
    if engine not in ENGINES or not constraints.is_file() or not recipe.is_file():
        known = ", ".join(sorted(path.stem for path in recipes.glob("*-[cg]pu.txt")))
        raise EngineError(
            "no installation recipe for this engine and device",
            where=str(recipes),
            got=f"{engine}-{device}",
            wanted=known,
        )
    digest = hashlib.sha256()
    for file in (constraints, recipe, *sorted((recipes / f"{engine}_{device}").glob("*.py"))):
        digest.update(_without_comments(file.read_text()) if file == constraints else file.read_bytes())
    return engines_home() / f"{engine}-{device}-{digest.hexdigest()[:HASH_DIGITS]}"


def is_made(engine: str, kind: str) -> bool:
    """Whether the environment of an engine for "cpu" or "gpu" has been made."""
    return os.access(environment_folder(engine, kind) / "bin" / "python", os.X_OK)


def making_command(engine: str, kind: str) -> str:
    """Command with which a person makes the environment of an engine for "cpu" or "gpu"."""
    return f"mrl engine-env {engine}" + (" --cpu" if kind == "cpu" else "")


def _without_comments(constraints: str) -> bytes:
    """Constraints without their comments, which do not change the environment."""
    return "\n".join(line for line in constraints.splitlines() if not line.startswith("#")).encode()


def engine_python(engine: str, *, device: str, configured: str = "") -> Path:
    """Interpreter of an engine for `device` "cpu" or "cuda": the `configured` one, or that of the made environment.

    Raises EngineError, naming the command that makes the environment, when the interpreter is not there.
    """
    if configured:
        python = Path(configured).expanduser()
        if python.is_dir():
            what, wanted = f"server.python of {engine} is a folder", "the path of a Python interpreter"
            raise EngineError(
                what, got=str(python), wanted=wanted, cure=f'set server.python = "{python / "bin" / "python"}"'
            )
        cure = "correct server.python, or remove it to use the environment that `mrl engine-env` makes"
    else:
        kind = "cpu" if device == "cpu" else "gpu"
        python = environment_folder(engine, kind) / "bin" / "python"
        cure = making_command(engine, kind)
    if not os.access(python, os.X_OK):
        raise EngineError(f"the environment of {engine} is missing", where=str(python), cure=cure)
    return python


def cuda_toolkit(python: Path) -> Path | None:
    """Folder of CUDA's compiler, headers and libraries, where a recipe has made a toolkit of the environment's wheels.

    None where there is no such toolkit.
    """
    return next((folder.parent for folder in python.parent.parent.glob("lib/*/*/nvidia/cu13/lib64")), None)
