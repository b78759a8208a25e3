"""What becomes of a process that ended, without any process."""

import pytest

from mrl.config.schema import SupervisionTable
from mrl.processes.planning.restarts import EndRun, Exit, RestartPolicy, RoleFinished, StartAgain, Verdict, is_silent

KILLED = "was killed by signal 9 (possibly out of memory)"
TABLE = SupervisionTable()


def end(code: int = 1, *, role: str = "worker", until_done: bool = False, spares_run: bool = False) -> Exit:
    return Exit(f"{role}/a", role, code, "why", until_done, spares_run)


def lives(policy: RestartPolicy, end_of_life: Exit, lengths_s: list[float]) -> list[Verdict]:
    """Verdicts over lives of these lengths, each started when the policy said so."""
    now_s, verdicts = 0.0, list[Verdict]()
    for length_s in lengths_s:
        policy.started(end_of_life.name, now_s)
        verdicts.append(policy.ended(end_of_life, now_s + length_s))
        now_s = verdicts[-1].at_s if isinstance(verdicts[-1], StartAgain) else now_s
    return verdicts


def test_waits_double_and_the_sixth_failure_within_a_minute_ends_the_run() -> None:
    """Five restarts after 0.5, 1, 2, 4 and 8 s; then the reason is told."""
    policy = RestartPolicy(TABLE)
    *again, last = lives(policy, end(), [0.0] * 6)
    assert [one.at_s for one in again if isinstance(one, StartAgain)] == [0.5, 1.5, 3.5, 7.5, 15.5]
    assert last == EndRun(1, "worker/a exited with code 1, after 5 restarts within 60 s: why")
    assert policy.num_restarts == 5


def test_a_process_that_lives_long_in_between_is_always_started_again() -> None:
    """Failures that lie further apart than the window do not add up."""
    verdicts = lives(RestartPolicy(TABLE), end(), [61.0] * 40)
    assert all(isinstance(one, StartAgain) for one in verdicts)


def test_a_slow_start_does_not_hide_an_endless_loop() -> None:
    """Lives of 25 s never make five restarts in a minute, yet the eleventh in a row ends the run."""
    verdicts = lives(RestartPolicy(TABLE), end(-9), [25.0] * 11)
    assert all(isinstance(one, StartAgain) for one in verdicts[:-1])
    assert verdicts[-1] == EndRun(
        1,
        f"worker/a {KILLED}, 11 times in a row within 60 s of its start: why",
    )


def test_a_learner_is_started_again_three_times_a_day() -> None:
    """A run of weeks does not add up what happens once in a day."""
    verdicts = lives(RestartPolicy(TABLE), end(role="learner", until_done=True), [5 * 3600.0] * 4)
    assert [type(one) for one in verdicts] == [StartAgain, StartAgain, StartAgain, EndRun]
    assert "after 3 restarts within a day" in str(verdicts[-1])
    verdicts = lives(RestartPolicy(TABLE), end(role="learner", until_done=True), [8.1 * 3600.0] * 30)
    assert all(isinstance(one, StartAgain) for one in verdicts)


def test_a_restart_counts_until_the_learner_got_further() -> None:
    """Who ends at one step again and again, hours behind its checkpoint, does so for ever; who gets on may go on."""
    for steps, num_lives in ([7] * 30, 4), ([7, 8, 8, 8, 8, 8], 5), (range(30), 30):
        policy, of_learner = RestartPolicy(TABLE), end(role="learner", until_done=True)
        verdicts = list[Verdict]()
        for number, step in enumerate(steps):
            policy.started(of_learner.name, number * 90_000.0)
            policy.reached(of_learner.name, step - 1)
            policy.reached(of_learner.name, step)
            verdicts.append(policy.ended(of_learner, number * 90_000.0 + 80_000.0))
            if isinstance(verdicts[-1], EndRun):
                assert f"after 3 restarts without getting beyond step {step}: why" in verdicts[-1].reason
                break
        assert len(verdicts) == num_lives


def test_a_learner_of_a_synchronous_run_ends_it() -> None:
    """Nothing it could begin with fits the others; its workers are replaced as ever, and its success is one."""
    policy = RestartPolicy(TABLE, sync=True)
    (verdict,) = lives(policy, end(-9, role="learner", until_done=True), [100.0])
    assert verdict == EndRun(
        1,
        f"learner/a {KILLED}, and a synchronous run can continue only from a common step (--resume): why",
    )
    assert isinstance(lives(policy, end(), [0.0])[0], StartAgain)
    assert policy.ended(end(0, role="learner", until_done=True), 0.0) == RoleFinished()


def pauses_s(policy: RestartPolicy, end_of_life: Exit, lengths_s: list[float]) -> list[float]:
    """How long what was given up is left alone, 0 for a wait between restarts."""
    now_s, found = 0.0, []
    for length_s in lengths_s:
        policy.started(end_of_life.name, now_s)
        verdict = policy.ended(end_of_life, now_s + length_s)
        assert isinstance(verdict, StartAgain)
        found.append(verdict.at_s - now_s - length_s if verdict.given_up else 0.0)
        now_s = verdict.at_s
    return found


@pytest.mark.parametrize(("length_s", "num_free"), [(4.0, 5), (25.0, 10)])
def test_what_spares_the_run_is_given_up_in_its_place_and_tried_after_growing_pauses(
    length_s: float, num_free: int
) -> None:
    """A minute, doubled at every try up to an hour. A life that was not short begins anew."""
    lengths_s = [length_s] * (num_free + 8) + [61.0] + [4.0] * 5
    found = pauses_s(RestartPolicy(TABLE), end(spares_run=True), lengths_s)
    growing = [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0]
    assert found == pytest.approx([0.0] * num_free + growing + [0.0] * 5 + [60.0])


def test_a_spared_host_of_a_synchronous_run_is_started_again_and_wrong_settings_end_any() -> None:
    """It has no learner that would have to go back."""
    policy = RestartPolicy(TABLE, sync=True)
    assert pauses_s(policy, end(255, role="supervisor", spares_run=True), [0.0] * 6) == [0.0] * 5 + [60.0]
    assert isinstance(policy.ended(end(255, role="supervisor"), 0.0), EndRun)
    assert policy.ended(end(2, spares_run=True), 0.0) == EndRun(2, "worker/a: why")


def test_exit_codes_0_and_2_mean_what_the_roles_say() -> None:
    """0 is the end of a learner and a failure of a daemon; 2 ends the run with its line."""
    assert RestartPolicy(TABLE).ended(end(0, role="learner", until_done=True), 0.0) == RoleFinished()
    assert isinstance(RestartPolicy(TABLE).ended(end(0), 0.0), StartAgain)
    assert RestartPolicy(TABLE).ended(end(2), 0.0) == EndRun(2, "worker/a: why")


def test_roles_do_not_share_their_restarts() -> None:
    """Five failures of one worker leave the other its own five."""
    policy = RestartPolicy(TABLE)
    lives(policy, end(), [0.0] * 5)
    assert isinstance(lives(policy, end(role="exchange"), [0.0])[0], StartAgain)


@pytest.mark.parametrize(
    ("beat_s", "now_s", "silent"),
    [(None, 299.0, ""), (None, 301.0, "start"), (200.0, 259.0, ""), (200.0, 261.0, "beat")],
)
def test_silence_counts_from_the_last_beat_or_the_start(beat_s: float | None, now_s: float, silent: str) -> None:
    """A role has 300 s until its first heartbeat and 60 s between two."""
    assert is_silent(TABLE, started_s=0.0, last_beat_s=beat_s, now_s=now_s) == silent
