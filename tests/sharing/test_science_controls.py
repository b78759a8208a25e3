"""The controls of the science programme: each is its regime but for one thing."""

import numpy as np
import pytest
from science_controls import FAILED_GROUPS, MIXED_GROUPS, OWN_MEANS, OWN_ROWS, OWN_SUCCESSES

from mrl.config.load import load_config
from mrl.sharing.hacpo import CROSS, HacpoParameters
from mrl.sharing.regimes import check_sharing
from mrl.sharing.sgt import SgtParameters
from mrl.sharing.xgrpo import XgrpoParameters
from tests.support.pages import ROOT


def test_rescues_are_own_successes_in_the_same_number(make_context, make_sgt, make_group, make_success, step_of):
    """Own rows, denominators and counts are those of SGT; of a peer no row is left."""
    groups = [make_group([0, 0], "failed"), make_group([0, 1, 1], "other"), make_group([0, 0], "failed too")]
    received = [make_success(prompt_id="failed"), make_success(prompt_id="failed too")]
    control = OWN_SUCCESSES.build(SgtParameters(), make_context())
    sgt, found = step_of(make_sgt(), groups, received), step_of(control, groups, received)
    own, rescues = ([row for row in found.examples if (row.component == "rescue") is kind] for kind in (False, True))
    assert [row.prompt_id for row in own] == [row.prompt_id for row in sgt.examples if row.component != "rescue"]
    assert (found.denominators, found.counts, found.rescued) == (sgt.denominators, sgt.counts, ())
    assert [(row.prompt_id, row.source) for row in rescues] == [("other", "own")] * 2
    assert {tuple(row.answer_token_ids.tolist()) for row in rescues} <= {(11, 11, 12), (12, 11)}
    for row in rescues:
        assert row.weights.tolist() == [np.float32(1 / len(row.answer_token_ids))] * len(row.answer_token_ids)
        assert (row.behaviour_logprobs, row.advantages.any()) == (None, False)


def test_without_an_own_success_there_is_nothing_to_imitate(make_context, make_group, make_success, step_of):
    """A rescue is left out then."""
    control = OWN_SUCCESSES.build(SgtParameters(), make_context())
    found = step_of(control, [make_group([0, 0], "failed")], [make_success(prompt_id="failed")])
    assert not found.examples


def test_it_is_named_as_plug_ins_are():
    """With the parameters that the quickstart gives SGT, unless told otherwise."""
    name = "science_controls:OWN_SUCCESSES"
    quickstart = load_config(ROOT / "configs" / "quickstart.toml").sharing["sgt"]
    found = check_sharing({"regime": name}, "test")
    assert (found.lambda_, found.normaliser) == (quickstart["lambda"], quickstart["normaliser"])
    assert check_sharing({"regime": name, "OWN_SUCCESSES": {"lambda": 0.1}}, "test").lambda_ == 0.1


@pytest.mark.parametrize(("kind", "moved"), [(MIXED_GROUPS, "mixed"), (FAILED_GROUPS, "failed")])
def test_peers_move_groups_of_one_kind_alone(build, make, make_context, step_of, kind, moved):
    """Those have the rows of XGRPO, and the others those of GRPO, which leaves failed groups out."""
    groups = [make.group([0, 1], "mixed"), make.group([0, 0], "failed")]
    received = [make.value([1, 1, 1, 0], name) for name in ("mixed", "failed")]
    told = {}
    for name, regime in (
        ("control", kind.build(XgrpoParameters(), make_context())),
        ("xgrpo", build("xgrpo")),
        ("grpo", build("independent")),
    ):
        for row in step_of(regime, groups, received if name != "grpo" else []).examples:
            told.setdefault((name, row.prompt_id), []).append(row.advantages.tolist())
    for prompt in ("mixed", "failed"):
        like = "xgrpo" if prompt == moved else "grpo"
        assert told.get(("control", prompt)) == told.get((like, prompt))
    assert told["xgrpo", "mixed"] != told["grpo", "mixed"]
    assert ("grpo", "failed") not in told


def test_each_control_of_hacpo_leaves_out_one_half(build, make, make_context, receiver, peer, step_of):
    """OWN_MEANS has the advantages of GRPO and the rows of peers, OWN_ROWS the joint baseline and own rows alone."""
    groups = [make.sampled(receiver, rewards, name) for name, rewards in (("mixed", [0, 1]), ("failed", [0, 0]))]
    received = [make.rollout(make.sampled(peer, [1, 1], name), peer) for name in ("mixed", "failed")]
    rows = {}
    for name, regime in (
        ("hacpo", build("hacpo")),
        ("grpo", build("independent")),
        ("means", OWN_MEANS.build(HacpoParameters(), make_context())),
        ("rows", OWN_ROWS.build(HacpoParameters(), make_context())),
    ):
        found = step_of(regime, groups, received if name != "grpo" else [])
        told = [(row.prompt_id, row.advantages[0], row.component) for row in found.examples if row.advantages.any()]
        rows[name] = {True: [], False: []}
        for prompt, advantage, component in told:
            rows[name][component == CROSS].append((prompt, advantage))
    assert rows["rows"][False] == rows["hacpo"][False] != rows["grpo"][False]
    assert rows["means"][False] == rows["grpo"][False]
    assert rows["means"][True] == rows["hacpo"][True] != []
    assert rows["rows"][True] == []
    assert {prompt for prompt, _ in rows["hacpo"][False]} == {"mixed", "failed"}
