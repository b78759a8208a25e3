"""How a learner publishes what its configuration says."""

from contextlib import ExitStack

import pytest
import torch

from mrl.config.run_folder import RunFolder
from mrl.config.schema import RunConfig
from mrl.learner.ranks.world import World
from mrl.models.memory_file import shared_tensors
from mrl.models.parameters import plain_sources
from mrl.models.tensor_file import digest, read_folder
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


@pytest.mark.parametrize(("shard_size", "num_files"), [(4, 4), (2, 2), (1, 2)])
def test_ranks_of_all_hosts_that_share_a_copy_write_their_part(tmp_path, shard_size, num_files):
    """Two ranks on each of two hosts; where each host has a copy of its own, those of the first one write alone."""
    learner = {"processes": 4, "hosts": 2, "sharding": "shard", "shard_size": shard_size}
    policies = {"a": {"model": str(tmp_path / "model"), "learner": learner}}
    tables = {"policies": policies, "run": {"name": "r", "steps": 1}, "exchange": {"host": "0.0.0.0"}}
    config = RunConfig.model_validate(tables | {"tasks": {"trim": {"source": "words", "dataset": "trim"}}})
    (tmp_path / "model").mkdir()
    folder, weights = RunFolder(tmp_path / "r"), {f"w{number}": torch.randn(9) for number in range(8)}
    with ExitStack() as closing:
        ranks = [publisher_of(config, folder, closing, "a", World(rank, 4, torch.device("cpu"))) for rank in range(4)]
        for rank, publisher in enumerate(ranks):
            canary = Canary([], [], []) if rank == 0 else None
            publisher.begin(plain_sources(weights.items()), Version(0, 1), canary)
        for publisher in ranks:
            publisher.finish()
    version = folder.weights("a") / "0.1"
    assert len(list(version.glob("*.safetensors"))) == num_files
    assert read_folder(version) == {name: digest(tensor) for name, tensor in weights.items()}
