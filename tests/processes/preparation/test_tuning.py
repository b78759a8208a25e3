"""Equal tuning: what is tried of each regime, successive halving against a slow twin, budgets, a call after a stop."""

import argparse
import json
import math
import random
from collections.abc import Sequence

import pytest

from mrl.cli.compare import run
from mrl.config.load import load_config
from mrl.config.table import tuned_fields
from mrl.errors import ConfigError, RoleFailed
from mrl.metrics.jsonl import MetricsWriter
from mrl.processes.preparation import tuning
from mrl.processes.preparation.comparison_plan import PlannedRun, final_seeds, plan_runs
from mrl.processes.preparation.tuning import Score, better_half, candidates, planned_tuning, rung_runs, rung_steps, tune
from mrl.records.telemetry_messages import MetricsRecord
from mrl.sharing.independent import IndependentParameters
from mrl.sharing.regimes import REGIMES, RegimeKind, check_sharing
from mrl.sharing.sgt import SgtParameters
from mrl.tasks.pool import build_pool
from tests.support.compared_runs import arguments, finish

ASKED = ("--regimes", "independent,sgt", "--seeds", "2", "--run.steps", "8")


def measured(one: PlannedRun, accuracy: float, shared_bytes: float = 0.0) -> None:
    """A run that came to its end with this accuracy of both policies."""
    finish(one)
    steps = one.config.run.steps
    for name in ("a", "b"):
        (one.folder / "evaluation" / f"{name}-{steps}.json").write_text("{}")
    writer = MetricsWriter(one.folder / "metrics.jsonl")
    for step, found in ((0, 0.1), (steps, accuracy)):
        for name in ("a", "b"):
            told = {"eval/accuracy": found}
            writer.write(MetricsRecord(role=f"learner/{name}", policy=name, step=step, time_unix_s=1e9, values=told))
    writer.close()


def place_of(one: PlannedRun) -> int:
    """Which configuration of its regime a run of the tuning is."""
    return int(one.folder.name.split("-")[-3])


class Trainer:
    """Ends what is not done with the accuracy that `accuracies` says, None not at all; stops after so many runs."""

    def __init__(self, accuracies: Sequence[float | None], stop_after: float = math.inf) -> None:
        self.accuracies, self.stop_after, self.trained = accuracies, stop_after, list[PlannedRun]()

    def __call__(self, runs: Sequence[PlannedRun]) -> None:
        for one in runs:
            if not one.state().is_done:
                if len(self.trained) >= self.stop_after:
                    raise KeyboardInterrupt
                accuracy = self.accuracies[place_of(one)]
                if accuracy is not None:
                    measured(one, accuracy)
                self.trained.append(one)


def slow_half(scores: dict[int, Score]) -> list[int]:
    """By choosing the best again and again, each by comparing with every other."""

    def beats(one: int, other: int) -> bool:
        mine, others = scores[one], scores[other]
        if None in (mine.accuracy, others.accuracy):
            return others.accuracy is None and (mine.accuracy is not None or one < other)
        if mine.accuracy != others.accuracy:
            return mine.accuracy > others.accuracy
        if mine.shared_bytes != others.shared_bytes:
            return mine.shared_bytes < others.shared_bytes
        return one < other

    left, chosen = set(scores), list[int]()
    while 2 * len(chosen) < len(scores):
        best = next(one for one in left if all(beats(one, other) for other in left - {one}))
        chosen.append(best)
        left.remove(best)
    return chosen


def test_the_better_half_is_that_of_a_slow_twin():
    """With many ties of accuracy and of bytes, whatever the order of the table."""
    drawn = random.Random(1)
    for _ in range(500):
        places = drawn.sample(range(40), drawn.randint(1, 12))
        scores = {place: Score(drawn.choice((0.0, 0.5)), drawn.choice((0.0, 7.0))) for place in places}
        scores |= {place: Score(None, None) for place in places if drawn.random() < 0.2}
        assert better_half(scores) == slow_half(scores)


@pytest.mark.parametrize(
    ("number", "steps"),
    [(2, [100]), (3, [100]), (4, [50, 100]), (7, [50, 100]), (8, [25, 50, 100]), (16, [25, 50, 100])],
)
def test_the_last_rung_trains_all_steps_of_two_or_more(number, steps):
    """Fewer configurations have fewer rungs."""
    assert rung_steps(100, number) == steps
    left = number
    for _ in steps[:-1]:
        left = math.ceil(left / 2)
    assert left >= 2
    assert rung_steps(1, number) == [1] * len(steps)


def test_regimes_say_what_is_tried_of_them():
    """One or two fields each, with values that their tables take."""
    for name, kind in REGIMES.items():
        marked = tuned_fields(kind.parameters)
        assert len(marked) in (0, 1, 2)
        assert bool(marked) == bool(kind.parameters.model_fields), name
        for key, values in marked.items():
            assert len(set(values)) == len(values) > 1
            for value in values:
                check_sharing({"regime": name, name: {key: value}}, "test")


def test_every_regime_tries_the_same_rates_and_penalties(tmp_path):
    """The first as the file has it; then one for one, all different, each a configuration that loads as it is told."""
    asked = arguments(tmp_path)
    config = load_config(asked.config)
    tried = {row: candidates(config, row, 16) for row in ("independent", "sgt", "prp")}
    for row, found in tried.items():
        assert (found[0].settings, found[0].words) == ({}, ())
        assert len({one.words for one in found}) == len({one.settings.get("lr_factor") for one in found}) == 16
        for one, base in zip(found[1:], tried["independent"][1:], strict=True):
            assert base.settings.items() <= one.settings.items()
            loaded = load_config(asked.config, [*one.words, "--sharing.regime", row])
            for name in ("a", "b"):
                lr = config.policies[name].learner.lr
                assert loaded.policies[name].learner.lr == pytest.approx(lr * one.settings["lr_factor"], rel=0.01)
                assert loaded.policies[name].objective.kl_coefficient == one.settings["kl_coefficient"]
            own = {key: one.settings[key] for key in tuned_fields(REGIMES[row].parameters)}
            assert {key: loaded.sharing[row][key] for key in own} == own
    factors = [one.settings["lr_factor"] for one in tried["sgt"][1:]]
    assert 0.25 <= min(factors) < 0.5 < 2 < max(factors) < 4
    assert 1.0 not in factors, "the file's own rate is that of the first"
    assert {one.settings["kl_coefficient"] for one in tried["sgt"][1:]} == {0.0, 0.01}
    for key, values in tuned_fields(SgtParameters).items():
        assert {one.settings[key] for one in tried["sgt"][1:]} == set(values)


def test_all_rows_have_one_budget_and_a_stop_changes_nothing(tmp_path):
    """As many runs of as many steps for each; after a stop at any run the same choice, and no run is repeated."""
    accuracies = [0.3, 0.5, 0.2, 0.4, 0.6, 0.1, 0.6, 0.3]
    asked = arguments(tmp_path, *ASKED, "--tune", "8", "--tune-seeds", "5,6")
    whole = Trainer(accuracies)
    wanted = tune(asked, whole, on_rung=lambda line: None)
    assert {row: one.place for row, one in wanted.chosen().items()} == {"independent": 4, "sgt": 4}
    spent = {row: sorted((one.config.run.steps, one.seed) for one in whole.trained if one.regime == row)
             for row in ("independent", "sgt")}  # fmt: skip
    assert spent["independent"] == spent["sgt"]
    assert [spent["sgt"].count((steps, 5)) for steps in (2, 4, 8)] == [8, 4, 2]
    written = (tmp_path / "runs" / "tuning.json").read_text()
    found = json.loads(written)
    assert {one["steps_trained"] for one in found["regimes"].values()} == {2 * (8 * 2 + 4 * 4 + 2 * 8)}
    assert [rung["go_on"] for rung in found["regimes"]["sgt"]["rungs"]] == [[4, 6, 1, 3], [4, 6], [4]]

    for stop in (0, 17):
        again = tmp_path / f"stop{stop}"
        again.mkdir()
        asked = arguments(again, *ASKED, "--tune", "8", "--tune-seeds", "5,6")
        first, second = Trainer(accuracies, stop), Trainer(accuracies)
        with pytest.raises(KeyboardInterrupt):
            tune(asked, first, on_rung=lambda line: None)
        tune(asked, second, on_rung=lambda line: None)
        assert len(first.trained) + len(second.trained) == len(whole.trained)
        assert (again / "runs" / "tuning.json").read_text() == written


def test_final_runs_have_what_was_chosen_and_other_seeds(tmp_path, capsys):
    """Made policies are others with every seed, the same for all rows; the tables say what was tried and chosen."""
    asked = arguments(tmp_path, *ASKED, "--tune", "2", "--tune-seeds", "5,", "--only-table")
    make = "\n[policies.{}.make]\narchitecture = 'llama'\ntokenizer = 'metaspace'\nseed = 3\n"
    text = asked.config.read_text()
    for name in ("a", "b"):
        text = text.replace(f'[policies.{name}]\nmodel = "models/{name}"\n', make.format(name))
    asked.config.write_text(text)
    trainer = Trainer([0.2, 0.4])
    tuned = tune(asked, trainer, on_rung=lambda line: None)
    assert {one.config.policies["a"].make.seed for one in trainer.trained} == {3 + 5}
    assert {one.config.pool.seed for one in trainer.trained} == {load_config(asked.config).pool.seed + 1_000_003}
    final = plan_runs(asked, {row: one.words for row, one in tuned.chosen().items()})
    assert [(one.regime, one.seed, one.config.policies["b"].make.seed) for one in final] == [
        ("independent", 1, 4), ("sgt", 1, 4), ("independent", 2, 5), ("sgt", 2, 5)
    ]  # fmt: skip
    assert {one.config.run.steps for one in final} == {8}
    chosen = tuned.tried["sgt"][1].settings
    assert {one.config.sharing["sgt"]["lambda"] for one in final if one.regime == "sgt"} == {chosen["lambda"]}
    for one in final:
        measured(one, 0.3)
    capsys.readouterr()
    assert run(asked) == 0
    shown = capsys.readouterr().out
    assert "chosen" in shown
    assert f"sgt: {tuning.told(tuned.tried['sgt'][1])}" in shown
    assert f"tuned by {tuning.RULE}" in (tmp_path / "runs" / "comparison.md").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--tune", "0"), r"--tune: too few configurations to choose from; got 0; wanted >= 2"),
        (("--tune", "1"), r"--tune: too few configurations to choose from; got 1; wanted >= 2"),
        (
            ("--tune", "4", "--tune-seeds", "7,2"),
            r"--tune-seeds: a seed of the final runs cannot be a tuning seed; got 2;",
        ),
        (("--tune", "--seeds", "1001,1003", "--tune-seeds", "1001,"), r"got 1001; .* cure: use --tune-seeds 1002,1004"),
        (
            ("--tune", "--sharing.sgt.lambda", "0.6"),
            r"command line: this key is tuned, .*; got '--sharing\.sgt\.lambda'; cure: leave",
        ),
        (("--tune", "--sharing.sgt", "{lambda = 0.6}"), r"is tuned, .*; got '--sharing\.sgt\.lambda"),
        (
            ("--tune", "--policies.a.objective.kl_coefficient=0.1"),
            r"is tuned, .*; got '--policies\.a\.objective\.kl_coef",
        ),
        (("--tune", "--evaluation.every", "-1"), r"runs that evaluate nothing cannot be compared"),
        (
            ("--run.seed", "4"),
            r"command line: the comparison sets this option itself in every run; got '--run\.seed'; cure: use --seeds",
        ),
        (
            ("--sharing", "{regime = 'prp'}"),
            r"the comparison sets this option itself in every run; got '--sharing\.regime'; cure: use --regimes",
        ),
        (("--tune", "4", "--tune-seeds", "x"), r"--tune-seeds: not a number of seeds; got 'x'"),
        (("--tune-seeds", "7,"), r"--tune-seeds: has no effect without --tune"),
        (
            ("--tune", "--regimes", "sgt,sgt-reported"),
            r"--tune: sgt-reported: the settings of this row are fixed; cure: tune sgt instead",
        ),
        (
            ("--tune", "--regimes", "silent"),
            r"--tune: silent: wrong number of .* tuning; got 0; .* fields of SilentParam",
        ),
    ],
)
def test_what_cannot_be_tuned_is_refused(tmp_path, monkeypatch, words, told):
    """In one line, before anything is trained."""

    class SilentParameters(IndependentParameters):
        strength: float = 1.0

    monkeypatch.setitem(REGIMES, "silent", RegimeKind(SilentParameters, REGIMES["independent"].build))
    with pytest.raises(ConfigError, match=told):
        run(arguments(tmp_path, *ASKED, *words))
    assert not (tmp_path / "runs").exists()


def test_a_rate_and_steps_that_were_given_count_for_all(tmp_path):
    """The rate as that of which multiples are tried."""
    given = ("--policies.a.learner.lr", "1e-3", "--evaluation.every", "2")
    asked = arguments(tmp_path, *ASKED, *given, "--tune", "2", "--tune-seeds", "5,")
    found = [runs[0].config for runs in rung_runs(asked, planned_tuning(asked)).values()]
    assert [one.policies["a"].learner.lr for one in found] == [1e-3, 5e-4] * 2
    assert {one.run.steps for one in found} == {8}
    assert {one.config.evaluation.every for one in plan_runs(asked)} == {2}


def test_a_comparison_that_was_not_tuned_is_left_alone(tmp_path):
    """Nothing is trained in its folder, before its runs would turn out to be others; one that was tuned goes on."""
    finish(plan_runs(arguments(tmp_path, *ASKED))[0])
    asked = arguments(tmp_path, *ASKED, "--tune", "2", "--tune-seeds", "5,")
    trainer = Trainer([0.2, 0.4])
    with pytest.raises(
        ConfigError, match=r"runs: the folder holds runs of a comparison without --tune; cure: use another"
    ):
        tune(asked, trainer, on_rung=lambda line: None)
    assert not trainer.trained
    (tmp_path / "runs" / "tuning").mkdir()
    tune(asked, trainer, on_rung=lambda line: None)
    assert len(trainer.trained) == 4


def test_tuning_and_final_runs_hold_out_other_problems(tmp_path):
    """Where entry i of a task depends on seed + i, a near seed would have nearly the same ones."""
    asked = arguments(tmp_path, *ASKED, "--tune", "2", "--tune-seeds", "5,")
    asked.overrides += ["--pool.train_prompts", "80", "--pool.held_out_prompts", "80"]
    task = "source = 'reasoning_gym'\ndataset = 'chain_sum'"
    asked.config.write_text(asked.config.read_text().replace('source = "words"\ndataset = "trim"', task))
    tuned, final = rung_runs(asked, planned_tuning(asked))["sgt", 0][0].config, plan_runs(asked)[0].config
    held_out = [{one.prompt_id for one in build_pool(of.tasks, of.pool).held_out} for of in (tuned, final)]
    assert [len(found) for found in held_out] == [80, 80]
    assert not held_out[0] & held_out[1]


def test_a_configuration_that_cannot_finish_is_the_last(tmp_path, capsys):
    """After a second try; its steps count, tables and numbers say so, and a later call tries nothing again."""
    asked = arguments(tmp_path, *ASKED, "--tune", "4", "--tune-seeds", "5,6")
    trainer = Trainer([0.3, 0.2, None, 0.4])
    told = list[str]()
    tuned = tune(asked, trainer, on_rung=told.append)
    assert told[1] == "tuning: runs that did not finish are tried again: 4"
    mark = tmp_path / "runs" / "tuning" / "sgt-2-4-6.failed"
    assert f"tuning: {mark.with_suffix('')} counts as failed; delete {mark} to try it again" in told
    assert [sum(place_of(one) == place for one in trainer.trained) for place in range(4)] == [8, 4, 8, 8]
    assert {row: one.place for row, one in tuned.chosen().items()} == {"independent": 3, "sgt": 3}
    written = json.loads((tmp_path / "runs" / "tuning.json").read_text())["regimes"]["sgt"]
    assert written["rungs"][0]["scores"]["2"] == {"accuracy": None, "shared_bytes": None}
    assert written["steps_trained"] == 2 * (4 * 4 + 2 * 8)
    assert list(tuning.grid(tuned).rows[2])[3:] == ["failed", "", "-", ""]

    again = Trainer([0.3, 0.2, 0.9, 0.4])
    assert tune(asked, again, on_rung=told.append) == tuned
    assert not again.trained
    asked.only_table = True
    assert tune(asked, lambda runs: None, on_rung=told.append) == tuned, "shown as it was"
    other = changed(asked, "--pool.train_prompts", "9")
    assert tuning.runs_to_go(other, planned_tuning(other)) == 2 * (4 + 2) * 2, "what failed is of this configuration"
    asked.only_table = False
    mark.unlink()
    tune(asked, again, on_rung=told.append)
    assert [one.folder for one in again.trained] == [mark.with_suffix("")]


def changed(asked, *words):
    """The same call with other overrides."""
    return argparse.Namespace(**vars(asked) | {"overrides": [*asked.overrides, *words]})


def test_a_second_try_that_succeeds_counts(tmp_path):
    """As a run that was out of memory beside others."""
    asked = arguments(tmp_path, *ASKED, "--tune", "2", "--tune-seeds", "5,")
    tries = [Trainer([0.3, None]), Trainer([0.3, 0.5])]
    tuned = tune(asked, lambda runs: tries.pop(0)(runs), on_rung=lambda line: None)
    assert {row: one.place for row, one in tuned.chosen().items()} == {"independent": 1, "sgt": 1}
    assert not list((tmp_path / "runs" / "tuning").glob("*.failed"))


def test_a_regime_that_cannot_finish_at_all_ends_the_tuning(tmp_path):
    """What is at fault may lie elsewhere, so nothing is marked as failed."""
    asked = arguments(tmp_path, *ASKED, "--tune", "2", "--tune-seeds", "5,")
    with pytest.raises(
        RoleFailed, match=r"tuning is incomplete: 4 runs did not finish, the first is \S+/tuning/independent-0-8-5"
    ):
        tune(asked, Trainer([None, None]), on_rung=lambda line: None)
    assert not (tmp_path / "runs").exists()
    trainer = Trainer([0.1, 0.2])
    tune(asked, trainer, on_rung=lambda line: None)
    assert len(trainer.trained) == 4


def test_a_call_whose_configurations_all_failed_before_says_so(tmp_path):
    """As one with fewer configurations in the same folder: there is nothing to train, and nothing to choose."""
    longer = arguments(tmp_path, *ASKED, "--tune", "4", "--tune-seeds", "5,")
    tune(longer, Trainer([None, None, 0.3, 0.4]), on_rung=lambda line: None)
    with pytest.raises(RoleFailed, match=r"4 runs did not finish, the first is \S+/independent-0-4-5"):
        run(arguments(tmp_path, *ASKED, "--run.steps", "4", "--tune", "2", "--tune-seeds", "5,"))


def test_a_tuning_that_is_not_done_is_shown_as_far_as_it_came(tmp_path, capsys):
    """With `--only-table`: rungs that there are, runs to go, exit code 1; none of them counts as failed."""
    asked = arguments(tmp_path, *ASKED, "--tune", "8", "--tune-seeds", "5,6", "--only-table")
    assert run(asked) == 1
    assert "runs left before the final ones: 56" in capsys.readouterr().out
    stopped = Trainer([0.3, 0.5, 0.2, 0.4, 0.6, 0.1, 0.6, 0.3], stop_after=35)
    with pytest.raises(KeyboardInterrupt):
        tune(changed(arguments(tmp_path, *ASKED, "--tune", "8", "--tune-seeds", "5,6")), stopped, on_rung=print)
    capsys.readouterr()
    assert run(asked) == 1
    shown = capsys.readouterr().out
    assert "step 2" in shown
    assert "step 4" not in shown
    assert "runs left before the final ones: 21" in shown
    assert "failed" not in shown


def test_eight_fresh_seeds_are_usual_after_tuning(tmp_path):
    """Of a tuning without further words, 16 configurations and two seeds that no usual count of seeds reaches."""
    asked = arguments(tmp_path, "--tune")
    found = planned_tuning(asked)
    assert (list(found.seeds), {row: len(tried) for row, tried in found.tried.items()}) == (
        [1001, 1002],
        {"independent": 16, "sgt": 16},
    )
    assert final_seeds(asked) == list(range(1, 9))
    assert final_seeds(arguments(tmp_path)) == [1, 2, 3]


def test_accuracies_that_differ_by_rounding_alone_are_a_tie(tmp_path):
    """What a machine adds up in another order is no gain: the lower number is chosen."""
    asked = arguments(tmp_path, *ASKED, "--tune", "2", "--tune-seeds", "5,")
    tuned = tune(asked, Trainer([0.3, 0.1 + 0.2]), on_rung=lambda line: None)
    assert {one.place for one in tuned.chosen().values()} == {0}
