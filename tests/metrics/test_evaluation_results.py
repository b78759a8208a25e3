"""What is told of an evaluation: with one answer to each prompt as ever, with several more beside it."""

import msgspec

from mrl.metrics.evaluation_results import emit_evaluation
from mrl.metrics.telemetry import Telemetry
from mrl.records.evaluation_messages import Estimate, EvaluationResult, TaskAccuracy
from mrl.records.version import Version

V = Version(0, 40)
PLAIN = EvaluationResult(
    policy="a", version=V, step=40, accuracy=0.25, per_task={"add": TaskAccuracy(accuracy=0.25, prompts=4)}, answers=[],
    oldest=V, newest=V, own_token_share=1.0, missing=0, seconds=2.0,
)  # fmt: skip


def told(result: EvaluationResult, folder) -> dict[str, float]:
    sent = []
    emit_evaluation(result, folder, Telemetry("learner/a", "a", sent.append))
    assert msgspec.json.decode((folder / "a-40.json").read_bytes(), type=EvaluationResult) == result
    return sent[0].values


def test_one_answer_to_each_prompt_has_the_metrics_that_it_always_had(tmp_path):
    assert told(PLAIN, tmp_path) == {
        "eval/accuracy": 0.25, "eval/accuracy/add": 0.25, "eval/own_token_share": 1.0, "eval/missing_answers": 0.0,
        "eval/time_s": 2.0,
    }  # fmt: skip


def test_several_answers_have_the_means_of_their_estimates_too(tmp_path):
    half = Estimate(mean=0.5, low=0.4, high=0.6, prompts=4)
    result = msgspec.structs.replace(PLAIN, samples=8, estimates={"pass@8": half, "maj@8": half}, tied_majorities=2)

    found = told(result, tmp_path)

    assert {name: found[name] for name in found.keys() - told(PLAIN, tmp_path).keys()} == {
        "eval/pass@8": 0.5, "eval/maj@8": 0.5, "eval/tied_majorities": 2.0
    }  # fmt: skip
