"""Bugs planted one at a time in copies of modules: the property named beside each must notice, by an assertion.

The copy is imported in place of its module while a property runs, and the package itself is never touched. A planted
bug that ends in any other exception shows nothing of the property, so it fails here and must be written otherwise.
"""

import importlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
from alignment_properties import CHECKS, bugs_in_figures, bugs_in_tokenizers, bugs_in_translation

import mrl.alignment

pytestmark = pytest.mark.thorough

PACKAGE = Path(mrl.alignment.__file__).parent
PROPERTIES = "alignment_properties"
BUGS = [*bugs_in_translation.BUGS, *bugs_in_tokenizers.BUGS, *bugs_in_figures.BUGS]
SEEDS = range(2)


def names_of_modules() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == PROPERTIES or name.startswith("mrl.alignment")]


@contextmanager
def package_from(folder: Path) -> Iterator[None]:
    """`mrl.alignment` with modules of `folder` before its own, and the properties beside it, while the block lasts."""
    saved = {name: sys.modules.pop(name) for name in names_of_modules()}
    replaced = ModuleType("mrl.alignment")
    replaced.__path__ = [str(folder), str(PACKAGE)]
    sys.modules["mrl.alignment"] = replaced
    try:
        yield
    finally:
        for name in names_of_modules():
            del sys.modules[name]
        sys.modules.update(saved)


def is_noticed(names: list[str], sources: Mapping[str, Path], folder: Path, seeds: range = SEEDS) -> list[str]:
    """Which of these properties fail by an assertion with the modules in `folder`; anything else is raised."""
    noticed = []
    with package_from(folder):
        checks = importlib.import_module(PROPERTIES).CHECKS
        receivers = importlib.import_module(f"{PROPERTIES}.kinds").load(sources)
        for name in names:
            try:
                for seed in seeds:
                    checks[name](receivers, Random(seed))
            except AssertionError:
                noticed.append(name)
    return noticed


@pytest.mark.parametrize(("module", "old", "new", "name"), BUGS)
def test_mutant_is_noticed(tmp_path, sources, module, old, new, name):
    """A planted bug makes its property fail."""
    source = (PACKAGE / f"{module}.py").read_text(encoding="utf-8")
    assert source.count(old) == 1, "the text to change stands exactly once in the module"
    (tmp_path / f"{module}.py").write_text(source.replace(old, new), encoding="utf-8")
    assert is_noticed([name], sources, tmp_path) == [name]


@pytest.mark.timeout(180)  # every property at once
def test_copies_without_a_bug_pass(tmp_path, sources):
    """What the mutants show is the bug, not the copying."""
    shutil.copytree(PACKAGE, tmp_path, dirs_exist_ok=True)
    assert is_noticed(list(CHECKS), sources, tmp_path, range(1)) == []


def test_every_property_has_a_mutant():
    """No property stands that was never seen to fail."""
    assert {name for *_, name in BUGS} == set(CHECKS)


def test_a_bug_that_only_raises_is_not_noticed(tmp_path, sources):
    """An exception of another kind than an assertion does not count: it comes out."""
    (tmp_path / "spans.py").write_text("raise RuntimeError('planted')\n", encoding="utf-8")
    with pytest.raises(RuntimeError, match="planted"):
        is_noticed(["swapped_sides_give_swapped_spans"], sources, tmp_path)
