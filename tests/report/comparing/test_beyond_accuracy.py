"""What runs bring beyond accuracy: counted prompt by prompt by a slow twin, averaged over seeds, paired, shown."""

import itertools
import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence

import pytest

from mrl.records.evaluation_messages import PromptTally
from mrl.report.comparing.beyond_accuracy import LAST_STEPS, BeyondAccuracy, beyond_accuracy
from mrl.report.comparing.beyond_table import beyond_grids, beyond_json
from mrl.report.comparison import AVERAGE, Comparison, RunOutcome
from mrl.report.comparison_table import as_json, grids
from mrl.report.run_data import RunData

NAMES = ("a", "b", "c")
PROMPTS = 40


def tallies(solved: Sequence[int]) -> list[PromptTally]:
    """One answer to each prompt."""
    return [PromptTally(prompt_id=f"p{place}", answered=1, right=one) for place, one in enumerate(solved)]


def data(solved: Mapping[str, Mapping[int, Sequence[int]]], *, k: int = 1) -> RunData:
    """A run of these policies and a frozen one, whose prompts came out so at these steps."""
    tables = {name: {} for name in solved} | {"teacher": {"frozen": True}}
    found = RunData("made-up", {"policies": tables, "evaluation": {"k": [1, k]}}, list(tables), [])
    found.tallies = {name: {step: tallies(one) for step, one in by_step.items()} for name, by_step in solved.items()}
    found.tallies["teacher"] = {0: tallies([1] * PROMPTS)}
    return found


def drawn(seed: int) -> dict[str, dict[int, list[int]]]:
    """Outcomes of three policies at three steps."""
    rng = random.Random(seed)
    return {name: {step: [rng.randrange(2) for _ in range(PROMPTS)] for step in (0, 5, 10)} for name in NAMES}


def run(seed: int) -> RunOutcome:
    """A run of which little more is known than what it brought beyond accuracy."""
    return RunOutcome({AVERAGE: {0: 0.1, 1: 0.2}}, 1, 1, 1, 1, 1, 1, beyond=beyond_accuracy(data(drawn(seed))))


def test_every_share_is_that_of_counted_prompts():
    """The slow twin goes prompt by prompt; frozen policies and steps in between are left out."""
    solved = drawn(1)
    found = beyond_accuracy(data(solved))
    measures = found.measures()
    for when, step in (("start", 0), ("end", 10)):
        outcomes = [{name: solved[name][step][place] for name in NAMES} for place in range(PROMPTS)]

        def share(says, outcomes=outcomes) -> float:
            return sum(map(bool, map(says, outcomes))) / PROMPTS

        assert measures[f"union/{when}"] == pytest.approx(share(lambda one: any(one.values())))
        rescuable = [share(lambda one, name=name: not one[name] and any(one.values())) for name in NAMES]
        for name, value in zip(NAMES, rescuable, strict=True):
            assert measures[f"rescuable/{name}/{when}"] == pytest.approx(value)
        assert measures[f"rescuable/{when}"] == pytest.approx(sum(rescuable) / 3)
        for a, b in itertools.permutations(NAMES, 2):
            wanted = share(lambda one, a=a, b=b: one[a] and not one[b])
            assert measures[f"alone/{a}/{b}/{when}"] == pytest.approx(wanted)
        likeness = [measures[f"likeness/{a}/{b}/{when}"] for a, b in itertools.combinations(NAMES, 2)]
        assert measures[f"likeness/{when}"] == pytest.approx(sum(likeness) / 3)
    assert (found.start.step, found.end.step) == (0, 10)
    assert not any("teacher" in name for name in measures)


def test_a_step_that_one_policy_lacks_is_no_end():
    """All numbers are of policies that were asked the same."""
    solved = drawn(2)
    del solved["b"][10]
    found = beyond_accuracy(data(solved))
    assert (found.start.step, found.end.step) == (0, 5)
    alone = beyond_accuracy(data({"a": solved["a"]}))
    assert (alone.start, alone.end) == (None, None)
    assert beyond_accuracy(data(drawn(2), k=2)).end is None, "no prompt has two answers"


def test_entropy_and_length_are_means_over_the_last_steps():
    """Of the steps that have them, each policy for itself."""
    found = data(drawn(1))
    found.steps["a"] = {step: {"entropy/sampled_nats": float(step), "tokens/answer_mean": 7.0} for step in range(1, 21)}
    found.steps["b"] = {step: {"entropy/sampled_nats": math.nan if step % 2 else 1.0} for step in range(1, 21)}
    beyond = beyond_accuracy(found)
    assert beyond.entropy_nats["a"] == statistics.mean(range(21 - LAST_STEPS, 21))
    assert (beyond.entropy_nats["b"], beyond.answer_tokens["a"]) == (1.0, 7.0)
    assert math.isnan(beyond.entropy_nats["c"])
    assert math.isnan(beyond.measures()["entropy_nats"])


def test_means_are_over_seeds_and_differences_paired_by_seed():
    """Every number of the JSON against statistics by hand; seeds of one regime alone have no difference."""
    runs = {"independent": {1: run(1), 2: run(2), 3: run(3)}, "sgt": {1: run(4), 2: run(5), 9: run(6)}}
    comparison = Comparison(runs, "independent")
    found = beyond_json(comparison, "sgt")
    assert set(found) == set(run(1).beyond.measures())
    for name in ("union/end", "alone/a/b/start", "likeness/b/c/end", "rescuable/c/end"):
        by_seed = {
            regime: {seed: one.beyond.measures()[name] for seed, one in of.items()} for regime, of in runs.items()
        }
        own = list(by_seed["sgt"].values())
        pairs = [by_seed["sgt"][seed] - by_seed["independent"][seed] for seed in (1, 2)]
        assert found[name]["mean"] == pytest.approx(statistics.mean(own))
        assert found[name]["half"] == pytest.approx(4.302653 * statistics.stdev(own) / math.sqrt(3))
        against = found[name]["against_baseline"]
        assert against["mean"] == pytest.approx(statistics.mean(pairs))
        assert against["half"] == pytest.approx(12.706205 * statistics.stdev(pairs) / math.sqrt(2))
    assert found["entropy_nats"]["mean"] is None
    told = json.loads(json.dumps(as_json(comparison), allow_nan=False))["sgt"]
    assert told["beyond_accuracy"] == found
    assert told["seeds"]["9"]["beyond_accuracy"]["union/end"] == runs["sgt"][9].beyond.end.union


def beyond(union: float, kappa: float) -> RunOutcome:
    """Two policies that differ from nothing to this."""
    solved = {"a": {0: [0, 0, 1, 1], 9: [1, 1, 0, 0]}, "b": {0: [0, 1, 0, 1], 9: [0, 0, 1, 1]}}
    found = beyond_accuracy(data(solved))
    end = found.end._replace(union=union, likeness_of={"a": {"b": kappa}})
    told = BeyondAccuracy(1, found.start, end, {"a": 0.25, "b": 0.75}, {"a": 10.0, "b": 15.0})
    return RunOutcome({AVERAGE: {0: 0.1, 1: 0.2}, "a": {0: 0.1}, "b": {0: 0.1}}, 1, 1, 1, 1, 1, 1, beyond=told)


def test_tables_stand_below_that_of_accuracy():
    """Means, differences at the end, and both directions of every pair; a kappa without value leaves a gap."""
    runs = {"independent": {1: beyond(0.5, math.nan), 2: beyond(0.6, 0.1)}, "sgt": {1: beyond(0.7, 0.2)}}
    found = Comparison(runs, "independent")
    means, differences, pairs = beyond_grids(found)
    assert [one.title for one in grids(found)[1:4]] == [means.title, differences.title, pairs.title]
    assert dict(zip(means.head, means.rows[1], strict=True)) == {
        "regime": "sgt", "union start": "0.750", "union end": "0.700", "rescuable start": "0.250",
        "rescuable end": "0.500", "likeness start": "0.000", "likeness end": "0.200", "nats/token end": "0.50",
        "tokens end": "12.5",
    }  # fmt: skip
    assert means.rows[0][2] == "0.550 ± 0.635"
    assert means.rows[0][6] == "0.100"
    assert list(differences.rows) == [["sgt", "+0.200", "+0.000", "-", "+0.00", "+0.0"]]
    assert list(pairs.rows[2]) == ["sgt: a, not b", "0.250", "0.500", "+0.000"]
    assert [row[0] for row in pairs.rows[:2]] == ["independent: a, not b", "independent: b, not a"]
    assert pairs.rows[0][3] == ""


def test_runs_that_kept_no_prompts_have_no_such_table():
    """Nor has a comparison of one regime differences."""
    assert beyond_grids(Comparison({"a": {1: RunOutcome({AVERAGE: {0: 0.1}}, 1, 1, 1, 1, 1, 1)}}, "a")) == []
    assert len(beyond_grids(Comparison({"a": {1: beyond(0.5, 0.1)}}, "a"))) == 2


def test_with_several_answers_the_union_says_of_how_many():
    """The largest k of the configuration."""
    one = beyond(0.5, 0.1)
    told = BeyondAccuracy(8, one.beyond.start, one.beyond.end, {}, {})
    found = Comparison({"a": {1: RunOutcome({AVERAGE: {0: 0.1}}, 1, 1, 1, 1, 1, 1, beyond=told)}}, "a")
    assert beyond_grids(found)[0].head[1:3] == ["union pass@8 start", "union pass@8 end"]
