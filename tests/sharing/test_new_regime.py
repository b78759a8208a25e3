"""The regime of docs/new-regime.md, taken out of the page: it builds, shares, trains and is measured."""

import importlib.util
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mrl.config.policy_tables import LearnerTable, PolicyTable
from mrl.config.task_tables import TaskTable
from mrl.errors import ConfigError, PluginError
from mrl.learner.ranks.world import World
from mrl.learner.step_order import StepOrder
from mrl.learner.trainer import Trainer
from mrl.metrics.names import is_known
from mrl.records.codec import decode, encode
from mrl.records.experience import Received, experience_decoder
from mrl.sharing.regime import AbsorbResult, check_absorbed
from mrl.sharing.regimes import REGIMES, build_regime, check_episodes, check_objectives, check_sharing, sharing_schema

PAGE = Path(__file__).parents[2] / "docs" / "new-regime.md"
MODULE, LINE = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
REGISTER = "from imitate import ImitateParameters, ImitateRegime\nfrom mrl.sharing.regimes import RegimeKind\n"


@pytest.fixture(autouse=True)
def registered(tmp_path, monkeypatch):
    """The page's file lies on the path, and its line stands in the dict."""
    (tmp_path / "imitate.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "register_imitate.py").write_text(f"{REGISTER}LINES = {{{LINE}}}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = importlib.util.spec_from_file_location("register_imitate", tmp_path / "register_imitate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, kind in module.LINES.items():
        monkeypatch.setitem(REGIMES, name, kind)
    yield
    sys.modules.pop("imitate", None)


@pytest.fixture
def met(make, make_context, receiver, peer):
    """A synchronous step of two policies of different tokenizers: all give, then the own one hears and absorbs."""

    def met(own_rewards, peer_rewards, **parameters):
        table = {"regime": "imitate", "imitate": parameters}
        own = build_regime(table, make_context())
        other = build_regime(table, replace(make_context(peers=("own",)), policy="peer", receiver=peer))
        mine = [make.sampled(receiver, rewards, f"p{n}") for n, rewards in enumerate(own_rewards)]
        theirs = [make.sampled(peer, rewards, f"p{n}") for n, rewards in enumerate(peer_rewards)]
        given = [record for group in theirs for record in other.publish(group, make.author("peer", peer.fingerprint))]
        for group in mine:
            assert own.asks(group) == [group.prompt_id]
        own.hear([Received(decode(encode(record), experience_decoder), 0) for record in given], step=0)
        assert all(own.is_settled(group) for group in mine)
        return own, own.absorb(mine, step=0, rng=np.random.default_rng(0))

    return met


def test_it_is_as_short_as_the_page_says():
    """A regime of about 40 lines of code and docstrings, imports apart."""
    lines = [line for line in MODULE.splitlines() if line.strip() and not line.startswith(("from ", "import "))]
    assert len(lines) <= 40
    assert max(map(len, MODULE.splitlines())) <= 120


def test_it_shares_no_episodes_until_it_says_so():
    """A task of several turns is refused before a run, with the regimes that can."""
    tasks = {"game": TaskTable(source="environment", dataset="higher_lower")}
    with pytest.raises(ConfigError) as caught:
        check_episodes({"regime": "imitate"}, tasks, "a.toml")
    line = str(caught.value)
    assert line.startswith("a.toml: sharing.regime: imitate does not support tasks with an environment or agents; got ")
    assert "tasks.game.source" in line
    assert "wanted one of independent, prp, xgrpo, sgt" in line


def test_weak_groups_are_helped(met):
    """Below the share, and only by a success of a peer; own rows are those of the own objective."""
    own_rewards = [[0, 0], [1, 0], [1, 1], [0, 0]]
    peer_rewards = [[0, 1], [1, 1], [1, 1], [0, 0]]
    _, absorbed = met(own_rewards, peer_rewards)
    assert [(row.component, row.prompt_id) for row in absorbed.examples] == [
        ("policy_gradient", "p1"),
        ("policy_gradient", "p1"),
        ("imitated", "p0"),
    ]
    imitated = absorbed.examples[-1]
    assert (imitated.examined.row, imitated.source) == (1, "peer")
    assert imitated.weights.sum() == pytest.approx(1)
    assert absorbed.denominators == {"policy_gradient": 8.0, "imitated": 4.0}
    _, generous = met(own_rewards, peer_rewards, below=1.0)
    assert [row.prompt_id for row in generous.examples if row.component == "imitated"] == ["p0", "p1"]


def test_the_learner_trains_and_measures_it(met, tiny_model, receiver, record):
    """Steps of the learner's trainer raise the likelihood of the imitated answer; the recorder measures the pair."""
    regime, absorbed = met([[0, 0]], [[1, 1]], coefficient=1.0)
    trainer = Trainer(
        tiny_model(vocab_size=len(receiver.table.pieces)),
        LearnerTable(lr=1e-2),
        regime.components,
        temperature=1.0,
        seed=0,
        total_steps=5,
        world=World(0, 1, torch.device("cpu")),
    )
    order = StepOrder(absorbed.examples, absorbed.denominators, absorbed.expansion)
    losses = [trainer.train(order, step)["loss/imitated"] for step in range(5)]
    assert losses[-1] < 0.7 * losses[0]
    values = record(regime, absorbed, trainer.peer_logprobs)
    assert values["align/receiver_tokens/peer"] == absorbed.examples[-1].num_trained_tokens
    assert math.isfinite(values["align/gap_nats_per_byte/peer"])
    assert (values["align/rows/peer"], absorbed.counts["sharing/peer_rows"]) == (2, 1)
    assert all(map(is_known, values | dict(absorbed.counts)))


def test_it_is_configured_as_any_other(met):
    """Bounds, unknown keys, the schema, and the objective that would drop the groups that it helps."""
    assert "below" in sharing_schema()["properties"]["imitate"]["properties"]
    with pytest.raises(ConfigError, match=r"sharing\.imitate\.below: invalid value; got 2"):
        check_sharing({"regime": "imitate", "imitate": {"below": 2}}, "run.toml")
    with pytest.raises(ConfigError, match=r"did you mean sharing\.imitate\.below"):
        check_sharing({"regime": "imitate", "imitate": {"belw": 0.1}}, "run.toml")
    dapo = {"a": PolicyTable(objective={"method": "dapo"})}
    with pytest.raises(ConfigError, match="imitate learns from the groups that this drops"):
        check_objectives({"regime": "imitate"}, dapo, "run.toml")


def test_a_restored_one_goes_on(met, make_context):
    """Its rates survive a checkpoint."""
    regime, _ = met([[0, 0]], [[1, 1]])
    restored = build_regime({"regime": "imitate"}, make_context())
    restored.restore(json.loads(json.dumps(regime.state())))
    assert restored.state() == regime.state()


OWN = """
from functools import partial
from imitate import ImitateParameters, ImitateRegime, RolloutReader
from mrl.sharing.regimes import RegimeKind

class Few(ImitateRegime):
    def __init__(self, parameters):
        pass

class Bare(ImitateRegime):
    def __init__(self, parameters, context):
        RolloutReader.__init__(self, parameters, context)

def late(parameters, context):
    return {}[parameters.below]

class Other:
    is_settled = partial(lambda told, group: told, True)

    def __init__(self, parameters, context):
        self._other = ImitateRegime(parameters, context)
        self.publish = self._other.publish

    def __getattr__(self, name):
        return getattr(self._other, name)

    @staticmethod
    def awaited():
        return []

    @classmethod
    def asks(cls, group):
        return []

    def hear(self, *received, **step):
        pass

class Kinds(ImitateRegime):
    is_settled, awaited, asks = Other.is_settled, staticmethod(Other.awaited), Other.asks

few, bare = RegimeKind(ImitateParameters, Few), RegimeKind(ImitateParameters, Bare)
late = RegimeKind(ImitateParameters, late)
other, kinds = RegimeKind(ImitateParameters, Other), RegimeKind(ImitateParameters, Kinds)
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [("few", r"Few cannot be created \(TypeError: .*takes 2 positional .*wanted a callable with the arg"),
     ("bare", r"Bare does not return a regime; got 'Bare'; wanted an object with components"),
     ("late", r"late cannot be created \(KeyError: 0.5\); cure: check line \d+ of .*own_regimes.py$")],
)  # fmt: skip
def test_a_regime_that_cannot_be_built_is_told_in_a_line(tmp_path, make_context, name, told):
    """Of a module of one's own, whose constructor may raise anything."""
    (tmp_path / "own_regimes.py").write_text(OWN, encoding="utf-8")
    try:
        with pytest.raises(PluginError, match=f"sharing.regime: {told}"):
            build_regime({"regime": f"own_regimes:{name}"}, make_context())
    finally:
        sys.modules.pop("own_regimes", None)


@pytest.mark.parametrize("name", ["other", "kinds"])
def test_a_regime_may_have_its_parts_from_anywhere(tmp_path, make_context, name):
    """What can be called as a learner does is enough: of another object, of no object, or of any arguments."""
    (tmp_path / "own_regimes.py").write_text(OWN, encoding="utf-8")
    try:
        assert build_regime({"regime": f"own_regimes:{name}"}, make_context()).awaited() == []
    finally:
        sys.modules.pop("own_regimes", None)


def test_what_is_no_batch_is_refused(make, make_context, receiver):
    """Before a learner trains on it: None, another component's name, a denominator that is 0 or not there."""
    regime = build_regime({"regime": "imitate"}, make_context())
    groups = [make.sampled(receiver, [1.0, 0.0], "p0")]
    good = regime.absorb(groups, step=0, rng=np.random.default_rng(0))
    check_absorbed(good, regime.components)

    other, zero = dict(good.denominators, other=1.0), dict(good.denominators, imitated=0.0)
    strange = AbsorbResult([replace(good.examples[0], component="imitate")], good.denominators)
    few = "wanted denominators above 0, one for each component: imitated, policy_gradient"
    wrong = [
        (None, "got None; wanted .*Absorbed"),
        (strange, "got 'a row of the component imitate'; wanted rows of the components imitated, policy_gradient"),
    ]
    wrong += [(AbsorbResult(good.examples, other), few), (AbsorbResult(good.examples, zero), few)]
    for absorbed, told in wrong:
        with pytest.raises(PluginError, match=told):
            check_absorbed(absorbed, regime.components)
