"""What a host has to have for a seal, and what becomes of tasks where it has not."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mrl.config.task_tables import TaskTable
from mrl.errors import TaskError
from mrl.tasks.sealed.sealing import Sealing, sealed_environment, sealing_of
from mrl.tasks.verifier_trial import try_verifier

ROOT = Path(__file__).parents[2]
JUDGING = """
    from contextlib import closing
    from mrl.config.task_tables import TaskTable
    from mrl.errors import TaskError
    from mrl.tasks.sealed.seal import unsealed_reason
    from mrl.tasks.sources import open_source
    from mrl.tasks.verify import Judge, VerificationRequest

    def rewards(name, answers, **settings):
        table = TaskTable(source="reasoning_gym", dataset=name, verifier_timeout_s=60.0, **settings)
        source = open_source("t", table, seed=1)
        item = next(source.items(1))
        given = [answer or item.reference for answer in answers]
        with closing(Judge({"t": table})) as judge:
            asked = [VerificationRequest("t", source, item, f"<answer>{one}</answer>") for one in given]
            return [verdict.reward for verdict in judge.submit(asked).result()]
"""


def on_a_lesser_host(limit: str, code: str) -> str:
    """What a program prints that runs under one of the limits of `lesser_host`."""
    program = f"from tests.support import lesser_host\nlesser_host.{limit}()\n{textwrap.dedent(JUDGING)}\n"
    argv = [sys.executable, "-c", program + textwrap.dedent(code)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("limit", ["without_rights", "without_landlock"])
def test_a_seal_needs_neither_rights_nor_landlock(limit):
    """An ordinary user has it; without Landlock no file can be opened, and the scorers need none."""
    code = """
        print([unsealed_reason(), rewards("simple_integration", ["", "x", "sin(1/x"])])
    """
    assert on_a_lesser_host(limit, code) == "['', [1.0, 0.0, 0.0]]"


def test_without_a_seal_answers_are_evaluated_only_where_the_task_says_so():
    """One line says why; data sets that evaluate nothing go on."""
    code = """
        try:
            rewards("countdown", [""])
        except TaskError as error:
            print(error)
        print(rewards("countdown", ["", "1+1"], trusted_answers=True), rewards("sudoku", ["", "1"]))
    """
    refusal, judged = on_a_lesser_host("without_seccomp", code).split("\n")
    assert refusal.startswith(
        "tasks.t: answers are evaluated as code, but this host cannot seal a process (the kernel rejects"
    )
    assert refusal.endswith("or, if such code can do no harm here, set tasks.t.trusted_answers = true")
    assert judged == "[1.0, 0.0] [1.0, 0.0]"


def test_a_verifier_of_ones_own_is_sealed_when_an_evaluator_stands_before_it():
    """Alone it keeps its files and its network."""
    table = TaskTable(source="words", dataset="trim", verifier="a:b")
    assert sealing_of("t", table, evaluates=True) is None
    assert sealing_of("t", table.model_copy(update={"evaluator": "c:d"}), evaluates=False) == Sealing("c:d")
    with pytest.raises(TaskError, match=r"tasks\.t\.evaluator: an evaluator needs a verifier.*set tasks\.t\.verifier"):
        sealing_of("t", table.model_copy(update={"evaluator": "c:d", "verifier": ""}), evaluates=False)


@pytest.mark.usefixtures("verifiers")
def test_an_evaluator_is_tried_before_a_run():
    """Of one that starts it is told what it makes of references; of one that does not, the reason."""
    made = {"source": "words", "dataset": "trim", "verifier": "tests.support.evaluating:same"}
    trials = try_verifier("t", TaskTable(**made, evaluator="tests.support.evaluating:run"), seed=1)
    assert [(one.of_reference.reward, one.evaluated.failure) for one in trials] == 3 * [(1.0, "unevaluated")]
    with pytest.raises(
        TaskError, match=r"the evaluator no_such:run does not start: ModuleNotFoundError: No module named"
    ):
        try_verifier("t", TaskTable(**made, evaluator="no_such:run"), seed=1)


def test_secrets_of_the_environment_stay_outside():
    """What finds Python and its modules goes in."""
    outside = {"PATH": "/bin", "PYTHONHASHSEED": "1", "AWS_SECRET_ACCESS_KEY": "x", "HF_TOKEN": "x", "MRL_KEY": "x"}
    assert {name for name in sealed_environment(outside) if name in outside} == {"PATH", "PYTHONHASHSEED"}


def test_large_pages_are_asked_for_where_nobody_chose_otherwise():
    """A person who debugs memory keeps the allocator that was asked for."""
    assert sealed_environment({})["PYTHONMALLOC"] == "malloc"
    assert sealed_environment({"PYTHONMALLOC": "debug"})["PYTHONMALLOC"] == "debug"
