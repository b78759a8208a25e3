"""`mrl init MODEL... --data FILE`: write a commented configuration for models and data of the user."""

import argparse
import os
from pathlib import Path

from mrl.config.load import resolve
from mrl.errors import ConfigError

GPUS_PER_POLICY = 2
"""GPUs that a policy needs to be put on GPUs: one for its learner, one for its engine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: models, data, and other choices that mrl cannot make."""
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder of a model, or its id on the hub")
    parser.add_argument(
        "--data", required=True, metavar="FILE", help="file of JSON lines with `prompt` and `reference`"
    )
    parser.add_argument(
        "--prompt-key", default="", metavar="COLUMN", help="key of the prompt in FILE (default: prompt)"
    )
    parser.add_argument(
        "--reference-key",
        default="",
        metavar="COLUMN",
        help="key of the reference in FILE (default: reference)",
    )
    parser.add_argument("--verifier", default="", metavar="MODULE:FUNCTION", help="your own verifier of answers")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="learner steps (default: 100)")
    parser.add_argument(
        "--to", type=Path, default=Path("mine.toml"), metavar="FILE", help="configuration to write (default: mine.toml)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the file and print the next command. A configuration that would be refused is not written."""
    from mrl.files import replace_file
    from mrl.host_memory import host_memory_bytes
    from mrl.memory_plan.fitting import fitted_to_memory
    from mrl.memory_plan.needs import MIB
    from mrl.memory_plan.run_memory import memory_plan, too_little
    from mrl.processes.planning.devices import sizes_mib, visible_gpus
    from mrl.processes.planning.plan import planned
    from mrl.processes.preparation.completion import complete
    from mrl.processes.preparation.model_bytes import parameters
    from mrl.processes.preparation.starting_config import starting_tables, starting_text

    path: Path = arguments.to
    if path.exists():
        raise ConfigError("the file already exists", where=str(path), cure="choose another file with --to")
    if not path.absolute().parent.is_dir():
        raise ConfigError("no such folder", where="mrl init --to", got=str(path.parent))
    if not Path(arguments.data).is_file():
        raise ConfigError("no such file", where="mrl init --data", got=arguments.data, wanted="a file of JSON lines")
    gpus = visible_gpus(os.environ)
    device = "cuda" if len(gpus) >= GPUS_PER_POLICY * len(arguments.models) else "cpu"
    named = {"prompt_key": arguments.prompt_key, "reference_key": arguments.reference_key}
    tables = starting_tables(
        path.stem,
        arguments.models,
        arguments.data,
        verifier=arguments.verifier,
        steps=arguments.steps,
        device=device,
        options={key: column for key, column in named.items() if column},
    )
    of_device = resolve(tables, [], where="mrl init")
    completed = complete(of_device.config)
    plan, host_mib = planned(completed.config), host_memory_bytes() / MIB
    fitting = fitted_to_memory(completed.config, plan, host_mib)
    config, known = fitting.config, parameters(fitting.config)
    unknown = [name for name in config.policies if name not in known]
    needs = memory_plan(config, plan)
    memory = [f"{need.spec.name:<24} {need.host_mib:>8,.0f} MiB" for need in needs if need.spec.policy not in unknown]
    memory += [f"{name:<24} unknown until the model is on this machine" for name in unknown]
    choices = (*of_device.choices, *completed.choices, *fitting.choices)
    replace_file(path, starting_text(path, tables, config, choices, memory).encode())
    print(path)
    for line in too_little(
        config, [need for need in needs if need.spec.policy not in unknown], host_mib, sizes_mib(gpus)
    ):
        print(line)
    print(f"next: mrl check {path}")
    return 0
