"""The properties, over generated answers."""

import importlib.util
from pathlib import Path
from random import Random

import pytest

SPEC = importlib.util.spec_from_file_location("alignment_properties", Path(__file__).with_name("properties.py"))
PROPERTIES = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(PROPERTIES)


@pytest.fixture(scope="module")
def receivers(folders):
    return PROPERTIES.load(folders)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PROPERTIES.CHECKS)
def test_property(receivers, name, seed):
    """Every property holds for every seed."""
    PROPERTIES.CHECKS[name](receivers, Random(seed))
