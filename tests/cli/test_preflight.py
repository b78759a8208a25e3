"""What is refused before anything is started."""

import pytest

from mrl.cli.preflight import check_frozen
from mrl.config.load import validate
from mrl.errors import ConfigError


def test_a_frozen_policy_that_nobody_asks_is_refused() -> None:
    """It would only take memory; one that scores is fine, and so are policies that learn and score."""
    tables = {
        "run": {"name": "r", "steps": 3},
        "tasks": {"trim": {"source": "words", "dataset": "trim"}},
        "policies": {"a": {"model": "m"}, "teacher": {"model": "m", "frozen": True}},
    }
    config = validate(tables, where="test")

    with pytest.raises(ConfigError, match=r"policies\.teacher\.frozen: the sharing regime has no use for it"):
        check_frozen(config, frozenset(), where="test")
    check_frozen(config, {"teacher"}, where="test")
    check_frozen(config, {"teacher", "a"}, where="test")
