import re

import pytest

from mrl.errors import TaskError
from mrl.tasks.operations import OPERATIONS
from mrl.tasks.words import TEMPLATES, WordSource


@pytest.mark.parametrize("dataset", sorted(TEMPLATES))
def test_the_example_in_the_prompt_is_right(dataset):
    """The template's own example (sun -> ...) is what the operation does."""
    shown = re.search(r"sun -> (\w+)\)", TEMPLATES[dataset])
    assert shown
    assert OPERATIONS[dataset]("sun", "") == shown[1]


@pytest.mark.parametrize(
    ("operation", "letter", "result"),
    [("reverse", "", "sseL"), ("capital", "", "LESS"), ("trim", "", "ess"), ("swap", "", "eLss"), ("count", "", "1"),
     ("rotate", "", "essL"), ("double", "", "LLess"), ("front", "", "sLes"), ("count", "s", "2")],
)  # fmt: skip
def test_operations_on_one_word(operation, letter, result):
    """Every operation, on a word whose letters repeat."""
    assert OPERATIONS[operation]("Less", letter) == result


def test_score_accepts_exactly_the_right_text():
    """Right up to surrounding blanks, and nothing else: case counts."""
    source = WordSource("capital", {}, seed=1, where="")
    item = next(source.items(1))
    assert source.score(item, f" {item.subject.upper()}\n") == 1.0
    assert source.score(item, item.subject.lower()) == 0.0


def test_words_have_the_lengths_asked_for():
    """Lengths lie within the options, and both ends occur."""
    source = WordSource("trim", {"min_letters": 2, "max_letters": 5}, seed=1, where="")
    assert {len(item.subject) for item in source.items(100)} == {2, 3, 4, 5}


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [("swop", {}, "does not exist; got 'swop'; .*did you mean 'swap'"),
     ("swap", {"min_leters": 2}, "no such option; got 'min_leters'; .*did you mean 'min_letters'"),
     ("swap", {"min_letters": 9}, "invalid lengths of words"),
     ("swap", {"min_letters": "3"}, "invalid lengths of words")],
)  # fmt: skip
def test_wrong_tables_are_refused(dataset, options, message):
    """Unknown names come with the nearest one; impossible lengths are said as such."""
    with pytest.raises(TaskError, match=message):
        WordSource(dataset, options, seed=1, where="tasks.t")
