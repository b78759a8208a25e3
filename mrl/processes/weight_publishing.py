"""Build what publishes a learner rank's new weights: in files, or by broadcast, as the policy's table says."""

from contextlib import ExitStack
from pathlib import Path

from mrl.config.run_folder import RunFolder, local_folder
from mrl.config.schema import RunConfig
from mrl.learner.ranks.world import World
from mrl.processes.planning.hosts import is_in_memory
from mrl.weights.adapters import AdapterFormat
from mrl.weights.broadcast import BroadcastPublisher
from mrl.weights.publish import Publisher


def publisher_of(
    config: RunConfig, folder: RunFolder, closing: ExitStack, policy: str, world: World
) -> Publisher | BroadcastPublisher:
    """Return this rank's publisher of weights, in the number format that the engines compute in.

    Of a learner over several hosts, the ranks of the first host publish: between them they hold all weights. Where one
    copy is sharded over several hosts, all ranks that share it publish, each from its host into the run folder.
    """
    table = config.policies[policy]
    broadcasts, adapters = table.rollout.weights == "broadcast" and world.is_first, None
    if table.rollout.weights == "adapters":
        assert table.learner.lora is not None, "a rule of the configuration"
        adapters = AdapterFormat(table.learner.lora, Path(table.model))
    dtype = table.rollout.engine_dtype
    files = Publisher(
        folder.weights(policy),
        policy,
        model_folder=Path(table.model),
        adapters=adapters,
        dtype=dtype,
        in_memory=is_in_memory(config, policy) and not broadcasts,
        on_gpu=world.device.type == "cuda",
        shares_on=world.device if table.rollout.weights_in == "gpu" else None,
        rank=world.rank,
        num_ranks=1 if table.rollout.weights == "broadcast" else table.learner.publishing_ranks,
    )
    closing.callback(files.close)
    if not broadcasts:
        return files
    # SGLang can meet at a TCP port only; other engines on this host meet in a folder that only this user may enter.
    meets_in = local_folder() if not config.exchange.host and table.rollout.engine != "sglang" else None
    host = config.exchange.host or "127.0.0.1"
    publisher = BroadcastPublisher(files, host=host, meets_in=meets_in, device=table.device, dtype=dtype)
    closing.callback(publisher.close)
    return publisher
