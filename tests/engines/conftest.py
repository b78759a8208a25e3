"""What the tests of all engines share: two sets of weights of one small model, and what they say to a text."""

from collections.abc import Callable

import pytest

from tests.support.engine_rig import Weights, export_trained, make_weights


@pytest.fixture(scope="session")
def weights(tmp_path_factory) -> Callable[[str], Weights]:
    """Weights "a" or "b" of one Qwen3 with tied heads, in folders as a learner publishes them."""
    root = tmp_path_factory.mktemp("weights")
    made: dict[str, Weights] = {}

    def of(name: str) -> Weights:
        if name not in made:
            made[name] = make_weights(root / name, seed=ord(name))
        return made[name]

    return of


@pytest.fixture(scope="session")
def exported(weights, tmp_path_factory) -> Weights:
    """A policy that `mrl export` took out of a run."""
    return export_trained(tmp_path_factory.mktemp("run"), weights("c"))
