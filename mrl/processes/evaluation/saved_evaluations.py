"""Files of `mrl eval`: written whole or not at all, read, and compared."""

import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mrl.errors import ConfigError
from mrl.files import replace_file
from mrl.metrics.pass_at_k import estimate, passes, union_passes
from mrl.records.evaluation_file import EvaluationFile
from mrl.records.evaluation_messages import Estimate

UNION = "all together"


@dataclass(frozen=True)
class Difference:
    """pass@k of evaluation B minus that of A, over the prompts to which both have k answers."""

    policies: str
    k: int
    before: float
    after: float
    difference: Estimate


def save_evaluation(evaluation: EvaluationFile, place: Path) -> Path:
    """Write an evaluation to `place`, or as a new file into the folder `place`; return its path. Raises OSError."""
    if place.suffix != ".json":
        place.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(evaluation.made_unix_s))
        place = place / f"{'+'.join(evaluation.policies).replace('/', '-')[:100]}-{stamp}.json"
    text = msgspec.json.format(msgspec.json.encode(evaluation), indent=1)
    replace_file(place, text)
    return place


def read_evaluation(path: Path) -> EvaluationFile:
    """Read a file that `save_evaluation` wrote. Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=EvaluationFile)
    except OSError as error:
        raise ConfigError(
            error.strerror or "cannot be read", where=str(path), wanted="a file written by `mrl eval`"
        ) from None
    except msgspec.DecodeError as error:
        raise ConfigError("not a file written by `mrl eval`", where=str(path), got=str(error)) from None


def differences(first: Path, second: Path) -> list[Difference]:
    """Return B minus A for every policy that both files have, and for what all policies solve together.

    Policies are matched by their names without steps; where each file has a single policy, these two are compared.
    Raises ConfigError unless both files are of the same tasks and prompts.
    """
    a, b = read_evaluation(first), read_evaluation(second)
    _check_same(a, b, first, second)
    ks = sorted({1, *a.k} & {1, *b.k})
    found = []
    for name_a, name_b in _pairs(a, b, where=f"{first} and {second}"):
        tallies_a, tallies_b = a.policies[name_a].result.prompts, b.policies[name_b].result.prompts
        shown = name_a if name_a == name_b else f"{name_a} -> {name_b}"
        for k in ks:
            found += _difference(shown, k, passes(tallies_a, k), passes(tallies_b, k))
    if len(a.policies) > 1 and len(b.policies) > 1:
        for k in ks:
            of_a, of_b = (
                union_passes({name: one.result.prompts for name, one in file.policies.items()}, k) for file in (a, b)
            )
            found += _difference(UNION, k, of_a, of_b)
    return found


def _difference(policies: str, k: int, before: dict[str, float], after: dict[str, float]) -> list[Difference]:
    """Return the difference at k, in a list; [] where no prompt has k answers in both."""
    common = [prompt for prompt in before if prompt in after]
    if not common:
        return []
    a, b = [before[prompt] for prompt in common], [after[prompt] for prompt in common]
    by_prompt = [later - earlier for earlier, later in zip(a, b, strict=True)]
    return [Difference(policies, k, sum(a) / len(a), sum(b) / len(b), estimate(by_prompt))]


def _pairs(a: EvaluationFile, b: EvaluationFile, *, where: str) -> list[tuple[str, str]]:
    if len(a.policies) == len(b.policies) == 1:
        return [(next(iter(a.policies)), next(iter(b.policies)))]
    of_b = {name.partition("@")[0]: name for name in b.policies}
    found = [(name, of_b[name.partition("@")[0]]) for name in a.policies if name.partition("@")[0] in of_b]
    if not found:
        got = f"{', '.join(a.policies)}; and {', '.join(b.policies)}"
        raise ConfigError(
            "the files have no policy in common",
            where=where,
            got=got,
            wanted="the same name in both, or one policy in each",
        )
    return found


def _check_same(a: EvaluationFile, b: EvaluationFile, first: Path, second: Path) -> None:
    where = f"{first} and {second}"
    if a.tasks != b.tasks:
        names = {name for name in {*a.tasks, *b.tasks} if a.tasks.get(name) != b.tasks.get(name)}
        raise ConfigError(
            "the evaluations used different tasks", where=where, got=", ".join(sorted(names)), wanted="the same tasks"
        )
    if set(a.prompt_ids) != set(b.prompt_ids):
        shared = len(set(a.prompt_ids) & set(b.prompt_ids))
        got = f"{len(a.prompt_ids)} and {len(b.prompt_ids)}, {shared} of them in both"
        cure = "use the same --tasks, --prompts and pool for both"
        raise ConfigError(
            "the evaluations used different prompts", where=where, got=got, wanted="the same prompts", cure=cure
        )
    if a.success_reward != b.success_reward:
        got = f"{a.success_reward:g} and {b.success_reward:g}"
        raise ConfigError("the evaluations used different values of run.success_reward", where=where, got=got)
