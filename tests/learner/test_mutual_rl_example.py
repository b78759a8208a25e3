"""`examples/mutual_rl.py`: it learns, and its advantages, loss and update are those of mrl's own code, piece by piece.

`tests/system/test_mutual_rl_run.py` holds its whole step to a run.
"""

import ast
import sys

import numpy as np
import pytest
import torch

from mrl.objectives.specs import Clipped, Imitation
from mrl.objectives.terms import TERMS, TermInputs
from mrl.sharing.advantages import group_advantages
from tests.support.one_file_example import FILE, load_example

TOLERANCE = 1e-5


@pytest.fixture
def lecture():
    """The example as a module."""
    return load_example()


@pytest.fixture
def step(lecture):
    """(policy, rows, number of prompts) of one step in which one policy is rescued by the other."""
    policy, peer = (
        lecture.small_policy("letters", lecture.CHARACTERS, 1),
        lecture.small_policy("pairs", lecture.PAIRS, 2),
    )
    words, rng = ["abc", "bad", "fed", "ace"], np.random.default_rng(0)
    groups = {word: policy.sample(word, rng.random((4, lecture.MAX_NEW_TOKENS))) for word in words}
    groups["abc"][0].reward = groups["bad"][1].reward = 1.0
    helped = [lecture.Answer([], [], "FED", 1.0), lecture.Answer([], [], "FE", 0.0)]
    rows = lecture.rows_of(policy, groups, {"fed": helped, "abc": helped, "ace": helped[1:]}, seed=0)
    assert len(peer.vocabulary) != len(policy.vocabulary)
    return policy, rows, len(words)


def test_it_is_one_short_file_of_torch_and_numpy():
    """At most 300 lines; nothing else is imported but the standard library."""
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    nodes = list(ast.walk(ast.parse(text)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) == {"numpy", "torch"}


def test_rescues_are_where_all_own_answers_failed_and_a_peer_succeeded(lecture, step):
    """By text: the row has own tokens, closed by the own end."""
    policy, rows, _ = step
    (rescued,) = [row for row in rows if row.is_rescue]
    assert policy.vocabulary.decode(rescued.prompt) == "fed="
    assert policy.vocabulary.decode(rescued.answer) == "FED"
    assert rescued.answer[-1] == policy.vocabulary.end


@pytest.mark.parametrize("rewards", [[0, 1, 0, 0], [1, 1, 1, 1], [0.0, 0.5, 1.0, 1.0]])
def test_advantages_are_those_of_mrl(lecture, rewards):
    """To the bit."""
    assert np.array_equal(lecture.advantages(rewards), group_advantages(rewards))


def mrl_loss(policy, rows, num_prompts, weight):
    """GRPO over rows plus SGT over prompts, by mrl's terms."""
    told = policy.logprobs(rows)
    sums = {False: torch.zeros(()), True: torch.zeros(())}
    for row, logprobs_T in zip(rows, told, strict=True):
        behaviour_T = torch.tensor(row.behaviour or logprobs_T.tolist())
        inputs = TermInputs(
            logprobs_T=logprobs_T,
            proximal_T=behaviour_T,
            behaviour_T=behaviour_T,
            advantages_T=torch.full_like(logprobs_T, row.advantage),
            row_T=torch.zeros(len(logprobs_T), dtype=torch.int64),
            teacher_T=torch.full_like(logprobs_T, torch.nan),
        )
        term = Imitation() if row.is_rescue else Clipped()
        sums[row.is_rescue] = sums[row.is_rescue] + TERMS[type(term)](term, inputs).mean()
    return sums[False] / sum(not row.is_rescue for row in rows) + weight * sums[True] / num_prompts


def test_losses_and_parameters_of_the_first_steps_are_those_of_mrl_s_terms(lecture, step):
    """The same rows through both, three updates long, from one start: clipped ratios come from the second on."""
    policy, rows, num_prompts = step
    twin = lecture.small_policy("letters", lecture.CHARACTERS, 1)
    for _ in range(3):
        own = lecture.loss_of(policy, rows, num_prompts)
        other = mrl_loss(twin, rows, num_prompts, lecture.RESCUE_WEIGHT)
        assert own.item() == pytest.approx(other.item(), abs=TOLERANCE)
        policy.update(own)
        twin.update(other)
        for one, two in zip(policy.network.parameters(), twin.network.parameters(), strict=True):
            assert torch.allclose(one, two, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_alone_they_stay_behind(lecture):
    """As its first page says of this seed: by the sum of both, since 48 words tell little of one."""
    together, alone = lecture.main(60, False, 1), lecture.main(60, True, 1)
    assert together["letters"][1] > together["letters"][0] + 0.2
    assert sum(after for _, after in together.values()) > sum(after for _, after in alone.values())
