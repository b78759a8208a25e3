"""Equal tuning of regimes by successive halving (arXiv 1502.07943), before `mrl compare` measures them on fresh seeds.

Every regime tries equally many configurations, on the same tuning seeds, for equally many steps. Configuration 0 is the
file's own. Configuration i has the learning rate and the KL coefficient at place i + 1 of a Halton sequence (place 1
has the file's rate), the same for all regimes, and values of the regime's own parameters that its table marks with
`Tuned`. At the end of a rung the better half goes on to the next rung, which trains longer and from the start, so that
every score is that of a whole schedule. The run folders keep the results, with a file NAME.failed beside each run that
failed: a later call reads them and goes on.
"""

import argparse
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from mrl.config.overrides import WHERE
from mrl.config.schema import RunConfig
from mrl.config.table import tuned_fields
from mrl.errors import ConfigError, RoleFailed
from mrl.files import replace_file
from mrl.plugins import short_name
from mrl.processes.preparation.comparison_plan import (
    REPORTED,
    Planned,
    PlannedRun,
    base_config,
    check_untuned,
    config_toml,
    final_seeds,
    folder_of,
    given_keys,
    plan_rows,
    plan_runs,
    rows_of,
    seeds_in,
    tuning_folder,
)
from mrl.report.comparing.grid import NOTHING, Grid
from mrl.report.comparison import read_outcome
from mrl.report.comparison_table import MEBIBYTE
from mrl.sharing.regimes import regime_kind

RULE = (
    "mean over tuning seeds of the held-out accuracy at the rung's end, mean over policies; "
    "ties by fewer shared bytes, then by the lower number"
)
RUNG_SHARES = (0.25, 0.5, 1.0)
"""Shares of `run.steps`; with fewer than 8 configurations the first rungs are left out, so that the last rung has two
configurations or more."""
LR_RANGE = 4.0
"""Learning rates lie between the file's divided and multiplied by this, evenly in their logarithm."""
RELATIVE = ".learner.lr"
"""End of the key that is tuned as a multiple of the given value."""
KL_COEFFICIENTS = (0.0, 0.01)
BASES = (2, 3, 5, 7, 11, 13)
"""Bases of the Halton sequence for the learning rate, the KL coefficient, then the regime's own parameters."""
TUNING_SEEDS = "1001,1002"
POOL_SEED_OFFSET = 1_000_003
"""Tuning's `pool.seed` minus the final runs': so large that tasks whose entry i depends on seed + i share no entry."""


class Candidate(NamedTuple):
    """One configuration of a regime."""

    place: int
    settings: Mapping[str, Any]
    """Name -> value, for a reader; {} for the file's own configuration."""
    words: tuple[str, ...]
    """The settings as overrides of `mrl train`."""


class Score(NamedTuple):
    """Score of one candidate at the end of a rung; fields are None where one of its runs failed."""

    accuracy: float | None
    shared_bytes: float | None


@dataclass(frozen=True, slots=True)
class Rung:
    """Scores of candidates that trained for equally many steps: row -> place -> score."""

    steps: int
    scores: Mapping[str, Mapping[int, Score]]


@dataclass(frozen=True, slots=True)
class Tuning:
    """The candidates of every row, and the rungs that are done."""

    seeds: Sequence[int]
    steps: Sequence[int]
    """Steps of each rung."""
    tried: Mapping[str, Sequence[Candidate]]
    rungs: Sequence[Rung] = ()

    def going_on(self) -> dict[str, list[int]]:
        """Return row -> places that the next rung trains, best first; after the last rung the first is the choice."""
        if not self.rungs:
            return {row: [one.place for one in tried] for row, tried in self.tried.items()}
        return {row: better_half(scores) for row, scores in self.rungs[-1].scores.items()}

    def chosen(self) -> dict[str, Candidate]:
        """Return row -> its chosen candidate; {} before the end of the last rung."""
        if len(self.rungs) < len(self.steps):
            return {}
        return {row: self.tried[row][places[0]] for row, places in self.going_on().items()}


def better_half(scores: Mapping[int, Score]) -> list[int]:
    """Return the half of the places that `RULE` prefers, rounded up, the best first; failed candidates come last."""

    def rank(place: int) -> tuple[bool, float, float, int]:
        accuracy, shared_bytes = scores[place]
        return accuracy is None, -(accuracy or 0.0), shared_bytes or 0.0, place

    order = sorted(scores, key=rank)
    return order[: math.ceil(len(order) / 2)]


def rung_steps(steps: int, number: int) -> list[int]:
    """Return the steps of each rung, for `number` configurations and `steps` of a whole run."""
    rungs = min(len(RUNG_SHARES), int(math.log2(number)))
    return [max(1, math.ceil(steps * share)) for share in RUNG_SHARES[-rungs:]]


def planned_tuning(arguments: argparse.Namespace) -> Tuning:
    """Return the tuning that `--tune` asks for, before its first rung.

    Raises ConfigError for a mistaken argument, a regime that marks no parameter to tune, and a given key that is tuned.
    """
    if arguments.tune < 2:
        raise ConfigError("too few configurations to choose from", where="--tune", got=arguments.tune, wanted=">= 2")
    seeds = seeds_in(TUNING_SEEDS if arguments.tune_seeds is None else arguments.tune_seeds, where="--tune-seeds")
    final = final_seeds(arguments)
    for seed in seeds:
        if seed in final:
            others = (str(one) for one in itertools.count(1001) if one not in final)
            free = ",".join(itertools.islice(others, max(2, len(seeds))))
            raise ConfigError(
                "a seed of the final runs cannot be a tuning seed",
                where="--tune-seeds",
                got=seed,
                wanted="seeds that are not in --seeds",
                cure=f"use --tune-seeds {free}",
            )
    config = base_config(arguments)
    tried = {row: candidates(config, row, arguments.tune) for row in rows_of(arguments)}
    tuned = {word for found in tried.values() for word in found[1].words[::2] if not word.endswith(RELATIVE)}
    for key in given_keys(arguments):
        if key in tuned:
            raise ConfigError(
                "this key is tuned, so a given value would apply to configuration 0 only",
                where=WHERE,
                got=key,
                cure="leave it out, or compare without --tune",
            )
    return Tuning(seeds, rung_steps(config.run.steps, arguments.tune), tried)


def tune(
    arguments: argparse.Namespace, train: Callable[[Sequence[PlannedRun]], None], *, on_rung: Callable[[str], None]
) -> Tuning:
    """Train, rung by rung, the runs that are not done, and write `tuning.json` after each rung.

    `train` leaves runs that are done as they are. A run that did not reach its end is trained once more, and then
    counts as failed. With `--only-table` no further run counts as failed, and the tuning is returned as far as it came.
    Raises ConfigError for what the final runs would be refused for, RoleFailed for a row with no candidate left.
    """
    tuning = planned_tuning(arguments)
    check_untuned(plan_runs(arguments))
    while len(tuning.rungs) < len(tuning.steps):
        runs = rung_runs(arguments, tuning)
        steps, told = tuning.steps[len(tuning.rungs)], {row: len(found) for row, found in tuning.going_on().items()}
        on_rung(f"tuning: {steps} steps of " + ", ".join(f"{number} x {row}" for row, number in told.items()))
        train([one for found in runs.values() for one in found if not _has_failed(one)])
        left = _to_go(runs)
        if left and arguments.only_table:
            return tuning
        if left:
            on_rung(f"tuning: runs that did not finish are tried again: {len(left)}")
            train(left)
        scores: dict[str, dict[int, Score]] = {row: {} for row in tuning.tried}
        for (row, place), found in runs.items():
            scores[row][place] = scored(found)
        failed = [one for found in runs.values() for one in found if not one.state().is_done]
        if any(all(score.accuracy is None for score in found.values()) for found in scores.values()):
            raise RoleFailed(
                f"tuning is incomplete: {len(failed)} runs did not finish, the first is {failed[0].folder}"
            )
        for one in failed:
            replace_file(_mark(one), config_toml(one.config).encode())
            on_rung(f"tuning: {one.folder} counts as failed; delete {_mark(one)} to try it again")
        tuning = Tuning(tuning.seeds, tuning.steps, tuning.tried, (*tuning.rungs, Rung(steps, scores)))
        text = json.dumps(as_json(tuning), indent=1, allow_nan=False)
        replace_file(folder_of(arguments) / "tuning.json", f"{text}\n".encode())
    return tuning


def _to_go(runs: Mapping[tuple[str, int], Sequence[PlannedRun]]) -> list[PlannedRun]:
    return [one for found in runs.values() for one in found if not one.state().is_done and not _has_failed(one)]


def _mark(one: PlannedRun) -> Path:
    return one.folder.with_name(f"{one.folder.name}.failed")


def _has_failed(one: PlannedRun) -> bool:
    """Whether this very configuration failed before. It is not tried again: a later call might choose otherwise."""
    mark = _mark(one)
    return mark.is_file() and mark.read_bytes() == config_toml(one.config).encode()


def runs_to_go(arguments: argparse.Namespace, tuning: Tuning) -> int:
    """Return the number of runs that are left in the current rung and in later rungs."""
    number, left = len(_to_go(rung_runs(arguments, tuning))), [len(found) for found in tuning.going_on().values()]
    for _ in tuning.steps[len(tuning.rungs) + 1 :]:
        left = [math.ceil(places / 2) for places in left]
        number += sum(left) * len(tuning.seeds)
    return number


def rung_runs(arguments: argparse.Namespace, tuning: Tuning) -> dict[tuple[str, int], list[PlannedRun]]:
    """Return (row, place) -> the candidate's runs of the next rung, one for each tuning seed."""
    steps, seed = tuning.steps[len(tuning.rungs)], base_config(arguments).pool.seed + POOL_SEED_OFFSET
    shared = ("--run.steps", str(steps), "--evaluation.every", "0", "--pool.seed", str(seed))
    planned = {
        (row, place): Planned(row, f"{short_name(row)}-{place}-{steps}", (*tuning.tried[row][place].words, *shared))
        for row, places in tuning.going_on().items()
        for place in places
    }
    runs = plan_rows(arguments, tuning_folder(folder_of(arguments)), list(planned.values()), tuning.seeds)
    return {whose: runs[place :: len(planned)] for place, whose in enumerate(planned)}


def scored(runs: Sequence[PlannedRun]) -> Score:
    """Return the score of one candidate from its runs; a run that is not done counts as failed."""
    if any(_has_failed(one) or not one.state().is_done for one in runs):
        return Score(None, None)
    outcomes = [read_outcome(one.folder) for one in runs]
    # Rounded, so that sums in another order count as ties.
    accuracy = round(mean(one.end() for one in outcomes), 9)
    return Score(accuracy, mean(one.shared_bytes for one in outcomes))


def candidates(config: RunConfig, row: str, number: int) -> list[Candidate]:
    """Return `number` configurations of a row. Raises ConfigError for parameters of which none is marked `Tuned`."""
    if row in REPORTED:
        raise ConfigError(
            "the settings of this row are fixed", where=f"--tune: {row}", cure=f"tune {REPORTED[row][0]} instead"
        )
    parameters = regime_kind({"regime": row}, where="--tune").parameters
    own, most = tuned_fields(parameters), len(BASES) - 2
    if (parameters.model_fields and not own) or len(own) > most:
        raise ConfigError(
            "wrong number of parameters marked for tuning",
            where=f"--tune: {row}",
            got=len(own),
            wanted=f"1 to {most}",
            cure=f"mark one or two fields of {parameters.__name__} with mrl.config.table.Tuned",
        )
    return [_candidate(config, row, own, place) for place in range(number)]


def _candidate(config: RunConfig, row: str, own: Mapping[str, Sequence[Any]], place: int) -> Candidate:
    if not place:
        return Candidate(0, {}, ())
    at = [radical_inverse(place + 1, base) for base in BASES[: 2 + len(own)]]
    factor = LR_RANGE ** (2 * at[0] - 1)
    kl = KL_COEFFICIENTS[int(at[1] * len(KL_COEFFICIENTS))]
    chosen = {key: values[int(part * len(values))] for (key, values), part in zip(own.items(), at[2:], strict=True)}
    words: list[str] = []
    for name, table in config.policies.items():
        if not table.frozen:
            words += [f"--policies.{name}.learner.lr", f"{table.learner.lr * factor:.3g}"]
            words += [f"--policies.{name}.objective.kl_coefficient", str(kl)]
    for key, value in chosen.items():
        words += [f"--sharing.{short_name(row)}.{key}", str(value).lower() if isinstance(value, bool) else str(value)]
    return Candidate(place, {"lr_factor": float(f"{factor:.3g}"), "kl_coefficient": kl, **chosen}, tuple(words))


def radical_inverse(number: int, base: int) -> float:
    """Return a number >= 0 with its digits mirrored at the point, in [0, 1): the van der Corput sequence."""
    inverse, weight = 0.0, 1.0
    while number:
        number, digit = divmod(number, base)
        weight /= base
        inverse += digit * weight
    return inverse


def as_json(tuning: Tuning) -> dict[str, Any]:
    """Return the rule, the candidates, every rung with its scores, and the choices, as JSON values."""
    chosen = tuning.chosen()
    return {
        "rule": RULE,
        "tuning_seeds": list(tuning.seeds),
        "rung_steps": list(tuning.steps),
        "regimes": {
            row: {
                "chosen": chosen[row].place if chosen else None,
                "steps_trained": sum(rung.steps * len(rung.scores[row]) * len(tuning.seeds) for rung in tuning.rungs),
                "configurations": [one._asdict() for one in tried],
                "rungs": [
                    {
                        "steps": rung.steps,
                        "scores": {str(place): score._asdict() for place, score in rung.scores[row].items()},
                        "go_on": better_half(rung.scores[row]),
                    }
                    for rung in tuning.rungs
                ],
            }
            for row, tried in tuning.tried.items()
        },
    }


def grid(tuning: Tuning) -> Grid:
    """Return a table of every configuration with its score at the end of each rung it reached; choices are marked."""
    chosen = tuning.chosen()
    head = ["regime", "number", "configuration", *(f"step {rung.steps}" for rung in tuning.rungs), "MiB shared", ""]
    lines = []
    for row, tried in tuning.tried.items():
        for one in tried:
            found = [rung.scores[row].get(one.place) for rung in tuning.rungs]
            cells = ["" if score is None else _shown(score.accuracy) for score in found]
            sizes = [score.shared_bytes for score in found if score is not None and score.shared_bytes is not None]
            shared = f"{sizes[-1] / MEBIBYTE:.2f}" if sizes else NOTHING
            mark = "chosen" if chosen and chosen[row] is one else ""
            lines.append([row, str(one.place), told(one), *cells, shared, mark])
    seeds = ", ".join(map(str, tuning.seeds))
    return Grid(f"Tuning: held-out accuracy, mean over policies and seeds {seeds}", head, lines)


def _shown(accuracy: float | None) -> str:
    return "failed" if accuracy is None else f"{accuracy:.3f}"


def told(one: Candidate) -> str:
    """Return a candidate's settings in one line."""
    named = {"lr_factor": "lr x", "kl_coefficient": "KL"}
    return ", ".join(f"{named.get(key, key)} {value}" for key, value in one.settings.items()) or "as configured"
