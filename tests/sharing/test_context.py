from mrl.config.schema import RunConfig
from mrl.objectives.specs import Clipped
from mrl.sharing.context import sharing_context


def test_setting_of_a_policy(receiver):
    """Its own objective and limits, who learns beside it, and who else is there."""
    policies = {
        "b": {
            "rollout": {"max_new_tokens": 7},
            "objective": {"method": "gspo"},
            "learner": {"max_staleness_versions": 3},
        },
        "c": {},
        "a": {"frozen": True},
    }
    task = {"t": {"source": "words", "dataset": "reverse"}}
    config = RunConfig.model_validate({"run": {"name": "r", "steps": 1}, "tasks": task, "policies": policies})
    context = sharing_context(config, "b", receiver)
    assert (context.policy, context.peers, context.others) == ("b", ("c",), ("a", "c"))
    assert (context.objective.max_answer_tokens, context.objective.max_turn_tokens) == (7, 7)
    assert context.max_staleness_versions == 3
    assert isinstance(context.objective.term, Clipped)
    assert context.objective.term.ratio == "sequence"
    assert context.receiver is receiver


def test_answers_of_one_turn_beside_episodes_have_the_limit_of_a_turn(receiver):
    """An episode may be as long as all its turns."""
    tasks = {"t": {"source": "words", "dataset": "reverse"}, "g": {"source": "environment", "dataset": "lookup"}}
    policies = {"b": {"rollout": {"max_new_tokens": 7}}}
    given = {"run": {"name": "r", "steps": 1}, "tasks": tasks, "policies": policies}
    config = RunConfig.model_validate(given)
    objective = sharing_context(config, "b", receiver).objective
    assert objective.limit(is_episode=False) == 7
    assert objective.limit(is_episode=True) == 7 * config.tasks["g"].max_turns > 7
