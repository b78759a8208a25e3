"""`mrl export RUN --policy NAME [--step N] [--to FOLDER]`: a checkpoint becomes a Hugging Face folder.

The folder holds weights, configuration, tokenizer, chat template and a model card, and is loaded like any other. It
appears whole or not at all. Of a policy that trains adapters it holds the merged weights, and in `adapter/` the
adapters alone as peft writes them, for engines that load them beside the model that the policy was trained from.
"""

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import mrl
from mrl.config.policy_tables import PolicyTable
from mrl.config.run_folder import RunFolder, read_run_config
from mrl.config.schema import RunConfig
from mrl.errors import CheckpointError, ConfigError, RunFolderError
from mrl.processes.preparation.hub_models import check_here, located

if TYPE_CHECKING:
    from mrl.weights.checkpoint_store import Checkpoint

CARD = "README.md"
ADAPTER = "adapter"
"""Folder of the adapters beside the merged weights."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, the policy, the step, the place."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, runs/<name>")
    parser.add_argument("--policy", required=True, metavar="NAME", help="the policy to export")
    parser.add_argument("--step", type=int, metavar="N", help="a step with a checkpoint; the newest by default")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="by default RUN/exports/NAME-step_N")


def run(arguments: argparse.Namespace) -> int:
    """Write the folder and print its path."""
    config, folder = located(read_run_config(arguments.run)), RunFolder(arguments.run.resolve())
    if arguments.policy not in config.learning:
        raise ConfigError(
            "no such policy that learns",
            where=str(arguments.run),
            got=arguments.policy,
            wanted=" or ".join(config.learning),
        )
    check_here(config, [arguments.policy], arguments.run)
    print(export(config, folder, arguments.policy, arguments.step, arguments.to))
    return 0


def export(config: RunConfig, folder: RunFolder, policy: str, step: int | None, to: Path | None) -> Path:
    """Write the folder of one policy at one step; returns its path.

    Raises RunFolderError when there is no such step or the place is taken, CheckpointError when it is not sound.
    """
    from mrl.weights.checkpoint_store import CheckpointStore  # imports torch

    store = CheckpointStore(folder.checkpoints(policy), policy)
    step = _step(store.steps(), step, folder.checkpoints(policy))
    to = to or folder.path / "exports" / f"{policy}-step_{step}"
    if to.exists():
        raise RunFolderError("exists already", where=str(to), cure="choose another --to")
    problem = store.problem(step)
    if problem:
        raise CheckpointError(problem)
    to.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=to.parent, prefix=f".{to.name}."))
    try:
        _write_weights(part, config.policies[policy], store.open(step))
        for file in Path(config.policies[policy].model).iterdir():
            if file.is_file() and "safetensors" not in file.name and file.name != CARD:
                shutil.copy(file, part)
        (part / CARD).write_text(model_card(config, policy, step), encoding="utf-8")
        part.chmod(0o755)
        part.rename(to)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return to


def _write_weights(folder: Path, table: PolicyTable, checkpoint: "Checkpoint") -> None:
    from mrl.models.load_policy import load_policy
    from mrl.models.lora import add_adapters, write_adapters
    from mrl.models.parameters import trained_weights, whole_weights
    from mrl.weights.publish import write_weights
    from mrl.weights.training_state import restore_weights, saved_weights

    lora = table.learner.lora
    if lora is None:
        write_weights(folder, saved_weights(checkpoint))
        return
    model = load_policy(Path(table.model))
    add_adapters(model, lora, seed=0)
    restore_weights(model, checkpoint)
    write_weights(folder, whole_weights(model))
    write_adapters(folder / ADAPTER, lora, trained_weights(model), table.source or table.model)


def model_card(config: RunConfig, policy: str, step: int) -> str:
    """What the folder is and where it comes from, as the hub shows it."""
    table, regime = config.policies[policy], config.sharing["regime"]
    lora = table.learner.lora
    peers = ", ".join(name for name in config.policies if name != policy) or "none"
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            "tags: [reinforcement-learning, mrl]",
            "---",
            f"# {policy}, step {step} of run {config.run.name}",
            "",
            f"Trained by mrl {mrl.__version__}, mutual reinforcement learning of language models (arXiv 2605.07244).",
            "",
            f"- trained from: {table.source or table.model}",
            f"- objective: {table.objective.method}; sharing regime: {regime}; other policies: {peers}",
            f"- tasks: {', '.join(f'{task.source}/{task.dataset}' for task in config.tasks.values())}",
            f"- sampled at temperature {table.rollout.temperature}, at most {table.rollout.max_new_tokens} new tokens",
            *(
                [f"- adapters of rank {lora.rank}, alpha {lora.alpha:g}, merged here; alone in {ADAPTER}/"]
                if lora
                else []
            ),
            f"- learning rate {table.learner.lr}, {table.learner.prompts_per_step} prompts a step of "
            f"{table.rollout.group_size} answers, seed {config.run.seed}",
            "",
        ]
    )


def _step(found: list[int], wanted: int | None, where: Path) -> int:
    if not found:
        raise RunFolderError("no checkpoint", where=str(where), cure="let the run come to its first checkpoint")
    if wanted is not None and wanted not in found:
        raise RunFolderError("no checkpoint of this step", where=str(where), got=wanted, wanted=f"one of {found}")
    return found[-1] if wanted is None else wanted
