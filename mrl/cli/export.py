"""`mrl export RUN --policy NAME [--step N] [--to FOLDER] [--dtype D]`: write a checkpoint as a Hugging Face folder.

The folder holds weights, configuration, tokenizer, chat template and a model card, and is loaded like any other. It
appears whole or not at all. For a policy that trains adapters it holds the merged weights, and in `adapter/` the
adapters alone as peft writes them, for engines that load adapters beside the model from which the policy was trained.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import mrl
from mrl.config.locks import held, remove_left
from mrl.config.run_folder import RunFolder, read_run_config
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError, RunFolderError
from mrl.models.chat_template import CONFIG, FILE
from mrl.processes.preparation.checkpoint_folder import (
    ADAPTER,
    AS_MODEL,
    CARD,
    DTYPES,
    dtypes_in,
    sound_checkpoint,
    step_of,
    write_folder,
)
from mrl.processes.preparation.hub_models import check_here, located


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: run, policy, step, place of the folder, and dtype."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, runs/<name>")
    parser.add_argument("--policy", required=True, metavar="NAME", help="policy to export")
    parser.add_argument("--step", type=int, metavar="N", help="step with a checkpoint; default: the newest")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="folder to write; default: RUN/exports/NAME-step_N")
    dtype_help = "dtype of the weights; default: the dtype of the model that the policy was trained from"
    parser.add_argument("--dtype", choices=(AS_MODEL, *DTYPES), default=AS_MODEL, help=dtype_help)


def run(arguments: argparse.Namespace) -> int:
    """Write the folder and print its path; beside it, how its weights are."""
    config, folder = located(read_run_config(arguments.run)), RunFolder(arguments.run.resolve())
    if arguments.policy not in config.learning:
        raise ConfigError(
            "no learning policy of this name",
            where=str(arguments.run),
            got=arguments.policy,
            wanted=" or ".join(config.learning),
        )
    check_here(config, [arguments.policy], arguments.run)
    to = export(config, folder, arguments.policy, arguments.step, arguments.to, dtype=arguments.dtype)
    print(f"weights in {_dtypes_of(to)}", file=sys.stderr, flush=True)
    print(to)
    return 0


def export(
    config: RunConfig,
    folder: RunFolder,
    policy: str,
    step: int | None,
    to: Path | None,
    *,
    dtype: str = AS_MODEL,
) -> Path:
    """Write the folder of one policy at one step, in a dtype of DTYPES or that of the model; return its path.

    Raises RunFolderError when there is no such step or the place is taken or cannot be written, CheckpointError when
    the checkpoint is not sound, ConfigError for another dtype.
    """
    from mrl.weights.checkpoint_store import CheckpointStore  # imports torch

    if dtype not in (AS_MODEL, *DTYPES):
        raise ConfigError(
            "unsupported dtype of weights", where="export", got=dtype, wanted=" or ".join((AS_MODEL, *DTYPES))
        )
    place = folder.checkpoints(policy)
    step = step_of(CheckpointStore(place, policy).steps(), step, place)
    to = to or folder.path / "exports" / f"{policy}-step_{step}"
    if os.path.lexists(to):
        raise RunFolderError("already exists", where=str(to), cure="choose another --to")
    checkpoint = sound_checkpoint(folder, policy, step)
    part = _part_of(to)
    with held(part):
        try:
            write_folder(part, config.policies[policy], checkpoint, dtype)
            if template := config.policies[policy].prompt.chat_template:
                _put_template(part, template)
            (part / CARD).write_text(model_card(config, policy, step, _dtypes_of(part)), encoding="utf-8")
            part.chmod(0o755)
            part.rename(to)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    return to


def _dtypes_of(folder: Path) -> str:
    return " and ".join(sorted(set(dtypes_in(folder).values())))


def _part_of(to: Path) -> Path:
    """Make a new folder beside `to`, to be renamed to it; remove those of killed exports. Raises RunFolderError."""
    prefix = f".{to.name}.part-"
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        remove_left(to.parent, prefix)
        return Path(tempfile.mkdtemp(dir=to.parent, prefix=prefix))
    except OSError as error:
        what = f"the folder cannot be written ({error.strerror})"
        raise RunFolderError(what, where=str(to), cure="choose another --to") from error


def _put_template(folder: Path, template: str) -> None:
    """Replace the model's chat template; remove it from the tokenizer's settings, which llama.cpp would go by."""
    (folder / FILE).write_text(template, encoding="utf-8")
    file = folder / CONFIG
    if file.is_file():
        settings = json.loads(file.read_text(encoding="utf-8"))
        settings.pop("chat_template", None)
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")


def model_card(config: RunConfig, policy: str, step: int, dtypes: str) -> str:
    """Return the model card: origin, training and dtypes of the weights, as the hub shows them."""
    table, regime = config.policies[policy], config.sharing["regime"]
    lora = table.learner.lora
    asked = table.prompt.model_dump(mode="json", exclude_defaults=True, exclude={"chat_template", "few_shot_file"})
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
            *(f"- prompt: {key} = {value!r}" for key, value in asked.items()),
            f"- sampled at temperature {table.rollout.temperature}, at most {table.rollout.max_new_tokens} new tokens",
            *(
                [f"- LoRA adapters of rank {lora.rank}, alpha {lora.alpha:g}, merged here; separately in {ADAPTER}/"]
                if lora
                else []
            ),
            f"- learning rate {table.learner.lr}, {table.learner.prompts_per_step} prompts per step with "
            f"{table.rollout.group_size} answers each, seed {config.run.seed}",
            f"- weights in {dtypes}",
            "",
        ]
    )
