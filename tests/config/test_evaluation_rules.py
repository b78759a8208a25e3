"""Rules on evaluation that span several keys."""

import pytest

from mrl.config.load import validate
from mrl.config.rules.evaluation_rules import greedy_note
from mrl.config.rules.run_rules import check_rules
from mrl.errors import ConfigError
from mrl.processes.engines import held_out_decoding
from mrl.tasks.held_out import measure_of

TABLES = {
    "run": {"name": "r", "steps": 9},
    "tasks": {"reverse": {"source": "words", "dataset": "reverse"}},
    "policies": {"a": {"model": "m", "rollout": {"temperature": 0.7}}},
    "sharing": {"regime": "independent"},
}


def config(**evaluation):
    made = validate({**TABLES, "evaluation": evaluation}, where="test")
    check_rules(made, where="test")
    return made


@pytest.mark.parametrize(("samples", "k"), [(1, [1]), (8, [1, 8]), (8, [4])])
def test_k_may_be_as_large_as_there_are_answers(samples, k):
    measure = measure_of(config(samples=samples, k=k))
    assert (measure.samples, measure.ks) == (samples, tuple(k))


@pytest.mark.parametrize("samples", [1, 7])
def test_more_drawn_than_there_are_is_refused(samples):
    told = rf"evaluation\.k: .*k = 8 with {samples} answers?'; wanted k from 1 to {samples}"
    with pytest.raises(ConfigError, match=told):
        config(samples=samples, k=[1, 8])


def test_without_keys_of_its_own_an_evaluation_samples_as_the_policy_does():
    assert held_out_decoding(config(), "a") is None
    assert held_out_decoding(config(temperature=0.7), "a") is None


def test_keys_that_are_left_out_are_those_of_the_policy():
    wide, greedy = held_out_decoding(config(top_p=0.9), "a"), held_out_decoding(config(temperature=0.0), "a")
    assert (wide.temperature, wide.top_p) == (0.7, 0.9)
    assert (greedy.temperature, greedy.top_p) == (0.0, 1.0)


def test_several_greedy_answers_are_seldom_meant():
    assert "same answer 4 times" in greedy_note(0.0, 4)
    assert not greedy_note(0.0, 1)
    assert not greedy_note(None, 4)
    assert not greedy_note(0.7, 4)
