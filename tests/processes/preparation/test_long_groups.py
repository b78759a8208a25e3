"""Groups that no record has room for are told of before the run."""

import pytest

from mrl.processes.preparation.learning_values import warnings
from tests.support.word_runs import word_run


def told(regime: str, *, group_size: int, max_new_tokens: int, **parameters: object) -> list[str]:
    rollout = {"group_size": group_size, "max_new_tokens": max_new_tokens}
    config = word_run({"a": {"rollout": rollout}, "b": {}}, sharing={"regime": regime, regime: parameters})
    return [line for line in warnings(config, {}) if "record" in line]


def test_a_group_longer_than_a_record_is_told_of() -> None:
    """17 bytes a token, of which 8 MiB are full."""
    assert told("prp", group_size=16, max_new_tokens=32_768) == [
        "policies.a.rollout: 16 answers of more than 30,840 tokens on average exceed the limit of 8 MiB for a record,"
        " and peers do not receive such a group: set max_new_tokens = 30840, or use a smaller group_size"
    ]


def test_units_of_every_token_fill_a_record_sooner() -> None:
    """8 bytes each, beside the score of the token."""
    (line,) = told("copd", group_size=16, max_new_tokens=8192, top_units=8)
    assert "more than 6,472 tokens" in line
    assert line.endswith(
        "no scores of such a group arrive: set max_new_tokens = 6472, or use a smaller group_size or top_units"
    )
    assert told("copd", group_size=16, max_new_tokens=6472, top_units=8) == []
    assert told("copd", group_size=16, max_new_tokens=32_768, top_units=0) == []


@pytest.mark.parametrize(("regime", "group_size"), [("prp", 8), ("sgt", 16), ("xgrpo", 16), ("independent", 16)])
def test_what_has_room_or_is_not_shared_whole_is_not(regime: str, group_size: int) -> None:
    """Single successes and rewards are short."""
    assert told(regime, group_size=group_size, max_new_tokens=32_768) == []
