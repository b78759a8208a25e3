"""Mutation testing of one module of mrl, for those who write tests: the small changes of it that no test notices.

    .venv/bin/python tools/mutate.py MODULE [TESTS ...] [--jobs N]
    .venv/bin/python tools/mutate.py mrl/alignment/shared_spans.py tests/alignment

The changes are made by mutmut. TESTS default to the folder of `tests/` that mirrors the module's room; the fewer they
are, the sooner it ends. They run on a copy of the files that git tracks: nothing here is changed. Prints each unnoticed
change as a diff, then their number. A change that makes no difference (another text of an error, a bound that cannot be
met) is no fault of the tests: exit code 0 says that the run was made, not that no change survived. Needs the extra
`mutation`.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FAST = "not system and not thorough and not engines and not slow and not gpu"
ROOT = Path(__file__).resolve().parents[1]
SETTINGS = """
[tool.mutmut]
source_paths = ["mrl"]
only_mutate = ["{module}"]
also_copy = ["tools", "configs", "docs", "README.md"]
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = ["-p", "no:cacheprovider", "-m", "{fast}"]
"""


def main() -> int:
    """Run the command. Return 2 for a user's mistake, 1 where the tests fail without any change, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", type=Path)
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    module = arguments.module.resolve()
    if importlib.util.find_spec("mutmut") is None:
        return _mistake("mutmut is not there: pip install -e '.[mutation]'")
    if not module.is_file() or not module.is_relative_to(ROOT / "mrl"):
        return _mistake(f"{arguments.module}: wanted a module of mrl/, as mrl/alignment/shared_spans.py")
    relative = module.relative_to(ROOT)
    tests = arguments.tests or [f"tests/{relative.parts[1]}"]
    if missing := [path for path in tests if not (ROOT / path.split("::")[0]).exists()]:
        return _mistake(f"{missing[0]}: there are no such tests")
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        return _mutate(Path(folder), relative.as_posix(), tests, arguments.jobs)


def _mutate(copy: Path, module: str, tests: list[str], jobs: int) -> int:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, tracked.decode().split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    with (copy / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write(SETTINGS.format(module=module, tests=tests, fast=FAST))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    mutmut = [sys.executable, "-m", "mutmut"]
    quiet = None if sys.stdout.isatty() else subprocess.PIPE  # its progress is an animation
    made = subprocess.run(
        [*mutmut, "run", "--max-children", str(jobs)], cwd=copy, env=environment, stdout=quiet, stderr=subprocess.STDOUT
    )
    told = subprocess.run([*mutmut, "results", "--all", "true"], cwd=copy, capture_output=True, text=True).stdout
    outcomes = [line.strip().rsplit(": ", 1) for line in told.splitlines() if ": " in line]
    if made.returncode or not outcomes:
        print((made.stdout or b"")[-3000:].decode(errors="replace"), file=sys.stderr)
        print(f"mutate: {module}: the tests do not pass without a change, or mutmut failed", file=sys.stderr)
        return 1
    unnoticed = [name for name, outcome in outcomes if outcome in ("survived", "no tests")]
    for name in unnoticed:
        print(subprocess.run([*mutmut, "show", name], cwd=copy, capture_output=True, text=True).stdout)
    print(f"{module}: {len(outcomes)} changes, {len(unnoticed)} unnoticed")
    return 0


def _mistake(line: str) -> int:
    print(f"mutate: error: {line}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
