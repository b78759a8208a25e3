"""How a learner publishes what its configuration says."""

from contextlib import ExitStack

import pytest
import torch

from mrl.config.run_folder import RunFolder
from mrl.config.schema import RunConfig
from mrl.learner.ranks.world import World
from mrl.models.memory_file import shared_tensors
from mrl.processes.weight_publishing import publisher_of
from mrl.records.version import Version
from mrl.weights.manifest import Canary
from mrl.weights.publish import Publisher


@pytest.mark.parametrize(("weights_in", "is_shared"), [("gpu", True), ("memory", False), ("auto", False)])
def test_weights_lie_on_the_learners_device_where_the_policy_says_so(tmp_path, weights_in, is_shared):
    """The rank's own, for which a CPU stands here."""
    policy = {"model": str(tmp_path / "model"), "device": "cuda", "rollout": {"weights_in": weights_in}}
    tables = {"policies": {"a": policy}, "run": {"name": "r", "steps": 1}}
    config = RunConfig.model_validate(tables | {"tasks": {"trim": {"source": "words", "dataset": "trim"}}})
    (tmp_path / "model").mkdir()
    with ExitStack() as closing:
        publisher = publisher_of(config, RunFolder(tmp_path / "r"), closing, "a", World(0, 1, torch.device("cpu")))
        assert isinstance(publisher, Publisher)
        path = publisher.publish_weights({"w": torch.randn(9)}.items(), Version(0, 1), Canary([], [], []))
        assert bool(shared_tensors(path.parent)) == is_shared
