"""Training on own groups again is refused where their credit, or rewards, came of peers that are heard once."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mrl.config.rules.run_rules import check_rules
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError
from mrl.processes.preparation.learning_values import check_learning
from mrl.sharing.regimes import REGIMES
from tests.support.word_runs import word_run

PAGE = (Path(__file__).parents[3] / "docs" / "learner.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Own groups again\n")[1].split("\n## ")[0]


def config_with(learner: dict[str, Any], **tables: Any) -> RunConfig:
    """Two policies, of which the second learns as `learner` says."""
    return word_run({"a": {}, "b": {"learner": learner}}, **{"sharing": {"regime": "independent"}, **tables})


@pytest.mark.parametrize("regime", sorted(set(REGIMES) - {"prefix"}))
def test_regimes_whose_rows_need_peers_refuse_it(regime):
    """One line says which do not; without reuse all pass. `prefix` has no task here."""
    tables = {"sharing": {"regime": regime}}
    check_learning(config_with({}, **tables), where="test")
    config = config_with({"reuse_share": 0.5}, **tables)
    if regime in ("independent", "sgt"):
        return check_learning(config, where="test")
    with pytest.raises(ConfigError) as caught:
        check_learning(config, where="test")
    assert str(caught.value) == (
        f"test: policies.b.learner.reuse_share: {regime} uses peer records only once, so own groups cannot be "
        "trained on again; got 0.5; wanted 0, or sharing.regime one of independent, sgt"
    )


def test_voted_rewards_are_not_reused():
    """Without the peers' votes another answer could be elected."""
    config = config_with(
        {"reuse_share": 0.5}, tasks={"trim": {"source": "words", "dataset": "trim", "verifier": "collective"}}
    )
    with pytest.raises(
        ConfigError, match=r"b\.learner\.reuse_share: peers vote only once on the answers of tasks\.trim"
    ):
        check_learning(config, where="test")


def test_the_page_s_keys_pass():
    """As they stand there, in a run of one's own."""
    [toml] = re.findall(r"```toml\n(.*?)```", SECTION, re.DOTALL)
    learner = tomllib.loads(toml)["policies"]["qwen"]["learner"]
    config = config_with(learner)
    check_rules(config, where="test")
    check_learning(config, where="test")
    assert config.policies["b"].learner.reused_groups == 16
