"""Whom the chaos drill hits and when, and what it makes of a run."""

import json
import os
import signal

import pytest
from chaos import WINDOW_STEPS, accuracy_row, ends_of, smooth
from chaos_drill.faults import PAUSE_S, Fault, Saboteur
from chaos_drill.outcome import Outcome, most_together, outcome_of
from chaos_drill.slots import most_in_use
from chaos_drill.trial import Trial, roles_of

PIDS = {"exchange": 10, "learner/qwen": 11}


class Signals(list):
    """What was sent: (pid, signal)."""

    def __call__(self, pid, number):
        self.append((pid, number))


def test_every_role_is_hit_once_a_round_and_only_while_it_lives():
    """A role without a process, or whose last fault is not over, is left alone."""
    sent = Signals()
    saboteur = Saboteur(["exchange", "learner/qwen", "allocator"], ["kill"], every_s=1.0, seed=1)

    for turn in range(40):
        saboteur.turn(PIDS, turn * 0.5, more=True, kill=sent)

    assert sorted(sent) == [(10, signal.SIGKILL), (11, signal.SIGKILL)]


def test_a_paused_process_goes_on_and_a_hanging_one_does_not():
    """SIGCONT comes after the pause; what hangs is over when another process has the role."""
    for kind, signals in (("pause", [signal.SIGSTOP, signal.SIGCONT]), ("hang", [signal.SIGSTOP])):
        sent = Signals()
        saboteur = Saboteur(["exchange"], [kind], every_s=1.0, seed=1)
        saboteur.turn(PIDS, 0.0, more=True, kill=sent)
        saboteur.turn(PIDS, 5.0, more=True, kill=sent)
        saboteur.turn(PIDS, 5.0 + PAUSE_S, more=False, kill=sent)
        saboteur.turn(PIDS | {"exchange": 12}, 9.0, more=False, kill=sent)

        assert sent == [(10, number) for number in signals]
        (fault,) = saboteur.faults
        assert fault.is_over
        assert fault.replaced_s == (4.0 if kind == "hang" else None)


def test_nothing_is_hit_any_more_when_it_is_enough():
    """The run has to be able to end."""
    sent = Signals()
    saboteur = Saboteur(["exchange"], ["kill"], every_s=1.0, seed=1)
    saboteur.turn(PIDS, 0.0, more=False, kill=sent)
    saboteur.turn(PIDS, 9.0, more=False, kill=sent)

    assert sent == []


def test_versions_that_do_not_rise_are_named():
    """As they were found, an epoch counts before a step."""
    rising = Trial(folder=None, argv=(), versions={"qwen": [(0, 1), (0, 3), (1, 2)]})
    falling = Trial(folder=None, argv=(), versions={"qwen": [(0, 1), (0, 3), (0, 2)]})

    assert (rising.disorders(), falling.disorders()) == ([], ["qwen: (0, 2) after (0, 3)"])


def test_versions_are_found_in_the_order_in_which_they_were_written(tmp_path):
    """Names do not tell it: 1.2 can be younger than 0.10."""
    for age, name in enumerate(["0.9", "0.10", "1.2"]):
        folder = tmp_path / "weights" / "qwen" / name
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
        os.utime(folder / "manifest.json", (age, age))
    trial = Trial(tmp_path, ("sleep", "60"))
    trial.start()
    try:
        trial.look()
    finally:
        trial.process.kill()
        trial.process.wait()

    assert trial.versions == {"qwen": [(0, 9), (0, 10), (1, 2)]}


def test_faults_come_for_so_long_after_the_first_version(tmp_path):
    """However long it took to start."""
    more_faults = []

    class Watching:
        def turn(self, pids, now_s, *, more, kill):
            more_faults.append(more)
            if len(more_faults) == 3:
                (tmp_path / "weights" / "qwen" / "0.0").mkdir(parents=True)
                (tmp_path / "weights" / "qwen" / "0.0" / "manifest.json").touch()

    Trial(tmp_path, ("sleep", "1")).run(Watching(), faults_for_s=0.0, limit_s=30.0)
    assert more_faults[:4] == [True, True, True, False]


def test_slots_are_added_up_over_what_was_said_in_one_go():
    """A policy's new slots and another's of the decision before are never in use together."""
    assert most_together([("a", 100), ("b", 150), ("a", 156), ("b", 100)]) == 256


def slots_said(folder, attempt, worker, *said):
    """A worker's log of one attempt: (second, slots)."""
    log = folder / "logs" / f"attempt_{attempt}" / f"{worker.replace('/', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "leased": 1,
            "at_most": slots,
            "event": "slots changed",
            "role": worker,
            "timestamp": f"1970-01-01T00:00:{second:02}Z",
        }
        for second, slots in said
    ]
    log.write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"at_most": 900, "event": "slots changed", "ro'
    )


def test_slots_in_use_are_added_up_over_the_workers_own_words(tmp_path):
    """At every moment the last of each, over all attempts; a torn line says nothing."""
    slots_said(tmp_path, 1, "worker/a/0", (1, 100), (5, 64), (9, 0))
    slots_said(tmp_path, 1, "worker/b/0", (2, 100), (6, 136))
    slots_said(tmp_path, 2, "worker/a/0", (20, 90))
    assert most_in_use(tmp_path, {}) == 226, "nobody says that the first attempt's worker of b is gone"
    assert most_in_use(tmp_path, {"worker/b/0": [(18.9, 19.0)]}) == 200
    assert most_in_use(tmp_path, {"worker/b/0": [(5.9, 6.1)]}) == 200, "it spoke after it was seen last"


def test_without_a_workers_word_no_slot_was_in_use(tmp_path):
    """So that the drill fails where it sees nothing."""
    assert most_in_use(tmp_path, {"worker/a/0": [(3.0, 3.1)]}) == 0


def test_a_process_ended_between_two_looks():
    """Its successor counts anew."""
    trial = Trial(folder=None, argv=())
    for now_unix_s, pids in ((1.0, {"worker/a/0": 7}), (2.0, {"worker/a/0": 7}), (3.0, {}), (4.0, {"worker/a/0": 8})):
        trial._note_ends(pids, now_unix_s)
    trial._note_ends({"worker/a/0": 9}, 5.0)
    assert trial.ends == {"worker/a/0": [(2.0, 3.0), (4.0, 5.0)]}


def test_what_was_killed_or_hangs_uses_nothing_from_then_on(monkeypatch):
    """What is paused goes on."""
    monkeypatch.setattr("time.time", lambda: 1000.0)
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    faults = [Fault("worker/a/0", kind, 7, at_s) for at_s, kind in enumerate(("kill", "pause", "hang"))]
    trial = Trial(folder=None, argv=(), ends={"worker/a/0": [(4.9, 5.0)]})
    assert ends_of(trial, faults) == {"worker/a/0": [(4.9, 5.0), (900.0, 900.5), (902.0, 902.5)]}
    assert trial.ends == {"worker/a/0": [(4.9, 5.0)]}


def test_a_run_is_known_by_its_metrics(tmp_path):
    """Rewards of every policy, and the last accuracy of each."""
    lines = [
        {"policy": "qwen", "step": 1, "values": {"reward/mean": 0.25}},
        {"policy": "qwen", "step": 0, "values": {"eval/accuracy": 0.1}},
        {"policy": "qwen", "step": 2, "values": {"reward/mean": 0.5}},
        {"policy": "qwen", "step": 2, "values": {"eval/accuracy": 0.4}},
        {"policy": "llama", "step": 2, "values": {"eval/accuracy": 0.8}},
        {"policy": "llama", "step": 2, "values": {"allocation/held_slots": 64}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = outcome_of(tmp_path)

    assert found == ({"qwen": [(1, 0.25), (2, 0.5)]}, {"qwen": 0.4, "llama": 0.8}, 64)
    assert found.accuracy == pytest.approx(0.6)


def test_a_curve_is_smoothed_over_the_last_steps():
    """Over as many as there are at first; a step that was trained twice counts as it was trained last."""
    points = [(step, float(step)) for step in range(1, 2 * WINDOW_STEPS + 1)]
    steps, means = smooth([(1, 9.0), *points])

    assert steps == list(range(1, 2 * WINDOW_STEPS + 1))
    assert means[:2] == [1.0, 1.5]
    assert means[-1] == pytest.approx(sum(range(WINDOW_STEPS + 1, 2 * WINDOW_STEPS + 1)) / WINDOW_STEPS)


def test_an_accuracy_is_measured_by_the_spread_of_unbroken_runs():
    """Never less than what drawing answers alone makes: 2 policies, 200 prompts, 0.5 are 0.025."""

    def run(accuracy):
        return Outcome({}, {"qwen": accuracy, "llama": accuracy}, 0.0)

    (narrow,) = accuracy_row(run(0.55), [run(0.5), run(0.5)], 200)
    (wide,) = accuracy_row(run(0.7), [run(0.4), run(0.6)], 200)

    assert narrow["value"] == pytest.approx(0.05 / (0.025 * 1.5**0.5))
    assert wide["value"] == pytest.approx(0.2 / (0.02**0.5 * 1.5**0.5))
    assert (narrow["ok"], wide["ok"]) == (True, True)
    assert not accuracy_row(run(0.57), [run(0.5), run(0.5)], 200)[0]["ok"]


def test_roles_have_the_titles_of_their_processes():
    """As `mrl::worker/qwen/0`."""
    assert roles_of(["qwen"]) == ("exchange", "allocator", "learner/qwen", "worker/qwen/0")
