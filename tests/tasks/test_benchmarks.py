# ruff: noqa: E501  (rows and prompts are longer than lines of code)
"""Benchmarks by name, on rows of our own in the form that each has on the hub."""

import json
from pathlib import Path

import pytest

from mrl.config.task_tables import PoolTable, TaskTable
from mrl.errors import TaskError
from mrl.tasks.benchmarks.catalogue import BENCHMARKS
from mrl.tasks.pool import build_pool
from mrl.tasks.rewards import TIMEOUT, UNREADABLE
from mrl.tasks.sealed import sealing
from mrl.tasks.sources import data_name, open_source, splits_of
from mrl.tasks.verify import Judge, VerificationRequest, judge

BOXED = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
SCRIPT = "Please provide a self-contained Python script that solves the following problem in a markdown code block:"
ROWS = {
    "gsm8k": (
        {"question": "Ann has 1,000 pens and buys 24. How many?", "answer": "1,000+24=<<1000+24=1024>>1,024\n#### 1,024"},
        "1024", "Ann has 1,000 pens and buys 24. How many? Let's think step by step and output the final answer after \"####\".",
        ["#### 1024", "so\n#### 7\n#### 1,024", "#### $3\n#### 1,024"], ["1024", "#### 1025", "#### 1024" + " ." * 200],
    ),
    "math": (
        {"problem": "Half of $3$?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{\frac{3}{2}}$."},
        r"\frac{3}{2}", "Half of $3$? Let's think step by step and output the final answer within \\boxed{}.",
        [r"\boxed{\frac32}", r"\boxed{1.5}"], [r"\boxed{3}", "3/2"],
    ),
    "math500": (
        {"problem": "p", "solution": r"\boxed{(1,2)}", "answer": r"\left( 1, 2 \right)", "subject": "Geometry", "level": 2},
        r"\left( 1, 2 \right)", BOXED.format("p"), [r"\boxed{(1,2)}"], [r"\boxed{(2,1)}"],
    ),
    "aime24": (
        {"ID": "2024-I-1", "Problem": "p", "Solution": "s", "Answer": 33}, "33",
        "Solve the following AIME problem.\n\np\n\nAnswer:", [r"\boxed{33}", "so $33$", "33"], [r"$33$, no, \boxed{34}", "$a$ and $33$"],
    ),
    "aime25": ({"problem": "p", "answer": "70", "id": "0"}, "70", "Question: p\nAnswer:", [r"\boxed{70}"], [r"\boxed{7}"]),
    "amc23": ({"id": 0, "question": "p", "answer": "27.0", "url": ""}, "27.0", BOXED.format("p"), [r"\boxed{27}"], [r"\boxed{2.7}"]),
    "olympiadbench": (
        {"id": 1, "question": "p", "solution": ["s"], "final_answer": ["$2n+1$"], "is_multiple_answer": False},
        "2n+1", BOXED.format("p"), [r"\boxed{1+2n}"], [r"\boxed{2n}", "2n+1"],
    ),
    "humaneval+": (
        {
            "task_id": "HumanEval/900", "prompt": 'def grown(word: str, by: int = 1) -> str:\n    """ Repeat. """\n',
            "canonical_solution": "    return word * by\n", "entry_point": "grown",
            "test": "import numpy as np\n\ndef check(candidate):\n    inputs = [['a', 2], ['b']]\n    results = ['aa', 'b']\n"
                    "    for inp, exp in zip(inputs, results):\n        assert candidate(*inp) == exp and np.sum([1]) == 1\n",
        },
        "return word * by",
        f'{SCRIPT}\n```\ndef grown(word: str, by: int = 1) -> str:\n    """ Repeat. """\n```\n',
        ["Not ```x = 1```:\n```python\ndef grown(word, by=1):\n    return word * by\n```\nDone.", "def grown(w, by=1): return w * by"],
        ["```python\ndef grown(word, by=1):\n    return word\n```", "```\ndef other(): pass\n```", "```\nno program", "```\nexit()\n```",
         "```\ndef grown(w, by=1): return w * by\n```\n```\nprint('run it')\n```", "```\nimport sys; sys.exit(0)\n```"],
    ),
    "mbpp+": (
        {
            "task_id": 900, "code": "def twice(n):\n    return 2 * n", "prompt": "Write a function to double a number.",
            "source_file": "x", "test_imports": [], "test_list": ["assert twice(2) == 4", "assert twice(0) == 0"],
            "test": "import numpy as np\ninputs = [[2], [0]]\nresults = [4, 0]\nfor inp, exp in zip(inputs, results):\n"
                    "    assert twice(*inp) == exp, 'wrong'\n",
        },
        "def twice(n):\n    return 2 * n",
        f'{SCRIPT}\n```\n"""\nWrite a function to double a number.\nassert twice(2) == 4\n"""\n```\n',
        ["```python\nfrom math import prod\ndef twice(n):\n    return prod([2, n])\n```"], ["```python\ndef twice(n):\n    return n + 2\n```"],
    ),
    "minerva": ({"question": "p", "answer": "1.6"}, "1.6", BOXED.format("p"), [r"\boxed{1.6}"], [r"\boxed{1.7}"]),
}  # fmt: skip
"""Name -> row, right answer, prompt, completions that are right, and some that are not."""


def folder_of(name: str, folder: Path) -> TaskTable:
    """The benchmark, whose data set is a folder of ours."""
    benchmark, (row, *_) = BENCHMARKS[name], ROWS[name]
    place = folder / benchmark.subset
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{benchmark.held_out}-0.jsonl").write_text(json.dumps(row) + "\n")
    if benchmark.train:
        other = row | {benchmark.problem: "other"}
        (place / f"{benchmark.train}-0.jsonl").write_text(json.dumps(other) + "\n")
    return TaskTable(source="benchmark", dataset=name, options={"data": str(folder)})


def test_each_has_rows_here_and_says_where_it_is_from():
    """The table and the tests hold the same names."""
    assert ROWS.keys() == BENCHMARKS.keys()
    assert all(benchmark.sources for benchmark in BENCHMARKS.values())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_is_asked_and_scored_as_its_source_does(name, tmp_path):
    """Prompt, right answer, what is taken for the answer, and what is right."""
    source = open_source("b", folder_of(name, tmp_path), seed=1)
    row, reference, prompt, right, wrong = ROWS[name]
    item = next(source.items(0))
    assert (item.text, item.reference, item.part) == (prompt, reference, "held_out")
    assert json.loads(item.row) == row
    verdicts = judged(folder_of(name, tmp_path), source, item, [*right, *wrong])
    assert [verdict.reward for verdict in verdicts] == [1.0] * len(right) + [0.0] * len(wrong)
    assert {verdict.failure for verdict in verdicts} <= {"", UNREADABLE}


def judged(table, source, item, completions):
    """Verdicts as a run gives them; programs are run in real sealed processes."""
    if not source.evaluates:
        return [judge(source, item, completion) for completion in completions]
    pool = Judge({"b": table})
    try:
        return pool.submit([VerificationRequest("b", source, item, completion) for completion in completions]).result()
    finally:
        pool.close()


def test_a_program_can_do_nothing_but_pass(tmp_path):
    """It reads no file of the user, starts no process and reaches no network; one that never ends costs itself."""
    secret = tmp_path / "secret"
    secret.write_text("s")
    right = "def grown(w, by=1): return w * by"
    attempts = [
        f"open({str(secret)!r}).read()",
        f"open({str(tmp_path / 'made')!r}, 'w')",
        "import os; os.fork()",
        "import socket; socket.socket()",
        "import os; assert not any(name for name in os.environ if name != 'LC_CTYPE')\n1 / 0",
        "import mrl.tasks.benchmarks.programs as p; p.passes = lambda *_: 1.0\n1 / 0",
        "while True: pass",
    ]
    table = folder_of("humaneval+", tmp_path / "data").model_copy(update={"verifier_timeout_s": 1.0})
    source = open_source("b", table, seed=1)
    item = next(source.items(0))
    found = judged(table, source, item, [f"```\n{attempt}\n{right}\n```" for attempt in (*attempts, "pass")])
    assert [verdict.reward for verdict in found] == [0.0] * len(attempts) + [1.0]
    assert [verdict.failure for verdict in found] == [""] * (len(attempts) - 1) + [TIMEOUT, ""]
    assert not (tmp_path / "made").exists()


def test_a_host_that_cannot_seal_runs_no_program(tmp_path, monkeypatch):
    """It is refused before a run; and no program is ever run in the process that asks."""
    table = folder_of("mbpp+", tmp_path)
    source = open_source("b", table, seed=1)
    assert source.score(next(source.items(0)), "raise SystemExit") == 0.0
    monkeypatch.setattr(sealing, "unsealed_reason", lambda: "no seccomp")
    with pytest.raises(
        TaskError, match=r"tasks\.b: answers are evaluated as code, but this host cannot seal a process"
    ):
        open_source("b", table, seed=1)


def test_tests_of_a_program_have_to_be_there(tmp_path):
    """A row without them would pass everything."""
    table = folder_of("mbpp+", tmp_path)
    (tmp_path / "test-0.jsonl").write_text(json.dumps(ROWS["mbpp+"][0] | {"test": " "}) + "\n")
    with pytest.raises(TaskError, match=r"test-0\.jsonl:1: the row has no usable value in 'test'"):
        open_source("b", table, seed=1)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_its_data_come_from_the_hub_by_split(name):
    """The id and the splits of the table."""
    table, benchmark = TaskTable(source="benchmark", dataset=name), BENCHMARKS[name]
    assert data_name(table).id == benchmark.dataset
    assert data_name(table).kind == "dataset"
    assert splits_of(table)[0] == (benchmark.held_out, benchmark.subset)
    assert len(splits_of(table)) == 1 + bool(benchmark.train)


def test_one_without_a_training_split_is_held_out_alone(tmp_path):
    """With a weight it is refused, and told so."""
    table, other = folder_of("gsm8k", tmp_path / "a"), folder_of("aime25", tmp_path / "b")
    with pytest.raises(
        TaskError,
        match=r"tasks\.b: .*cure: set tasks\.b\.weight = 0 \(only evaluated\): this benchmark has no training split$",
    ):
        build_pool({"a": table, "b": other}, PoolTable(train_prompts=0, held_out_prompts=0))
    tables = {"a": table, "b": other.model_copy(update={"weight": 0.0})}
    pool = build_pool(tables, PoolTable(train_prompts=0, held_out_prompts=0))
    assert [prompt.task for prompt in pool.prompts] in (["a", "a", "b"], ["a", "b", "a"])
    assert len(pool) == 1


def test_another_prompt_may_be_given(tmp_path):
    """With a place for the problem."""
    table = folder_of("aime25", tmp_path)
    asked = table.model_copy(update={"options": table.options | {"prompt": "Solve: {problem}"}})
    assert next(open_source("b", asked, seed=1).items(0)).text == "Solve: p"
    with pytest.raises(TaskError, match=r"options\.prompt: the placeholder {problem} is missing"):
        open_source("b", table.model_copy(update={"options": table.options | {"prompt": "Solve"}}), seed=1)


def test_a_name_that_does_not_exist_is_told_with_those_that_do(tmp_path):
    """And the nearest."""
    with pytest.raises(TaskError, match=r"tasks\.b\.dataset: no such benchmark; got 'gms8k'; .*did you mean gsm8k"):
        open_source("b", TaskTable(source="benchmark", dataset="gms8k"), seed=1)


def test_a_row_of_another_form_is_named(tmp_path):
    """With the columns that it has."""
    table = folder_of("aime25", tmp_path)
    (tmp_path / "test-0.jsonl").write_text('{"question": "p", "answer": "1"}\n')
    with pytest.raises(
        TaskError,
        match=r"test-0\.jsonl:1: the row has no usable value in 'problem'; got \"columns \['answer', 'question'\]",
    ):
        open_source("b", table, seed=1)
