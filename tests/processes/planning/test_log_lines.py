"""Which log lines a person sees at once, and which one says why a process ended."""

import json

import pytest

from mrl.processes.planning.log_lines import loud_line, rank_code, reason_in, without_launcher

TORCHRUN = """Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
  exitcode  : 1 (pid: 11)
Root Cause (first observed failure):
[0]:
  exitcode  : 2 (pid: 12)
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================"""


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("mrl: error: no such task", "mrl: error: no such task"),
        ('{"level": "warning", "event": "late", "role": "w", "age_s": 3}', "warning: late age_s=3"),
        ('{"level": "info", "event": "ready"}', None),
        ("W1120 torch warning", None),
        ('{"level": "error", "torn', None),
        ("[1, 2]", None),
    ],
)
def test_warnings_and_errors_are_shown_without_bookkeeping(line: str, shown: str | None) -> None:
    """Info, noise of libraries and torn lines stay in the file."""
    assert loud_line(line) == shown


def test_the_exception_of_a_logged_error_is_named() -> None:
    """A structured traceback is told by its last exception."""
    event = {"level": "error", "event": "failed", "exception": [{"exc_type": "OSError", "exc_value": "no disk"}]}
    assert loud_line(json.dumps(event)) == "error: failed (OSError: no disk)"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["mrl: error: bad config", '{"level": "error", "event": "x"}', "ValueError: y"], "bad config"),
        (['{"level": "error", "event": "process failed", "reason": "peer lost"}', "KeyError: z"], "peer lost"),
        (["Traceback (most recent call last):", "ValueError: y", "bye"], "ValueError: y"),
        (["RuntimeError: rank died", *TORCHRUN.splitlines()], "RuntimeError: rank died"),
        (["so long", "======", ""], "so long"),
        ([], "no output"),
    ],
)
def test_the_reason_is_the_line_that_says_most(lines: list[str], reason: str) -> None:
    """mrl's own line, then a logged error, an exception, the last words."""
    assert reason_in(lines) == reason


def test_torchrun_hides_the_code_of_its_rank() -> None:
    """The root cause counts; other codes than 1 are the process's own."""
    assert rank_code(1, TORCHRUN.splitlines()) == 2
    assert rank_code(-15, TORCHRUN.splitlines()) == -15
    assert rank_code(1, ["nothing"]) == 1


def test_what_is_shown_of_a_failed_rank_ends_with_its_own_words() -> None:
    """torchrun's account of where the rank ran would bury the reason; without a rank's words it stays."""
    said = ["step 3", "Traceback (most recent call last):", "RuntimeError: rank died"]
    launcher = "E1124 19:00:00.1 77 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1)"
    assert without_launcher([*said, launcher, *TORCHRUN.splitlines()]) == said
    assert without_launcher(said) == said
    assert without_launcher(TORCHRUN.splitlines()) == TORCHRUN.splitlines()
