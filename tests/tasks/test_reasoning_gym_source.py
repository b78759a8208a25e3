import math
import os
import subprocess
import sys
import textwrap

import pytest

from mrl.errors import MissingError, TaskError
from mrl.processes.planning.plan import environment
from mrl.tasks.reasoning_gym_source import ReasoningGymSource
from tests.support.data_sets import FOLLOW_SETS


def test_unknown_data_set_names_near_ones():
    """A misspelt data set is refused with the names that come near."""
    with pytest.raises(
        TaskError, match=r"tasks\.t: .*no such data set; got 'spell_backwards'; .*did you mean spell_backward"
    ):
        ReasoningGymSource("spell_backwards", {}, seed=1, where="tasks.t")


@pytest.mark.parametrize("options", [{"min_word_len": 9, "max_word_len": 3}, {"no_such_option": 1}])
def test_refused_options_are_a_task_error(options):
    """What the data set's own config refuses becomes one line that names the data set."""
    with pytest.raises(TaskError, match="'spell_backward' does not accept its options"):
        ReasoningGymSource("spell_backward", options, seed=1, where="tasks.t")


PART = {"name": "n_queens", "weight": 2, "config": {"n": 4, "min_remove": 1, "max_remove": 2}}
CHAIN = {"name": "chain_sum"}


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ([], r"tasks\.t\.options\.datasets: the composite data set has no list of parts; wanted a list such as"),
        (
            [CHAIN, {"name": "n_queen"}],
            r"tasks\.t\.options\.datasets\[1\]: .*no such data set; got 'n_queen'; cure: did you mean n_queens",
        ),
        (
            [PART | {"config": {"n": 99}}],
            r"tasks\.t\.options\.datasets\[0\]: data set 'n_queens' does not accept its options",
        ),
        (
            [CHAIN, {"nam": "n_queens"}],
            r"tasks\.t\.options\.datasets\[1\]: not a valid part of a composite data set; got \{'nam'",
        ),
        (
            [CHAIN | {"weight": 0}],
            r"tasks\.t\.options\.datasets\[0\]\.weight: not a valid weight; got 0; wanted a finite number > 0",
        ),
        ([CHAIN | {"weight": True}], r"tasks\.t\.options\.datasets\[0\]\.weight: not a valid weight; got True"),
        ([CHAIN | {"weight": math.inf}], r"tasks\.t\.options\.datasets\[0\]\.weight: not a valid weight; got inf"),
        (
            [CHAIN | {"nam": 1}],
            r"tasks\.t\.options\.datasets\[0\]: not a valid part of a composite data set; got .*; wanted a table",
        ),
        (
            [{"name": ""}],
            r"tasks\.t\.options\.datasets\[0\]: not a valid part of a composite data set; got \{'name': ''\}",
        ),
        (
            [CHAIN, {"name": "composite", "config": {"datasets": [CHAIN]}}],
            r"tasks\.t\.options\.datasets\[1\]: composite data sets cannot be nested; got",
        ),
        ([CHAIN | {"config": 3}], r"tasks\.t\.options\.datasets\[0\]: config is not a table; got"),
        ([CHAIN, CHAIN], r"tasks\.t: data set 'composite' does not accept its options \(Duplicate dataset names"),
    ],
)
def test_a_mistake_in_a_part_of_a_composite_names_the_part(parts, line):
    """One line, with the key."""
    with pytest.raises(TaskError, match=f"^{line}"):
        ReasoningGymSource("composite", {"datasets": parts}, seed=1, where="tasks.t")


def test_a_composite_is_sealed_where_a_part_is():
    """Its entries are those of its parts."""
    mixed, sums = (ReasoningGymSource("composite", {"datasets": parts}, seed=1, where="")
                   for parts in ([PART, CHAIN], [CHAIN]))  # fmt: skip
    assert (mixed.evaluates, sums.evaluates) == (True, False)
    assert {mixed._dataset[number]["metadata"]["source_dataset"] for number in range(20)} == {"n_queens", "chain_sum"}


def test_missing_package_names_the_pip_command(monkeypatch):
    """Without reasoning-gym the cure is the command that installs it."""
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingError, match=r"not installed; cure: pip install 'mrl\[tasks\]'"):
        ReasoningGymSource("spell_backward", {}, seed=1, where="tasks.t")


def test_same_seed_gives_the_same_entries():
    """Entry i depends on seed and i alone."""
    one, other = (ReasoningGymSource("letter_counting", {"max_words": 5}, seed=3, where="") for _ in range(2))
    assert list(one.items(20)) == list(other.items(20))
    assert list(one.items(20)) != list(
        ReasoningGymSource("letter_counting", {"max_words": 5}, seed=4, where="").items(20)
    )


def test_a_data_set_that_is_another_one_each_time_is_refused():
    """Its entries do not follow from the seed; every process of a run would have prompts of its own."""
    with pytest.raises(
        TaskError, match=r"tasks\.t: the data set is not reproducible: entry \d differs .*cure: use another"
    ):
        ReasoningGymSource("list_functions", {}, seed=1, where="tasks.t")


@pytest.mark.thorough
@pytest.mark.parametrize("name", FOLLOW_SETS)
def test_processes_of_a_run_make_the_same_entries(name):
    """Also of data sets that follow the order of sets, which differs from process to process by itself."""
    script = f"""
        from mrl.tasks.reasoning_gym_source import ReasoningGymSource
        source = ReasoningGymSource({name!r}, {{"size": 20_000}}, seed=1, where="")
        print([(item.text, item.reference) for item in source.items(4)])
    """
    found = {
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            env=os.environ | environment(1),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    }
    assert len(found) == 1


def test_subjects_are_the_words_of_the_prompt():
    """Word and letter are taken from the entry for data sets about one word, and empty for the others."""
    counting = ReasoningGymSource("letter_counting", {"min_words": 1, "max_words": 1}, seed=3, where="")
    for item in counting.items(20):
        assert f'letter "{item.letter}" appear in the text: "{item.subject}"?' in item.text
        assert counting.score(item, str(item.subject.count(item.letter))) == 1.0
    sums = ReasoningGymSource("chain_sum", {}, seed=3, where="")
    assert {(item.subject, item.letter) for item in sums.items(5)} == {("", "")}
