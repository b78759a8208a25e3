"""Kept evaluations are whole, and are compared prompt by prompt, of the same prompts alone."""

import msgspec
import pytest

from mrl.errors import ConfigError
from mrl.processes.evaluation.saved_evaluations import UNION, differences, read_evaluation, save_evaluation
from mrl.records.evaluation_file import EvaluatedPolicy, EvaluationFile
from mrl.records.evaluation_messages import EvaluationResult, PromptTally
from mrl.records.version import Version

V = Version(0, 8)


def policy(*rights: int, n: int = 2, answered: dict[int, int] | None = None) -> EvaluatedPolicy:
    """So many of n answers to prompts p0, p1, ... right."""
    had = answered or {}
    prompts = [
        PromptTally(prompt_id=f"p{place}", answered=had.get(place, n), right=right)
        for place, right in enumerate(rights)
    ]
    result = EvaluationResult(
        policy="a", version=V, step=8, accuracy=0.0, per_task={}, answers=[], oldest=V, newest=V, own_token_share=1.0,
        missing=0, seconds=1.0, samples=n, prompts=prompts,
    )  # fmt: skip
    sampled = {"engine": "embedded", "dtype": "float32", "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 8}
    return EvaluatedPolicy(subject="r", model="m", **sampled, result=result)


def evaluation(prompts: int = 4, **policies: EvaluatedPolicy) -> EvaluationFile:
    return EvaluationFile(
        made_unix_s=1.0, packages={}, seed=1, samples=2, k=[1, 2], success_reward=1.0, pool_seed=17,
        tasks={"add": {"source": "words", "dataset": "add"}}, prompt_ids=[f"p{place}" for place in range(prompts)],
        policies=policies,
    )  # fmt: skip


@pytest.fixture
def kept(tmp_path):
    """Two evaluations as files."""

    def put(first: EvaluationFile, second: EvaluationFile):
        return save_evaluation(first, tmp_path / "a.json"), save_evaluation(second, tmp_path / "b.json")

    return put


def test_a_folder_gets_a_new_file_that_reads_as_it_was(tmp_path):
    made = evaluation(**{"a@8": policy(1, 2, 0, 0)})

    place = save_evaluation(made, tmp_path / "evals")

    assert place.parent == tmp_path / "evals"
    assert place.name.startswith("a@8-")
    assert [one.name for one in place.parent.iterdir()] == [place.name], "nothing half-written beside it"
    assert read_evaluation(place) == made


def test_differences_are_of_the_same_prompts_with_their_interval(kept):
    """Two of four prompts went from one right answer of two to two: pass@1 by 0.25, pass@2 by nothing."""
    files = kept(evaluation(**{"a@0": policy(1, 1, 0, 2)}), evaluation(**{"a@8": policy(2, 2, 0, 2)}))

    found = {one.k: one for one in differences(*files)}

    assert found[1].policies == "a@0 -> a@8"
    assert (found[1].before, found[1].after, found[1].difference.mean) == (0.5, 0.75, 0.25)
    assert found[1].difference.low <= 0.25 <= found[1].difference.high
    assert found[1].difference.low >= 0.0, "no prompt became worse: an unpaired interval would reach below 0"
    assert found[2].difference.mean == 0.0


def test_a_prompt_without_enough_answers_in_one_of_them_is_in_no_difference(kept):
    files = kept(
        evaluation(a=policy(0, 1, 0, 0)),
        evaluation(a=policy(2, 0, 0, 0, answered={1: 1})),
    )
    found = {one.k: one for one in differences(*files)}
    assert (found[1].difference.prompts, found[2].difference.prompts) == (4, 3)
    assert found[2].difference.mean == pytest.approx(1 / 3)


def test_several_policies_are_matched_by_their_names_and_their_union_is_compared(kept):
    """The union of the first is one prompt, of the second two of four."""
    files = kept(
        evaluation(**{"a@0": policy(2, 0, 0, 0), "b@0": policy(2, 0, 0, 0)}),
        evaluation(**{"b@8": policy(2, 0, 0, 0), "a@8": policy(0, 2, 0, 0)}),
    )
    found = {(one.policies, one.k): one.difference.mean for one in differences(*files)}
    assert found[UNION, 2] == 0.25
    assert found["a@0 -> a@8", 2] == 0.0
    assert found["b@0 -> b@8", 1] == 0.0


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"tasks": {"add": {"source": "words", "dataset": "sub"}}}, "different tasks; got 'add'"),
        ({"prompt_ids": ["p0", "p1", "p2", "q"]}, "different prompts; got '4 and 4, 3 of them in both'"),
        ({"success_reward": 0.5}, "different values of run.success_reward.*'1 and 0.5'"),
        (
            {"policies": {"b": policy(0, 0, 0, 0), "c": policy(0, 0, 0, 0)}},
            "the files have no policy in common; got 'a@8; and b, c'",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_line(kept, changes, shown):
    one = evaluation(**{"a@8": policy(1, 1, 1, 1)})
    files = kept(one, msgspec.structs.replace(one, **changes))
    with pytest.raises(ConfigError, match=shown):
        differences(*files)
