import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from mrl.config.task_tables import PoolTable, TaskTable
from mrl.errors import MissingError, TaskError
from mrl.tasks.math_source import PROMPT, MathSource
from mrl.tasks.pool import build_pool
from tests.support.math_problems import PROBLEMS

ROWS = [{"problem": problem, "solution": rf"We find \boxed{{{reference}}}."} for problem, reference, _, _ in PROBLEMS]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes rows as a JSONL file."""

    def write(rows: list[object], name: str = "train.jsonl") -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return write


def open_math(path: str, **options: object) -> MathSource:
    return MathSource(path, options, seed=3, where="tasks.m", get="fetch it so")


def test_problems_become_prompts_with_their_boxed_answers(write):
    """The prompt asks for a box, and the reference is the content of the solution's box."""
    items = list(open_math(write(ROWS)).items(0))
    assert {(item.text, item.reference) for item in items} == {
        (PROMPT.replace("{problem}", problem), reference) for problem, reference, _, _ in PROBLEMS
    }


@pytest.mark.parametrize(
    ("row", "reference"),
    [({"problem": "p", "answer": "5"}, "5"), ({"question": "p", "answer": "2 + 3\n#### 5"}, "5"),
     ({"problem": "p", "answer": 5}, "5"), ({"problem": "p", "answer": "", "solution": r"\boxed{5}"}, "5"),
     ({"problem": "p", "answer": r"so \boxed{5}", "solution": r"\boxed{6}"}, "5")],
)  # fmt: skip
def test_forms_of_known_files(row, reference, write):
    """MATH, MATH-500 and GSM8K need no options."""
    assert [item.reference for item in open_math(write([row])).items(0)] == [reference]


def test_keys_and_prompt_can_be_named(write):
    """Other files are read by naming their keys."""
    path = write([{"task": "1+1", "key": "2"}])
    (item,) = open_math(path, problem_keys=["task"], answer_keys=["key"], prompt="Q: {problem} A:").items(0)
    assert (item.text, item.reference) == ("Q: 1+1 A:", "2")


def test_a_second_file_is_held_out_and_repeated_problems_with_it(write):
    """All of the first file is trained on, except what stands in the second too."""
    train, test = write(ROWS[:15]), write(ROWS[12:], "test.jsonl")
    table = TaskTable(source="math", dataset=train, options={"held_out": test})
    pool = build_pool({"m": table}, PoolTable(train_prompts=0, held_out_prompts=0))
    trained = {pool.prompt_at(position).text for position in range(len(pool))}
    held_out = {prompt.text for prompt in pool.held_out}
    assert (len(trained), len(held_out)) == (12, 8)
    assert not trained & held_out


def test_without_one_part_of_the_file_is_held_out(write):
    """About 15 %, whatever the seed; nothing is left over."""
    rows = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(400)]
    table = TaskTable(source="math", dataset=write(rows))
    pools = [build_pool({"m": table}, PoolTable(train_prompts=0, held_out_prompts=0, seed=seed)) for seed in (1, 2)]
    held_out = [{prompt.text for prompt in pool.held_out} for pool in pools]
    assert held_out[0] == held_out[1]
    assert 40 <= len(held_out[0]) <= 80
    assert len(pools[0]) + len(held_out[0]) == 400


def test_a_smaller_pool_is_drawn_from_the_whole_file(write):
    """Files are often sorted by subject; 40 problems of 400 come from all over it, others for another seed."""
    rows = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(400)]
    table = TaskTable(source="math", dataset=write(rows))
    drawn = []
    for seed in (1, 2):
        pool = build_pool({"m": table}, PoolTable(train_prompts=40, held_out_prompts=5, seed=seed))
        drawn.append({int(pool.prompt_at(position).text.split()[2]) for position in range(40)})
    assert drawn[0] != drawn[1]
    assert min(drawn[0]) < 60
    assert max(drawn[0]) > 340


def test_completions_are_verified_through_the_pool(write):
    """Right, equivalent, wrong, unfinished and missing answers in one batch, judged in processes."""
    table = TaskTable(source="math", dataset=write(ROWS), verifier_processes=1)
    with closing(build_pool({"m": table}, PoolTable(train_prompts=0, held_out_prompts=0))) as pool:
        prompts = [pool.prompt_at(position) for position in range(len(pool))] + pool.held_out
        asked = next(prompt.prompt_id for prompt in prompts if prompt.text.startswith(PROBLEMS[0][0]))
        completions = [r"It is \boxed{0.25}.", r"\boxed{3}? No: \boxed{\frac14}", "The answer is 1/4.",
                       "<answer>0.250</answer>", r"\boxed{4}", r"so \boxed{0.2", "no idea"]  # fmt: skip
        verdicts = pool.submit([(asked, completion) for completion in completions]).result()
        assert [verdict.reward for verdict in verdicts] == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
        assert [verdict.extracted for verdict in verdicts][5:] == ["", ""]
        assert not any(verdict.failure for verdict in verdicts)
        assert pool.submit([(asked, r"\boxed{1/4}")]).result()[0].reward == 1.0
        counts = pool.verifier_values()
        assert counts == {"verify/pending": 0.0, "verify/answers": 6.0}


def test_boxed_only_takes_nothing_else(write):
    """The strict form of the MATH benchmark."""
    source = open_math(write(ROWS), boxed_only=True)
    assert [source.extract(text) for text in ("the answer is 5", "<answer>5</answer>", r"\boxed{5}")] == ["", "", "5"]


def test_a_missing_file_says_how_to_get_it(tmp_path):
    """The cure is the command of the configuration."""
    path = str(tmp_path / "no.jsonl")
    with pytest.raises(MissingError, match=r"tasks\.m: data file '.*no\.jsonl' does not exist; .*; cure: fetch it so"):
        open_math(path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [('{"problem": "p", "answer": "5"}\nno json\n', r"train\.jsonl:2: not valid JSON: .*; got 'no json'"),
     ("[1]\n", r"train\.jsonl:1: not a JSON object"),
     ('{"text": "p"}\n', r"train\.jsonl:1: no problem text \(keys \['text'\]\); got '1 unusable rows of 1'.*cure: set"),
     ('{"problem": "p", "solution": "none"}\n', r"train\.jsonl:1: no reference answer"),
     ("", r"train\.jsonl: the file is empty; wanted a JSONL file.*cure: add the prompts to the file")],
)  # fmt: skip
def test_files_of_another_form_are_refused(text, fault, tmp_path):
    """One line names the file, the line and what is wrong."""
    (tmp_path / "train.jsonl").write_text(text)
    table = TaskTable(source="math", dataset=str(tmp_path / "train.jsonl"))
    with pytest.raises(TaskError, match=fault.replace("wanted '", "wanted ")):
        build_pool({"m": table}, PoolTable(train_prompts=0, held_out_prompts=0))


@pytest.mark.parametrize(
    ("options", "fault"),
    [({"boxd_only": True}, r"options\.boxd_only: .*; got True; wanted one of held_out"),
     ({"prompt": "Solve this."}, r"options\.prompt: the placeholder {problem} is missing"),
     ({"boxed_only": "often"}, r"options\.boxed_only: .*; got 'often'")],
)  # fmt: skip
def test_options_that_mean_nothing_are_refused(options, fault, write):
    """Unknown keys, wrong types, and a prompt without the problem."""
    with pytest.raises(TaskError, match=fault):
        open_math(write(ROWS), **options)


def test_a_missing_package_names_the_pip_command(write, monkeypatch):
    """math-verify is always needed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingError, match=r"math-verify is not installed; cure: pip install 'mrl\[tasks\]'"):
        open_math(write(ROWS))


def test_a_prefix_before_an_id_is_refused():
    """With the spelling that is meant."""
    line = r"tasks\.m: data sets of the .*; got 'hub:some/name'; .*; cure: set dataset = \"some/name\" .*`mrl fetch`"
    with pytest.raises(TaskError, match=line):
        open_math("hub:some/name")


def test_an_endless_source_cannot_be_taken_whole():
    """Zero prompts means all, and words have no end."""
    table = TaskTable(source="words", dataset="swap")
    with pytest.raises(TaskError, match=r"tasks\.w: data set 'swap' is endless"):
        build_pool({"w": table}, PoolTable(train_prompts=0, held_out_prompts=3))
