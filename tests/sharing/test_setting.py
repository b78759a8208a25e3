from mrl.config.schema import RunConfig
from mrl.objectives.specs import Clipped
from mrl.sharing.setting import policy_setting


def test_setting_of_a_policy(receiver):
    """Its own objective and limits, who learns beside it, and who else is there."""
    policies = {
        "b": {"rollout": {"max_new_tokens": 7}, "objective": {"method": "gspo"}},
        "c": {},
        "a": {"frozen": True},
    }
    task = {"t": {"source": "words", "dataset": "reverse"}}
    config = RunConfig.model_validate({"run": {"name": "r", "steps": 1}, "tasks": task, "policies": policies})
    setting = policy_setting(config, "b", receiver)
    assert (setting.policy, setting.peers, setting.others) == ("b", ("c",), ("a", "c"))
    assert setting.objective.max_answer_tokens == 7
    assert isinstance(setting.objective.term, Clipped)
    assert setting.objective.term.ratio == "sequence"
    assert setting.receiver is receiver
