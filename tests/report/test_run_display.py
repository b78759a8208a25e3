"""The live view, the headless lines and the final table."""

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from mrl.metrics.names import is_known
from mrl.records.telemetry_messages import HeartbeatRecord, MetricsRecord, SampleRecord
from mrl.report.run_display import RunDisplay


def beat(role: str, policy: str, **fields: Any) -> HeartbeatRecord:
    known = {"pid": 1, "doing": "training", "awaiting": "", "whom": "", "for_s": 0.3, "bound_s": 0.0}
    return HeartbeatRecord(role=role, policy=policy, time_unix_s=0.0, **(known | fields))


def metrics(role: str, policy: str, step: int, values: dict[str, float]) -> MetricsRecord:
    return MetricsRecord(role=role, policy=policy, step=step, time_unix_s=5.0, values=values)


STEP = {
    "reward/mean": 0.4123,
    "loss/total": -0.0131,
    "staleness/mean_versions": 1.21,
    "staleness/max_versions": 2.0,
    "sharing/rescues": 7.0,
    "rate/trained_tokens_s": 5123.0,
    "time/wait_for_groups_s": 0.0512,
}


def show(renderable: Any, width: int, height: int = 30) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), record=True, force_terminal=True)
    console.print(renderable)
    return console.export_text().splitlines()


def test_step_line_is_exact(make_config: Callable[..., Any]) -> None:
    """One learner step makes this line, character by character."""
    line = RunDisplay(make_config()).step_line(metrics("learner/qwen", "qwen", 12, STEP))
    assert line == "qwen step 12/320 reward 0.41 loss -0.013 stale 1.2/2 rescues 7 tok/s 5.1k wait 0.05s"


def test_answers_kept_from_peers_are_told_at_once_and_at_the_end(make_config: Callable[..., Any]) -> None:
    """In the step's line, in the live view, and with a cure when the run has ended; a run without any says nothing."""
    board = RunDisplay(make_config())
    assert board.final_notes() == []
    for step in (12, 13):
        record = metrics("learner/qwen", "qwen", step, STEP | {"sharing/withheld_answers": 5.0})
        board.apply(record, float(step))
    assert (board.step_line(record) or "").endswith(" wait 0.05s withheld 5")
    assert "10 withheld" in " ".join(show(board.render(), 120))
    (note,) = board.final_notes()
    assert note.startswith("qwen withheld 10 correct answers from its peers because they were cut at the token limit")
    assert "rollout.max_new_tokens" in note


def test_policies_that_do_not_meet_are_told_once_and_at_the_end(make_config: Callable[..., Any]) -> None:
    """With the keys of the regime that help; not at every step, and not by what an earlier attempt left."""
    board = RunDisplay(make_config(regime="hacpo"))
    values = STEP | {"sharing/asked_prompts": 8.0, "sharing/hit_prompts_from/llama": 0.0}
    due = []
    for step in range(1, 13):
        board.apply(metrics("learner/qwen", "qwen", step, values), float(step))
        due += board.take_due()
    (note,) = due
    assert note.startswith(
        "qwen found records of llama on only 0 of 40 prompts by step 5, so hacpo trains it like independent"
    )
    for key in ("hacpo.peer_hold_versions", "hacpo.max_age_versions", "allocation.objective", "run.sync"):
        assert key in note
    assert board.final_notes() == [note]


def test_the_last_picture_says_that_the_run_has_ended(
    make_config: Callable[..., Any], make_stream: Callable[..., Any]
) -> None:
    """Nothing in it waits, samples or counts on."""
    board = RunDisplay(make_config())
    for now_s, record in make_stream(2, until=213):
        board.apply(record, now_s)
    for width in (80, 140):
        before, after = (" ".join(show(one, width)) for one in (board.render(), board.render_ended()))
        assert re.search(r"roles.* heard", before)
        assert re.search(r"ended after \d\d:\d\d", after)
        assert not re.search(r"roles|heard|awaiting|training|sampling| ago", after)
        assert re.search(r"qwen.* hit rate", after)


def test_step_line_shows_dashes_for_what_is_missing(make_config: Callable[..., Any]) -> None:
    """A step without sharing or timing keeps the form of the line."""
    line = RunDisplay(make_config()).step_line(metrics("learner/qwen", "qwen", 1, {"reward/mean": float("nan")}))
    assert line == "qwen step 1/320 reward - loss - stale -/- rescues - tok/s - wait -"


def test_other_records_make_no_step_line(make_config: Callable[..., Any]) -> None:
    """Workers, heartbeats and samples are silent in the log."""
    board = RunDisplay(make_config())
    sample = SampleRecord(policy="qwen", step=1, kind="rollout", task="t", prompt="p", completion="c", reward=1.0)
    for record in (metrics("worker/qwen/0", "qwen", 1, STEP), beat("learner/qwen", "qwen"), sample):
        assert board.step_line(record) is None


def test_evaluation_line_is_exact(make_config: Callable[..., Any]) -> None:
    """An evaluation makes one line with the accuracy of every task."""
    values = {"eval/accuracy": 0.381, "eval/accuracy/spell": 0.15, "eval/accuracy/chain_sum": 0.61, "eval/time_s": 9.0}
    line = RunDisplay(make_config()).step_line(metrics("learner/qwen", "qwen", 40, values))
    assert line == "qwen step 40 held-out 0.38 chain_sum 0.61 spell 0.15"


def test_heartbeat_line_is_exact(make_config: Callable[..., Any]) -> None:
    """What each learner does or awaits, from whom and how long, then the exchange."""
    board = RunDisplay(make_config())
    board.apply(metrics("learner/qwen", "qwen", 12, STEP), 100.0)
    board.apply(metrics("learner/llama", "llama", 11, STEP), 141.0)
    board.apply(beat("learner/qwen", "qwen"), 142.0)
    waits = {"awaiting": "groups", "whom": "worker/llama/0", "for_s": 1.2, "bound_s": 300.0}
    board.apply(beat("learner/llama", "llama", **waits), 142.0)
    flows = {"exchange/flow_hit_rate/qwen/llama": 0.63, "exchange/flow_hit_rate/llama/qwen": 0.55}
    board.apply(metrics("exchange", "", 12, {"exchange/records": 210.0, **flows}), 142.0)
    assert board.heartbeat_line(142.0) == (
        "pipeline 00:42 | qwen 12/320 training 0.3s | llama 11/320 awaiting groups from worker/llama/0 1.2s of 300s"
        " | exchange 210 records llama->qwen 55% qwen->llama 63%"
    )


def test_heartbeat_line_names_silence_and_restarts(make_config: Callable[..., Any]) -> None:
    """A role that should speak and does not is named; one never heard of and one that finished are told apart."""
    board = RunDisplay(make_config())
    board.apply(metrics("learner/llama", "llama", 320, STEP), 0.0)
    board.apply(beat("learner/llama", "llama"), 0.0)
    board.apply(beat("worker/llama/0", "llama", doing="sampling"), 0.0)
    board.apply(metrics("supervisor", "", 1, {"process/restarts": 2.0}), 12.0)
    assert board.heartbeat_line(15.0) == (
        "pipeline 00:15 | qwen 0/320 starting | llama 320/320 finished | worker/llama/0 silent for 15s | restarts 2"
    )
    board.apply(beat("learner/qwen", "qwen", awaiting="groups", whom="worker/qwen/0", bound_s=300.0), 20.0)
    assert board.heartbeat_line(31.0) == (
        "pipeline 00:31 | qwen 0/320 silent for 11s, was awaiting groups from worker/qwen/0 | llama 320/320 finished"
        " | worker/llama/0 silent for 31s | restarts 2"
    )


@pytest.mark.parametrize(("width", "height"), [(80, 30), (100, 30), (140, 40)])
@pytest.mark.parametrize("policies", [1, 2, 8])
def test_live_view_fits_and_keeps_what_matters(
    make_config: Callable[..., Any], make_stream: Callable[..., Any], width: int, height: int, policies: int
) -> None:
    """No line is wider than the terminal, and every policy, its accuracies and what is awaited stay in sight."""
    board = RunDisplay(make_config(policies))
    for now_s, record in make_stream(policies, until=213):
        board.apply(record, now_s)
    lines = show(board.render(now_s + 1), width, height)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    for name in board.progress.policies:
        row = next(line for line in lines if line.startswith(f" {name} "))
        assert "213/320" in row
        assert re.search(r"0\.\d\d ?→ ?0\.\d\d", row)
    if policies > 1:
        assert "groups from worker/llama/0" in text
        assert "2.2s of 300s" in text
    if policies == 2:
        assert len(lines) <= height
        assert "qwen → llama" in text
        assert "was started again" in text


def test_live_view_of_a_run_that_has_not_begun(make_config: Callable[..., Any]) -> None:
    """Before the first record there is a view too."""
    text = "\n".join(show(RunDisplay(make_config()).render(0.0), 100))
    assert "0/320" in text
    assert "nothing yet" in text


def test_live_view_marks_silent_roles_first(make_config: Callable[..., Any]) -> None:
    """A role with a stale heartbeat stands on top of the roles, in red."""
    board = RunDisplay(make_config())
    board.apply(beat("worker/qwen/0", "qwen"), 0.0)
    board.apply(beat("learner/qwen", "qwen"), 29.0)
    console = Console(
        width=100, height=30, file=io.StringIO(), record=True, force_terminal=True, color_system="truecolor"
    )
    console.print(board.render(30.0))
    text = console.export_text(styles=True)
    lines = text.splitlines()
    silent = next(place for place, line in enumerate(lines) if "worker/qwen/0" in line)
    alive = next(place for place, line in enumerate(lines) if "learner/qwen" in line)
    assert silent < alive
    assert "\x1b[1;31m" in lines[silent]
    assert "\x1b[1;31m" not in lines[alive]
    assert "30s ago" in lines[silent]


def test_markup_in_foreign_text_is_shown_and_not_obeyed(make_config: Callable[..., Any]) -> None:
    """Square brackets in what a role says are text."""
    board = RunDisplay(make_config())
    board.apply(beat("learner/qwen", "qwen", doing="[red]x[/blue]"), 0.0)
    board.note("[bold]failed[/nothing]", 0.0)
    text = "\n".join(show(board.render(1.0), 100))
    assert "[red]x[/blue]" in text
    assert "[bold]failed[/nothing]" in text


def test_final_table_shows_start_end_and_gain_per_policy_and_task(make_config: Callable[..., Any]) -> None:
    """One row for all tasks and one per task, in the order of the configuration; dashes where nothing was evaluated."""
    board = RunDisplay(make_config())
    board.apply(metrics("learner/qwen", "qwen", 0, {"eval/accuracy": 0.24, "eval/accuracy/reverse": 0.05}), 1.0)
    board.apply(metrics("learner/qwen", "qwen", 320, {"eval/accuracy": 0.61, "eval/accuracy/reverse": 0.04}), 2.0)
    rows = [line.split() for line in show(board.final_table(), 80)]
    assert ["qwen", "all", "0.24", "0.61", "+0.37"] in rows
    assert ["reverse", "0.05", "0.04", "-0.01"] in rows
    assert ["llama", "all", "-", "-", "-"] in rows
    assert not any("chain_sum" in row for row in rows)


def test_the_final_table_says_when_the_end_is_not_the_last_step(make_config: Callable[..., Any]) -> None:
    """A run that was interrupted shows its newest evaluation with the step of it."""
    board = RunDisplay(make_config())
    board.apply(metrics("learner/qwen", "qwen", 0, {"eval/accuracy": 0.24, "eval/accuracy/reverse": 0.05}), 1.0)
    board.apply(metrics("learner/qwen", "qwen", 240, {"eval/accuracy": 0.61, "eval/accuracy/reverse": 0.04}), 2.0)
    rows = [line.split() for line in show(board.final_table(), 80)]
    assert ["qwen", "all", "0.24", "0.61", "(step", "240)", "+0.37"] in rows
    assert ["reverse", "0.05", "0.04", "(step", "240)", "-0.01"] in rows


def test_replay_restores_the_board_of_an_earlier_attempt(make_config: Callable[..., Any]) -> None:
    """After a resume the start accuracy is that of the first attempt; heartbeats and unknown names are passed over."""
    board = RunDisplay(make_config())
    line = {
        "time_unix_s": 1.0,
        "role": "learner/qwen",
        "policy": "qwen",
        "step": 0,
        "values": {"eval/accuracy": 0.24, "x": 1.0},
    }
    board.replay([line, {"time_unix_s": 2.0, "role": "exchange", "policy": "", "heartbeat": {}}], 1.0)
    board.apply(metrics("learner/qwen", "qwen", 320, {"eval/accuracy": 0.61}), 2.0)
    assert board.progress.policies["qwen"].start_and_end() == (0.24, 0.61)
    assert board.progress.policies["qwen"].latest == {}


def test_the_synthetic_run_uses_only_listed_metrics(make_stream: Callable[..., Any]) -> None:
    """What the views are tested on has the names that roles emit."""
    names = {name for _, record in make_stream(3, 20) if isinstance(record, MetricsRecord) for name in record.values}
    assert names
    assert all(map(is_known, names))
