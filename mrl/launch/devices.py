"""Which GPUs each process sees, as values of CUDA_VISIBLE_DEVICES; every process then calls its device "cuda"."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from mrl.config.schema import RunConfig
from mrl.errors import ConfigError


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that this host offers: CUDA_VISIBLE_DEVICES if set, else one per /dev/nvidiaN."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [name for name in environment["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    numbers = [path.name[6:] for path in devices.glob("nvidia*") if path.name[6:].isdigit()]
    return sorted(numbers, key=int)


def planned_workers(config: RunConfig, policy: str) -> int:
    """Workers of a policy that the plan starts; where units are leased, a lease starts those of whoever learns."""
    table = config.policies[policy]
    return 0 if config.allocation.units and not table.frozen else table.rollout.workers


def place(
    config: RunConfig, gpus: Sequence[str], *, names: Collection[str] | None = None, num_leased: int = 0
) -> dict[tuple[str, str, int], tuple[str, ...]]:
    """(role, policy, index) -> its GPUs on one host, for the policies in `names` (default all) that are on "cuda".

    Learners come first, one GPU per rank; workers take what is left and, once all are taken, begin again with the
    first. `num_leased` GPUs of the host are units, and not among `gpus`. Raises ConfigError when a learner needs more
    than are left.
    """
    placed: dict[tuple[str, str, int], tuple[str, ...]] = {}
    taken = 0
    here = config.policies if names is None else names
    on_gpu = {name: policy for name, policy in config.policies.items() if policy.device == "cuda" and name in here}
    if on_gpu and not gpus:
        raise _no_gpu(next(iter(on_gpu)), num_leased)
    for name, policy in on_gpu.items():
        ranks = 0 if policy.frozen else policy.learner.processes
        if ranks > len(gpus):
            raise ConfigError(f"policies.{name}.learner.processes: too few GPUs", got=ranks, wanted=f"<= {len(gpus)}")
        if ranks:
            placed["learner", name, 0] = tuple(gpus[(taken + rank) % len(gpus)] for rank in range(ranks))
        taken += ranks
    for name in on_gpu:
        for index in range(planned_workers(config, name)):
            placed["worker", name, index] = (gpus[taken % len(gpus)],)
            taken += 1
    return placed


def _no_gpu(policy: str, num_leased: int) -> ConfigError:
    if num_leased:
        return ConfigError(
            "allocation.units: the units leave no GPU to learners and frozen policies",
            got=f"units of all {num_leased} GPUs that this host shows",
            wanted=f'at least one that is no unit\'s, for policies.{policy}.device = "cuda"',
            cure="leave one out of allocation.units, or make more GPUs visible",
        )
    return ConfigError(
        f"policies.{policy}.device: this host shows no GPU",
        got="cuda",
        cure='set device = "cpu", or make the GPUs visible',
    )
