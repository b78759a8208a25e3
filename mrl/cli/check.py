"""`mrl check CONFIG`: do the checks of `mrl train` and print the plan of the run; start and write nothing.

A missing model, data file, package or GPU is no mistake in a configuration: it is listed, with the command that gets
it. With `--strict` the exit code is 2 then.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mrl.config.defaults import Choice
from mrl.config.load import load_resolved
from mrl.config.replay_table import replay_of
from mrl.config.run_folder import RunFolder, check_disk, run_folder_of
from mrl.config.schema import RunConfig
from mrl.config.shipped_configs import config_file
from mrl.errors import ConfigError, MissingError, RunFolderError
from mrl.gateway.agent_network import described_network
from mrl.host_memory import host_memory_bytes
from mrl.memory_plan.fitting import fitted_to_memory
from mrl.memory_plan.needs import MIB, Need
from mrl.memory_plan.run_memory import ProcessNeed, by_device, memory_plan, too_little
from mrl.processes.planning.devices import sizes_mib, visible_gpus
from mrl.processes.planning.dry_run import ranks_told
from mrl.processes.planning.placement import least_gpus, most_gpus, server_gpus
from mrl.processes.planning.plan import ProcessSpec, build_plan, planned
from mrl.processes.planning.time_sharing import shared_gpus
from mrl.processes.planning.unit_workers import UNIT
from mrl.processes.preparation.checkpoint_room import room_notes
from mrl.processes.preparation.completion import complete
from mrl.processes.preparation.hub_data import shown_data
from mrl.processes.preparation.hub_models import missing_model, named, pinned
from mrl.processes.preparation.learning_values import UNKNOWN, learning_rows, warnings
from mrl.processes.preparation.made_policies import cached_folder, is_made, recipe_of
from mrl.processes.preparation.model_bytes import parameters, size_notes
from mrl.processes.preparation.named_plugins import plugin_lines
from mrl.processes.preparation.preflight import preflight
from mrl.processes.preparation.shown_prompts import shown_prompts
from mrl.processes.trackers import files_of, labelled
from mrl.sharing.regimes import check_sharing, replayed_kinds
from mrl.tasks.pool import Prompt
from mrl.tasks.sealed.sealing import described_seal
from mrl.tasks.verifier_trial import GARBAGE, Trial, evaluates_nothing, fails_as_they_are, tells_nothing

SHOWN_SHARE = 0.05
"""Share of a process's memory; smaller parts are left out of the table."""
SHOWN_CHARS = 60
"""Most characters of a prompt or an answer in the table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: configuration, prompts to show, strictness."""
    parser.add_argument("config", type=config_file, metavar="CONFIG", help="TOML file, or `quickstart`")
    shown = "show the first N prompts as each policy sees them"
    parser.add_argument("--prompts", type=int, default=0, metavar="N", help=shown)
    strict = "exit with code 2 if the run cannot start on this host because something is missing or does not fit"
    parser.add_argument("--strict", action="store_true", help=strict)


def run(arguments: argparse.Namespace) -> int:
    """Validate the configuration and print the resolved plan."""
    of_device = load_resolved(arguments.config, arguments.overrides)
    notes: list[str] = []
    completed = complete(pinned(of_device.config, where=str(arguments.config), on_note=notes.append))
    plan, host_mib = planned(completed.config), host_memory_bytes() / MIB
    fitting = fitted_to_memory(completed.config, plan, host_mib)
    config, chosen = fitting.config, (*of_device.choices, *completed.choices, *fitting.choices)
    here = visible_gpus(os.environ)
    folder = run_folder_of(config)
    missing: list[MissingError] = []
    trials: list[Sequence[Trial]] = []
    asked: dict[str, Sequence[Prompt]] = {}
    num_prompts = preflight(
        config,
        where=str(arguments.config),
        on_missing=missing.append,
        on_trial=trials.append,
        on_note=notes.append,
        on_prompts=asked.__setitem__,
    )
    known = parameters(config)
    unknown = [name for name in config.policies if name not in known]
    notes += [*size_notes(config), *warnings(config, known), *room_notes(config, known)]
    needs = memory_plan(config, plan)
    here_needs = [need for need in needs if need.spec.policy not in unknown and need.spec.host == plan.first_host]
    obstacles = [*too_little(config, here_needs, host_mib, sizes_mib(here)), *_still_needed(missing, config, len(here))]
    print(f"{arguments.config} is valid" + ", but the run cannot start here yet: see the end" * bool(obstacles))
    for line in _summary(config, folder, str(arguments.config)):
        print(line)
    if any(num_prompts):
        print("prompts     {} to train on, {} held out".format(*num_prompts))
    if arguments.prompts:
        for line in shown_prompts(config, asked, arguments.prompts):
            print(line)
    console = Console(width=None if sys.stdout.isatty() else 120)
    for of_task in trials:
        _show_trials(console, config, of_task)
    console.print(_policies(config))
    console.print(_learning(config, chosen, unknown))
    if chosen:
        console.print(_chosen(chosen))
    for note in notes:
        print(f"note: {note}")
    for line in (*_slow(config), *_summed_late(config)):
        print(line)
    console.print(_processes(config, needs, unknown))
    if memory := by_device(here_needs):
        parts = (f"cuda {device} {mib / 1024:.0f} GiB" for device, mib in memory.items())
        print(f"GPU memory (estimate, without the caches of servers): {', '.join(parts)}")
    print(f"this host: {len(os.sched_getaffinity(0))} cores, {len(here)} GPUs, {host_mib / 1024:.0f} GiB of memory")
    for line in (*_confined(config), *shared_gpus((*plan.processes, *plan.leased)), *obstacles):
        print(line)
    return 2 if arguments.strict and obstacles else 0


def _confined(config: RunConfig) -> Iterator[str]:
    """Yield lines on how this host confines answers that are run as code, and what agents can reach."""
    if any(table.evaluator or table.trusted_answers for table in config.tasks.values()):
        yield f"answers that are evaluated as code: {described_seal()}"
    if any(table.is_fenced for table in config.tasks.values()):
        yield f"agents that the run starts can reach {described_network()}"


def _show_trials(console: Console, config: RunConfig, trials: Sequence[Trial]) -> None:
    """Print the rewards that one task's verifier gave in its trials, with warnings where they look wrong."""
    table = config.tasks[trials[0].task]
    console.print(_tried(config, trials))
    if tells_nothing(trials):
        print("the verifier gave references and wrong answers the same reward: there is nothing to learn from")
    if evaluates_nothing(trials):
        print(f"the evaluator {table.evaluator} returned no text for any reference: check that it can read answers")
    if fails_as_they_are(trials):
        print(f"{table.verifier} failed on unevaluated texts: a fault only if {table.evaluator} can return such texts")


def _still_needed(missing: Sequence[MissingError], config: RunConfig, num_gpus: int) -> Iterator[str]:
    short = num_gpus < least_gpus(config)
    refused = _refused_folder(config)
    if missing or short or refused:
        yield "still needed before `mrl train` can start:"
    for one in missing:
        yield f"  {one.where}: {one.what}"
        yield from (f"    {line}" for line in (one.wanted and f"wanted {one.wanted}", one.cure) if line)
    if short:
        yield f"  GPUs: at least {least_gpus(config)}, best {most_gpus(config)}; visible on this host: {num_gpus}"
        yield from _fewer_gpus(config, num_gpus)
    if refused:
        yield f"  run.folder: {refused}"


def _refused_folder(config: RunConfig) -> str:
    """Return why the folder of the run cannot be made; "" where it can."""
    try:
        check_disk(run_folder_of(config).path, config.run.min_free_mib)
    except RunFolderError as error:
        return str(error)
    return ""


def _fewer_gpus(config: RunConfig, num_gpus: int) -> Iterator[str]:
    """Yield the cure that a plan for these few GPUs gives, if the plan is refused."""
    try:
        build_plan(config, run_folder_of(config).path, gpus=[str(number) for number in range(num_gpus)])
    except ConfigError as error:
        yield f"    {error.cure}"


def _summary(config: RunConfig, folder: RunFolder, where: str) -> Iterator[str]:
    yield f"run folder  {folder.path}" + (" (exists)" if folder.path.exists() else "")
    pace = "all policies in step" if config.run.sync else "each policy at its own pace"
    yield f"steps       {config.run.steps} per policy, seed {config.run.seed}, {pace}"
    yield "sharing     " + _sharing(config)
    if replayed_kinds(config.sharing) and (replay := replay_of(config.sharing)) is not None:
        yield f"replay      {replay.run}: {', '.join(replay.policies) or 'all its policies'}"
    if config.allocation.units:
        yield "units       " + ", ".join(config.allocation.units) + " (a lease starts a worker on each)"
    for unit_type, names in config.allocation.unit_types.items():
        yield f"unit type   {unit_type}: {', '.join(names)}"
    for name in config.policies:
        if (gpus := server_gpus(config, name)) > 1:
            yield f"weights     {name}: verified by the canary alone, as parts on {gpus} GPUs have no digests"
    for name, policy in config.policies.items():
        if (model := named(policy)) is not None:
            state = "to be fetched" if missing_model(name, policy, "") else "fetched"
            asked = f", {policy.model_revision} now" * (policy.model_revision not in ("", model.commit))
            yield f"model       {name}: {model}{asked} ({state})" + f" in {policy.model}" * bool(model.commit)
    yield from (f"data        {line}" for line in map(shown_data, config.tasks, config.tasks.values()) if line)
    yield "tasks       " + ", ".join(f"{name} ({task.source}/{task.dataset})" for name, task in config.tasks.items())
    yield from (f"plug-in     {line}" for line in plugin_lines(config, where=where))
    for label, tracker in labelled(config.trackers):
        files = files_of(folder, tracker, label)
        yield f"tracker     {label}: project {tracker.project}" + f", files in {files}" * bool(files)


def _sharing(config: RunConfig) -> str:
    regime = str(config.sharing.get("regime", "independent"))
    parameters = check_sharing(config.sharing, "").model_dump(mode="json", by_alias=True)
    return ", ".join([regime, *(f"{key} = {value}" for key, value in parameters.items())])


def _policies(config: RunConfig) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="policies", title_justify="left", show_edge=False)
    for heading in ("policy", "model", "learns"):
        table.add_column(heading, overflow="fold")
    for name, policy in config.policies.items():
        of_hub = named(policy)
        model = f"{of_hub.id} (see above)" if of_hub else policy.model
        if not of_hub and missing_model(name, policy, ""):
            model += " (no such folder)"
        if policy.make is not None:
            folder = cached_folder(recipe_of(config, name))
            state = "cached" if is_made(folder) else "to be made"
            model = f"{policy.make.architecture}, {policy.make.tokenizer} tokenizer ({state}): {folder}"
        table.add_row(name, model, "no (frozen)" if policy.frozen else "yes")
    return table


def _tried(config: RunConfig, trials: Sequence[Trial]) -> Table:
    """Table of rewards that a verifier gave for references, for wrong answers and for garbage."""
    task = trials[0].task
    title = f"tasks.{task}: rewards of {config.tasks[task].verifier}"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", show_edge=False)
    for heading in ("prompt", "answer", "reward"):
        table.add_column(heading, overflow="fold")
    for trial in trials:
        told = [("reference", trial.of_reference), ("wrong", trial.of_wrong)]
        told += zip(GARBAGE, trial.of_garbage, strict=False)
        told += [("reference, evaluated", trial.evaluated)] if trial.evaluated else []
        for which, verdict in told:
            parts = ", ".join(f"{name} {reward:g}" for name, reward in verdict.rewards.items())
            answer = Text(f"{which}: {verdict.extracted[:SHOWN_CHARS].strip()}")
            reward = f"{verdict.reward:g}" + f" ({parts})" * bool(parts)
            reward += f" ({verdict.failure}: {verdict.words})" * bool(verdict.failure)
            table.add_row(Text(trial.prompt[:SHOWN_CHARS]), answer, reward)
    return table


def _learning(config: RunConfig, chosen: Iterable[Choice], unknown: Sequence[str]) -> Table:
    """Table of keys that decide how policies learn; values of keys that were left out have a mark."""
    title = "learning settings (* default, key not set)"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", show_edge=False)
    for heading in ("key of a policy", *config.learning):
        table.add_column(heading, overflow="fold")
    for key, cells in learning_rows(config, {choice.key for choice in chosen}, unknown):
        table.add_row(key, *(f"{value} *" if is_default else value for value, is_default in cells))
    return table


def _chosen(choices: Iterable[Choice]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, title="values chosen for keys that are not set", title_justify="left", show_edge=False
    )
    for heading in ("key", "value", "why"):
        table.add_column(heading, overflow="fold")
    for choice in choices:
        table.add_row(
            choice.key, f"{choice.value:g}" if isinstance(choice.value, float) else str(choice.value), choice.why
        )
    return table


def _slow(config: RunConfig) -> Iterator[str]:
    """Yield lines on given values that cost a GPU most of its speed."""
    for name in config.learning:
        policy = config.policies[name]
        if policy.device == "cuda" and policy.learner.precision == "float32":
            yield (
                f"policies.{name}.learner.precision: float32 on a GPU is several times slower than bfloat16, the"
                " default: it has no flash attention, and mrl keeps TF32 off"
            )


def _summed_late(config: RunConfig) -> Iterator[str]:
    """Yield lines on learners whose replicas of shards sum gradients between them only once for each update."""
    for name in config.learning:
        learner = config.policies[name].learner
        if 1 < learner.num_shards < learner.processes:
            yield (
                f"policies.{name}.learner: {learner.processes // learner.num_shards} replicas of {learner.num_shards}"
                " shards sum their gradients with each other once per update instead of in every pass; this needs no"
                " extra memory"
            )


def _processes(config: RunConfig, needs: Sequence[ProcessNeed], unknown: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="processes", title_justify="left", show_edge=False, show_footer=True)
    threads = [int(need.spec.env["OMP_NUM_THREADS"]) * need.count for need in needs]
    table.add_column("process", f"{sum(bool(need.host.parts) for need in needs)} processes")
    table.add_column("device")
    table.add_column("threads", str(sum(_at_once(needs, threads))), justify="right")
    known_mib = sum(need.host_mib for need in needs if need.spec.policy not in unknown)
    table.add_column("memory", f"{known_mib:.0f} MiB" + " and more" * bool(unknown), justify="right")
    table.add_column("peak, MiB by part")
    for need, count in zip(needs, threads, strict=True):
        told = [_parts(need.host)] + ([f"cuda: {_parts(need.device)}"] if need.device else [])
        memory, parts = f"{need.host_mib:.0f} MiB", "; ".join(told)
        if need.spec.policy in unknown:
            memory, parts = UNKNOWN, "the model is not on this machine yet"
        at = f"{ranks_told(need.spec, config)} on {need.spec.host}" * bool(need.spec.host)
        table.add_row(need.spec.name + at, _device(config, need.spec), str(count), memory, parts)
    return table


def _at_once(needs: Sequence[ProcessNeed], threads: Sequence[int]) -> Iterable[int]:
    """Threads that run at once; engines on one unit take turns, so the largest of them counts."""
    largest: dict[str, int] = {}
    for need, count in zip(needs, threads, strict=True):
        place = need.spec.env.get(UNIT, need.spec.name)
        largest[place] = max(count, largest.get(place, 0))
    return largest.values()


def _parts(need: Need) -> str:
    """Describe the moment of a memory peak and its larger parts."""
    large = {part: size / MIB for part, size in need.parts.items() if size >= SHOWN_SHARE * need.mib * MIB}
    ordered = sorted(large.items(), key=lambda item: -item[1])
    return f"{need.moment} " * bool(need.moment) + ", ".join(f"{part} {mib:.0f}" for part, mib in ordered)


def _device(config: RunConfig, spec: ProcessSpec) -> str:
    if UNIT in spec.env:
        return spec.env[UNIT]
    served = [config.policies[spec.policy]] if spec.policy else list(config.policies.values())
    on_gpu = spec.role in ("learner", "worker") and any(policy.device == "cuda" for policy in served)
    return "cuda " + spec.env.get("CUDA_VISIBLE_DEVICES", "") if on_gpu else "cpu"
