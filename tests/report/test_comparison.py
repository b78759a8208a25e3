"""What a comparison says: curves, intervals against a slow twin, pairing by seed, spending, tables, figure."""

import json
import math
import statistics

import pytest
from scipy import stats

from mrl.metrics.jsonl import MetricsWriter, each_metrics
from mrl.records.telemetry_messages import MetricsRecord
from mrl.report.comparing.grid import markdown
from mrl.report.comparison import AVERAGE, Comparison, RunOutcome, holm, interval, outcome_of, p_value, read_outcome
from mrl.report.comparison_figure import drawn, learning_curves
from mrl.report.comparison_table import as_json, grids
from mrl.report.run_data import RunData


def outcome(*ends: float, start: float = 0.2, best: float = 0.0, **spent: float) -> RunOutcome:
    """Two policies whose curves go from `start` over `best` to their ends."""
    curves = {f"p{n}": {0: start, 10: max(best, end / 2), 20: end} for n, end in enumerate(ends)}
    steps = (0, 10, 20)
    curves[AVERAGE] = {step: statistics.mean(curve[step] for curve in curves.values()) for step in steps}
    fields = {"own_answers": 80.0, "own_tokens": 400.0, "trained_tokens": 500.0, "peer_tokens": 50.0}
    return RunOutcome(curves, **(fields | {"shared_bytes": 2.0**20, "wall_s": 60.0} | spent))


def comparison() -> Comparison:
    return Comparison(
        {
            "independent": {1: outcome(0.4, 0.6), 2: outcome(0.5, 0.5), 3: outcome(0.3, 0.9)},
            "sgt": {1: outcome(0.6, 0.8), 2: outcome(0.7, 0.9), 3: outcome(0.5, 0.9)},
        },
        "independent",
    )


def test_interval_is_students():
    """Mean plus or minus t_(n-1) s / sqrt(n); one value has no interval."""
    values = [0.1, 0.4, 0.2, 0.7]
    mean = sum(values) / 4
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / 3)
    found = interval(values)
    assert found.mean == pytest.approx(mean)
    assert found.half == pytest.approx(3.182446 * spread / 2)
    assert (found.low, found.high) == pytest.approx((mean - found.half, mean + found.half))
    assert interval([0.3]).mean == 0.3
    assert math.isnan(interval([0.3]).half)


@pytest.mark.parametrize("num_seeds", [2, 16, 17, 18, 101])
def test_any_number_of_seeds_has_its_own_quantile(num_seeds):
    """The half width, of values with a standard error of 1, is the quantile of n - 1 degrees of freedom."""
    known = {2: 12.706205, 16: 2.131450, 17: 2.119905, 18: 2.109816, 101: 1.983972}
    values = [float(number) for number in range(num_seeds)]
    error = statistics.stdev(values) / math.sqrt(num_seeds)
    assert interval(values).half / error == pytest.approx(known[num_seeds], abs=1e-6)


def test_a_curve_is_told_by_its_start_end_best_and_area():
    """The area is the mean height, trapezoid by trapezoid, whatever the distance of the points."""
    one = RunOutcome({AVERAGE: {0: 0.0, 10: 0.8, 40: 0.2}}, 1, 1, 1, 1, 1, 1)
    assert (one.start(), one.end(), one.best()) == (0.0, 0.2, 0.8)
    assert one.area() == pytest.approx((10 * 0.4 + 30 * 0.5) / 40)
    assert RunOutcome({AVERAGE: {5: 0.3}}, 1, 1, 1, 1, 1, 1).area() == 0.3


def test_differences_are_paired_by_seed():
    """Each seed against the same seed of the baseline; seeds that only one has are left out."""
    found = comparison()
    differences = [0.2, 0.3, 0.1]
    assert found.against_baseline("sgt", "end").mean == pytest.approx(statistics.mean(differences))
    assert found.against_baseline("sgt", "end").half == pytest.approx(
        4.302653 * statistics.stdev(differences) / math.sqrt(3)
    )
    lone = {"independent": {1: outcome(0.4, 0.6)}, "sgt": {1: outcome(0.6, 0.8), 2: outcome(0.0, 0.0)}}
    partial = Comparison(lone, "independent")
    assert partial.against_baseline("sgt", "end").mean == pytest.approx(0.2)
    assert math.isnan(partial.against_baseline("sgt", "end").half)


def test_p_values_are_those_of_a_paired_t_test():
    """As scipy has them; one seed says nothing, nor do differences that are equal, but for those of nothing."""
    found = comparison()
    ends = [[one.end() for one in found.outcomes[regime].values()] for regime in ("sgt", "independent")]
    assert found.p_values() == pytest.approx({"sgt": stats.ttest_rel(*ends).pvalue}, rel=1e-9)
    assert p_value([0.0, 0.0]) == p_value([1e-17, -1e-17]) == 1.0
    for unknown in ([0.3], [0.25, 0.25], [0.3 - 0.2, 0.1, 0.4 - 0.3]):
        assert math.isnan(p_value(unknown))
    assert as_json(found)["sgt"]["p"] == as_json(found)["sgt"]["p_holm"] == found.p_values()["sgt"]
    assert as_json(found)["independent"]["p_holm"] is None


def test_holm_is_that_of_a_table_by_hand():
    """0.01 x 4, 0.02 x 3, 0.022 x 2 raised to the one before, 0.4 x 1; never above 1; an unknown one counts."""
    by_hand = {"c": 0.4, "a": 0.01, "d": 0.022, "b": 0.02}
    assert holm(by_hand) == pytest.approx({"c": 0.4, "a": 0.04, "d": 0.06, "b": 0.06})
    assert list(holm(by_hand)) == ["c", "a", "d", "b"]
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    unknown = holm({"a": 0.01, "b": math.nan})
    assert (unknown["a"], math.isnan(unknown["b"])) == (0.02, True)


def test_a_gain_stands_beside_what_it_cost():
    """Three passes for a trained token, one for a sampled or scored one, as multiples of the baseline."""
    dear = {1: outcome(0.5, trained_tokens=750.0, scored_tokens=100.0, shared_bytes=3 * 2.0**20)}
    found = Comparison({"independent": {1: outcome(0.4)}, "rlad": dear}, "independent")
    assert dear[1].passed_tokens == 400 + 100 + 3 * 750
    assert list(grids(found)[3].rows[0]) == ["rlad", "+0.100", "-", "-", "x 1.50", "x 1.45", "3.00"]
    unequal = {"independent": {1: outcome(0.4), 2: outcome(0.4, trained_tokens=9e9)}, "rlad": dear | {3: outcome(0.5)}}
    assert grids(Comparison(unequal, "independent"))[3].rows == grids(found)[3].rows, "over seeds that both have"
    apart = Comparison({"independent": {1: outcome(0.4)}, "rlad": {2: outcome(0.5)}}, "independent")
    assert list(grids(apart)[3].rows[0]) == ["rlad", *"------"]
    idle = Comparison({"independent": {1: outcome(0.4, trained_tokens=0.0)}, "rlad": dear}, "independent")
    assert grids(idle)[3].rows[0][4] == "-", "no multiple of nothing"


def test_mean_curve_takes_the_steps_that_every_seed_has():
    """A seed that was evaluated at other steps does not bend the curve."""
    shorter = RunOutcome({AVERAGE: {0: 0.0, 20: 1.0}}, 1, 1, 1, 1, 1, 1)
    found = Comparison({"a": {1: shorter, 2: outcome(0.4, 0.6)}}, "a")
    assert sorted(found.mean_curve("a")) == [0, 20]
    assert found.mean_curve("a")[20].mean == pytest.approx(0.75)


def run_data() -> RunData:
    """Two learners of two steps and a frozen teacher."""
    table = {"learner": {"prompts_per_step": 4}, "rollout": {"group_size": 2}}
    config = {"policies": {"a": table, "b": table, "t": {"frozen": True, **table}}}
    data = RunData("made-up", config, ["a", "b", "t"], [])
    for name, tokens in (("a", 10.0), ("b", 20.0)):
        data.steps[name] = {
            step: {"tokens/answer_mean": tokens, "tokens/trained": 70.0, "sharing/rescue_tokens": 7.0}
            for step in (1, 2)
        }
    data.accuracy = {"a": {"": {0: 0.1, 2: 0.5, 1: 0.3}}, "b": {"": {0: 0.3, 2: 0.9}}, "t": {"": {0: 1.0}}}
    data.flows = {("a", "b"): {"bytes": 100.0}, ("b", "a"): {"bytes": 20.0}}
    data.wall_s = 9.0
    return data


def test_outcome_counts_what_a_run_spent():
    """Own answers and tokens from batch sizes, peers' tokens and bytes from what was told; teachers do not count.

    Groups that were sampled and dropped are spent too.
    """
    found = outcome_of(run_data())
    wasteful = run_data()
    wasteful.steps["a"][2] |= {"groups/uniform_dropped": 3.0, "groups/uniform_dropped_tokens": 50.0}
    wasteful.steps["b"][1] |= {"staleness/dropped_groups": 1.0, "staleness/dropped_tokens": 5.0}
    assert outcome_of(wasteful).own_answers == found.own_answers + 2 * (3 + 1)
    assert outcome_of(wasteful).own_tokens == found.own_tokens + 55
    assert found.curves[AVERAGE] == pytest.approx({0: 0.2, 2: 0.7})
    assert found.own_answers == 2 * 2 * 8
    assert found.own_tokens == 2 * 8 * (10 + 20)
    assert found.trained_tokens == 4 * 70
    assert found.peer_tokens == 4 * 7
    assert (found.shared_bytes, found.wall_s) == (120.0, 9.0)
    assert set(found.curves) == {"a", "b", AVERAGE}


def test_groups_that_are_trained_on_again_were_sampled_once():
    """Half of a step's groups are; tokens that were trained on are told as they are."""
    found, data = outcome_of(run_data()), run_data()
    data.config["policies"]["a"] = {
        "learner": {"prompts_per_step": 4, "reuse_share": 0.5},
        "rollout": {"group_size": 2},
    }
    assert outcome_of(data).own_answers == found.own_answers - 2 * 4
    assert outcome_of(data).own_tokens == found.own_tokens - 2 * 4 * 10
    assert outcome_of(data).trained_tokens == found.trained_tokens


def test_tables_say_what_was_found():
    """Averages with intervals and differences, every policy, what was spent."""
    averages, policies, spent, gains = grids(comparison())
    assert list(averages.rows[1][:2]) == ["sgt", "0.200 ± 0.000"]
    assert averages.rows[1][2].startswith("0.733 ± ")
    assert averages.rows[0][5] == ""
    assert averages.rows[1][5].startswith("+0.200 [")
    assert averages.title.endswith("mean over policies and seeds (3 each), 95 % interval")
    assert policies.head[1:5] == ["p0 start", "p0 end", "p0 best", "p0 area"]
    assert all(" ± " in cell for cell in policies.rows[1][1:])
    assert spent.rows[0][1:] == ["80", "400", "500", "10.0%", "1.00", "1.0"]
    assert gains.title == "Gain on independent, paired by seed, and what it cost"
    assert [row[0] for row in gains.rows] == ["sgt"]
    assert gains.rows[0][1] == averages.rows[1][5]
    assert gains.rows[0][4:] == ["x 1.00", "x 1.00", "1.00"]
    text = markdown(averages)
    assert text.count("\n| ") == 4
    assert "| sgt | 0.200 ± 0.000 |" in text


def test_without_the_baseline_there_are_no_differences():
    """Neither another regime's, nor `nan` in a table or file."""
    found = Comparison({"sgt": {1: outcome(0.5), 2: outcome(0.7)}, "prp": {1: outcome(0.4)}}, "independent")
    head, rows = grids(found)[0].head, grids(found)[0].rows
    assert list(head[-2:]) == ["end - independent", "area - independent"]
    assert [list(row[-2:]) for row in rows] == [["-", "-"], ["-", "-"]]
    assert as_json(found)["sgt"]["end_against_baseline"] == {"mean": None, "half": None}
    assert all(axes.lines[0].get_linestyle() == "-" for axes in drawn(found).axes)
    assert drawn(comparison()).axes[0].lines[0].get_linestyle() == "--"


def test_what_a_teacher_scored_stands_among_the_spendings():
    """The mean over seeds, beside the tokens that were trained on; no column where nobody scored."""
    scored = {1: outcome(0.5, scored_tokens=1000.0), 2: outcome(0.5, scored_tokens=2000.0)}
    found = Comparison({"independent": {1: outcome(0.5)}, "rlad": scored}, "independent")
    spendings = grids(found)[2]
    place = list(spendings.head).index("scored tokens")
    assert spendings.head[place - 1 : place + 2] == ["of peers", "scored tokens", "MiB shared"]
    assert [row[place] for row in spendings.rows] == ["0", "1,500"]
    assert {len(row) for row in spendings.rows} == {len(spendings.head)}
    assert as_json(found)["rlad"]["seeds"]["2"]["scored_tokens"] == 2000
    assert "scored tokens" not in grids(comparison())[2].head


@pytest.mark.parametrize(
    ("seeds", "told"),
    [({"sgt": 3, "prp": 3}, "3 each"), ({"sgt": 3, "prp": 1}, "sgt 3, prp 1"), ({"sgt": 1}, "1 each")],
)
def test_the_title_says_how_many_seeds_every_row_has(seeds, told):
    """An interrupted comparison may have more of one than of another."""
    found = {regime: {seed: outcome(0.5) for seed in range(number)} for regime, number in seeds.items()}
    assert f"mean over policies and seeds ({told})" in grids(Comparison(found, "sgt"))[0].title


def test_an_outcome_of_a_folder_has_time_and_scored_tokens_of_all_attempts(make_run):
    """A pause between attempts is no time spent, and every life of a worker counts from 0."""
    folder = make_run(steps=40)
    before = read_outcome(folder)
    last_s = max(line["time_unix_s"] for line in each_metrics(folder / "metrics.jsonl"))
    writer = MetricsWriter(folder / "metrics.jsonl")
    for time_s, tokens in ((last_s, 5.0), (last_s + 86_400, 2.0), (last_s + 86_407, 3.0)):
        scored = {"scoring/tokens": tokens}
        writer.write(MetricsRecord(role="worker/t/0", policy="t", step=1, time_unix_s=time_s, values=scored))
    writer.close()
    after = read_outcome(folder)
    assert (before.scored_tokens, after.scored_tokens) == (0, 5 + 3)
    assert after.wall_s == pytest.approx(before.wall_s + 7)


def test_json_holds_every_seed_and_no_nan():
    """Numbers that do not exist are null, so that any reader can read them."""
    one = Comparison({"independent": {1: outcome(0.4, 0.6)}}, "independent")
    found = json.loads(json.dumps(as_json(one), allow_nan=False))
    assert found["independent"]["average"]["end"] == {"mean": 0.5, "half": None}
    assert found["independent"]["policies"]["p1"]["end"] == {"mean": 0.6, "half": None}
    assert found["independent"]["seeds"]["1"]["curves"]["p0"]["20"] == 0.4


def test_figure_has_a_panel_for_the_average_and_one_per_policy():
    """A PNG, wider with more policies."""
    picture = learning_curves(comparison())
    assert picture.startswith(b"\x89PNG")
    width = int.from_bytes(picture[16:20], "big")
    lone = Comparison(
        {"independent": {1: RunOutcome({"p0": {0: 0.1, 1: 0.2}, AVERAGE: {0: 0.1, 1: 0.2}}, 1, 1, 1, 1, 1, 1)}},
        "independent",
    )
    assert width == pytest.approx(int.from_bytes(learning_curves(lone)[16:20], "big") * 1.5, rel=0.02)


@pytest.mark.parametrize("num_seeds", [1, 2, 4, 5])
def test_figure_shows_seeds_as_lines_and_from_five_on_a_band(num_seeds):
    """Four thin lines say more than a band that is wider than the picture."""
    curves = {"p0": {0: 0.1, 1: 0.2}, AVERAGE: {0: 0.1, 1: 0.2}}
    found = {
        regime: {seed: RunOutcome(curves, 1, 1, 1, 1, 1, 1) for seed in range(num_seeds)}
        for regime in ("independent", "sgt")
    }
    figure = drawn(Comparison(found, "independent"))
    lines = [len(axes.lines) for axes in figure.axes]
    bands = [len(axes.collections) for axes in figure.axes]
    assert (set(lines), set(bands)) == ({2 + 2 * num_seeds * (1 < num_seeds < 5)}, {2 * (num_seeds >= 5)})


def test_a_figure_says_how_many_seeds_each_line_stands_on():
    """Where they differ; one number would claim of all what holds for one."""
    curves = {"p0": {0: 0.1, 1: 0.2}, AVERAGE: {0: 0.1, 1: 0.2}}
    seeds = {"independent": 5, "sgt": 1}
    found = {name: {n: RunOutcome(curves, 1, 1, 1, 1, 1, 1) for n in range(count)} for name, count in seeds.items()}
    (note,) = [text.get_text() for text in drawn(Comparison(found, "independent")).axes[0].texts]
    assert note == "mean of seeds (independent 5, sgt 1), band: 95 % interval"
