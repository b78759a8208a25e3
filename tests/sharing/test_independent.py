import numpy as np
import pytest


def test_independent_shares_nothing(build, make_group, make_success):
    """It publishes nothing, asks for nothing, keeps nothing, and does not look at what it receives."""
    regime = build("independent")
    failed = make_group([0, 0])
    assert regime.asks(failed) == regime.awaited() == regime.publish(make_group([1, 1]), None) == []
    regime.hear([make_success()], step=3)
    absorbed = regime.absorb([failed], step=3, rng=np.random.default_rng(0))
    assert absorbed.examples == []
    assert absorbed.forget == absorbed.rescued == ()
    assert absorbed.denominators == {"policy_gradient": 2.0}
    assert absorbed.expansion == 1.0
    assert regime.state() == {}
    assert regime.asking is regime.patience is None
    assert regime.is_settled(failed)
    regime.restore({})


@pytest.mark.parametrize(
    ("objective", "denominator"),
    [({}, 6), ({"method": "dapo"}, 14), ({"method": "dr_grpo"}, 6 * 64)],
)
def test_denominator_counts_left_out_rows(build, make_context, make_group, step_of, objective, denominator):
    """A uniform group adds nothing to the sum and all its rows, tokens or token limits to the count."""
    absorbed = step_of(build("independent", make_context(**objective)), [make_group([1, 0, 0]), make_group([1] * 3)])
    assert absorbed.denominators == {"policy_gradient": denominator}
    assert len(absorbed.examples) == 3


def test_denominator_is_never_zero(build, step_of):
    """A batch without groups divides by one."""
    assert step_of(build("independent"), []).denominators == {"policy_gradient": 1.0}


@pytest.mark.parametrize("method", ["grpo", "dapo", "gspo", "cispo", "dppo", "dr_grpo"])
def test_gradient_on_policy_is_the_mean_score_times_advantage(
    build, make_context, make, lab, receiver, step_of, method
):
    """At the parameters that sampled, every method moves along advantage times score, however it clips."""
    model = lab.model()
    group = make.sampled(receiver, [1, 0, 0], logprobs=model.sampler_logprobs)
    regime = build("independent", make_context(method=method))
    absorbed = step_of(regime, [group])
    weight = 1 / absorbed.denominators["policy_gradient"]

    def slow(model):
        total = 0.0
        for row in absorbed.examples:
            log_pi = model.logprobs(row.prompt_token_ids, row.answer_token_ids)
            scale = 1 / len(log_pi) if method in ("grpo", "gspo") else 1.0
            total = total - weight * scale * float(row.advantages[0]) * log_pi.sum()
        return total

    lab.assert_same(lab.gradient(absorbed, regime, model), lab.score_of(model, slow))
