"""Subjects of `mrl eval`: policies of runs at their checkpoints, model folders, models of the hub."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mrl.config.nearest_key import nearest
from mrl.config.policy_tables import PolicyTable
from mrl.config.run_folder import RunFolder, is_run, read_run_config
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError, ModelFolderError, RunFolderError
from mrl.hub_names import parse_name
from mrl.processes.preparation.checkpoint_folder import sound_checkpoint, step_of, write_folder
from mrl.processes.preparation.hub_models import check_here, fetched, located, pinned
from mrl.processes.preparation.model_folder import check_model_folder
from mrl.processes.preparation.prompt_days import dated

WHERE = "mrl eval"


@dataclass(frozen=True)
class EvaluationSubject:
    """One policy or model whose answers `mrl eval` measures."""

    label: str
    """Name in tables and in the sampling seeds: "qwen@150" for a run's policy, else the name of the folder or model."""
    words: str
    """The subject as named on the command line."""
    table: PolicyTable
    """Settings of its sampling; `model` is the folder of its weights, or of a run's initial weights."""
    step: int = 0
    run: Path | None = None
    """Run with a checkpoint of its weights; None where they are those of `table.model`."""
    policy: str = ""
    """Name of the policy in that run."""

    @contextmanager
    def model_folder(self) -> Iterator[Path]:
        """Yield the folder of the subject's model; a checkpoint is written out as one for the length of the block."""
        if self.run is None:
            yield Path(self.table.model)
            return
        with tempfile.TemporaryDirectory(prefix="mrl-eval-") as folder:
            checkpoint = sound_checkpoint(RunFolder(self.run), self.policy, self.step)
            write_folder(Path(folder), self.table, checkpoint)
            yield Path(folder)


def run_of(words: str) -> tuple[Path, int | None] | None:
    """Return the run that RUN or RUN@STEP names, and the step; None where the words name no run.

    A folder with an @ in its own name counts as that folder. Raises ConfigError for a bad step.
    """
    if is_run(Path(words)):
        return Path(words), None
    place, at, step = words.rpartition("@")
    if not at or not is_run(Path(place)):
        return None
    if not step.isdecimal():
        raise ConfigError("not a step", where=words, got=step, wanted="RUN@STEP with a whole number, or RUN alone")
    return Path(place), int(step)


def find_subjects(
    words: Sequence[str], base: RunConfig, *, policy: str, tell: Callable[[str], None]
) -> list[EvaluationSubject]:
    """Return the subjects that `words` name, in order; a run gives its learning policies, or `policy` alone.

    Models without a run sample as a policy of `base` does. Models of the hub are fetched, and `tell` gets lines about
    that. Raises UserError for the first subject that cannot be had.
    """
    found: list[EvaluationSubject] = []
    for one in words:
        run = run_of(one)
        found += _of_run(one, *run, policy=policy) if run is not None else [_of_model(one, base, tell)]
    labels = [one.label for one in found]
    if twice := [label for label in dict.fromkeys(labels) if labels.count(label) > 1]:
        raise ConfigError(
            "two policies have the same name in the table",
            where=WHERE,
            got=twice[0],
            cure="evaluate them separately, and compare with `mrl eval --compare A.json B.json`",
        )
    return found


def _of_run(words: str, run: Path, step: int | None, *, policy: str) -> list[EvaluationSubject]:
    from mrl.weights.checkpoint_store import CheckpointStore  # imports torch

    config = located(read_run_config(run, is_own=False))  # verifiers are those of the configuration that is evaluated
    if policy and policy not in config.learning:
        wanted = " or ".join(config.learning)
        raise ConfigError("no learning policy of this name", where=str(run), got=policy, wanted=wanted)
    names = [policy] if policy else list(config.learning)
    check_here(config, names, run)
    found = []
    for name in names:
        place, table = RunFolder(run).checkpoints(name), config.policies[name]
        steps = CheckpointStore(place, name).steps()
        at = 0 if step == 0 and 0 not in steps else step_of(steps, step, place)
        run_folder = run.absolute() if at in steps else None
        found.append(EvaluationSubject(f"{name}@{at}", words, table, at, run_folder, name))
    return found


def _of_model(words: str, base: RunConfig, tell: Callable[[str], None]) -> EvaluationSubject:
    folder = Path(words)
    table = _asked_like(base, words)
    if folder.exists():
        check_model_folder(folder, key=f"{WHERE} {words}", is_trained=False)
        label = folder.resolve().name
        config = dated(base.model_copy(update={"policies": {label: table}}))
        return EvaluationSubject(label, words, config.policies[label])
    name = parse_name(words)
    if name is None or (folder.parent != Path() and folder.parent.is_dir()):
        near = nearest(folder.name, [one.name for one in folder.parent.glob("*/")]) if folder.parent.is_dir() else None
        raise ModelFolderError(
            "no such run, model folder, or model on the hub",
            where=WHERE,
            got=words,
            wanted="runs/NAME, runs/NAME@STEP, a Hugging Face model folder, or an id such as Qwen/Qwen3-0.6B",
            cure=f"did you mean {folder.parent / near}?" if near else "",
        )
    label = name.id.rpartition("/")[2]
    config = pinned(base.model_copy(update={"policies": {label: table}}), where=WHERE, on_note=tell)
    return EvaluationSubject(label, words, fetched(config, [label], where=WHERE, tell=tell).policies[label])


def _asked_like(config: RunConfig, model: str) -> PolicyTable:
    """Return the table of a model without a run: prompt and sampling of the policy in `config` with longest answers.

    Another model's chat template is left out: a template belongs to the model that it was written for.
    """
    policy = max(config.policies.values(), key=lambda policy: policy.rollout.max_new_tokens)
    prompt = policy.prompt
    if model not in (policy.model, policy.source):
        prompt = prompt.model_copy(update={"chat_template": ""})
    return PolicyTable(model=model, rollout=policy.rollout, prompt=prompt)


def base_config(words: Sequence[str], given: RunConfig | None) -> RunConfig:
    """Return the configuration of tasks and pool: `given`, else the first run's in `words`. Raises RunFolderError."""
    if given is not None:
        return given
    for one in words:
        if (run := run_of(one)) is not None:
            return located(read_run_config(run[0]))
    missing = [one for one in words if not Path(one).exists()]
    raise RunFolderError(
        "no tasks to evaluate on" + (f", and no folder {missing[0]} here" if missing else ""),
        where=WHERE,
        got=" ".join(words),
        wanted="a run, whose tasks are used, or a configuration with tasks",
        cure="add `--config FILE`, `--config RUN`, or `--config quickstart`",
    )
