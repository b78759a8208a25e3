"""The state that telemetry is reduced to."""

import math
from collections.abc import Callable

from mrl.records.telemetry_messages import HeartbeatRecord, MetricsRecord
from mrl.report.console_lines import missed_note
from mrl.report.progress import MissedPair, MissedPeers, Progress, kind_of


def metrics(role: str, policy: str = "qwen", step: int = 1, **values: float) -> MetricsRecord:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return MetricsRecord(role=role, policy=policy, step=step, time_unix_s=0.0, values=named)


def beat(role: str, policy: str = "qwen", pid: int = 1, **text: object) -> HeartbeatRecord:
    fields: dict[str, object] = {"doing": "training", "awaiting": "", "whom": "", "for_s": 0.5, "bound_s": 0.0}
    return HeartbeatRecord(role=role, policy=policy, pid=pid, time_unix_s=0.0, **(fields | text))  # type: ignore[arg-type]


def make() -> Progress:
    return Progress(["qwen", "llama"], steps=320)


def test_a_step_sets_step_reward_rescues_and_newest_values() -> None:
    """Learner steps build the series that the view shows."""
    progress = make()
    progress.apply(metrics("learner/qwen", step=1, reward__mean=0.2, sharing__rescues=3), 1.0)
    progress.apply(metrics("learner/qwen", step=2, reward__mean=0.3, sharing__rescues=4, loss__total=-0.1), 2.0)
    qwen = progress.policies["qwen"]
    assert (qwen.step, qwen.rewards, qwen.rescues) == (2, {1: 0.2, 2: 0.3}, {1: 3, 2: 4})
    assert qwen.latest["loss/total"] == -0.1
    assert progress.policies["llama"].step == 0


def test_numbers_between_steps_do_not_move_the_step() -> None:
    """Only a learner's account of a step counts as one, not another role's metrics or a number in between."""
    progress = make()
    progress.apply(metrics("learner/qwen", step=5, reward__mean=0.2), 1.0)
    progress.apply(metrics("learner/qwen", step=0, exchange__lost_s=2.0), 2.0)
    progress.apply(metrics("worker/qwen/0", step=3, reward__mean=0.9), 3.0)
    qwen = progress.policies["qwen"]
    assert (qwen.step, qwen.rewards, qwen.latest["exchange/lost_s"]) == (5, {5: 0.2}, 2.0)


def test_a_resume_forgets_the_voided_steps() -> None:
    """When the step goes back, later rewards, rescues and accuracies are gone, so that nothing counts twice."""
    progress = make()
    for step in (1, 2, 3, 4):
        progress.apply(metrics("learner/qwen", step=step, reward__mean=0.1, sharing__rescues=1), step)
        progress.apply(metrics("learner/qwen", step=step, eval__accuracy=0.1 * step), step)
    progress.apply(metrics("learner/qwen", step=3, reward__mean=0.5, sharing__rescues=2), 5.0)
    qwen = progress.policies["qwen"]
    assert qwen.rescues == {1: 1, 2: 1, 3: 2}
    assert list(qwen.accuracy[""]) == [1, 2, 3]


def test_accuracy_start_and_end_are_the_first_and_newest_step() -> None:
    """Order of arrival does not matter; one evaluation has a start and no end; NaN is no evaluation."""
    progress = make()
    qwen = progress.policies["qwen"]
    assert qwen.start_and_end() == (None, None)
    progress.apply(metrics("learner/qwen", step=40, eval__accuracy=0.5, eval__accuracy__spell=0.4), 1.0)
    assert qwen.start_and_end() == (0.5, None)
    progress.apply(metrics("learner/qwen", step=0, eval__accuracy=0.2, eval__accuracy__spell=0.1), 2.0)
    progress.apply(metrics("learner/qwen", step=80, eval__accuracy=math.nan), 3.0)
    assert qwen.start_and_end() == (0.2, 0.5)
    assert qwen.start_and_end("spell") == (0.1, 0.4)


def test_rollout_rate_sums_the_workers_that_spoke_lately() -> None:
    """Two workers add up; one that has been silent for over a minute no longer counts."""
    progress = make()
    progress.apply(metrics("worker/qwen/0", rate__rollout_tokens_s=100), 0.0)
    progress.apply(metrics("worker/qwen/1", rate__rollout_tokens_s=200), 50.0)
    progress.apply(metrics("worker/qwen/1", rate__rollout_tokens_s=250), 55.0)
    qwen = progress.policies["qwen"]
    assert qwen.rollout_tokens_s(60.0) == 350
    assert qwen.rollout_tokens_s(61.0) == 250
    assert qwen.rollout_tokens_s(1000.0) is None


def test_exchange_flows_are_kept_per_ordered_pair() -> None:
    """Source and receiver come from the metric's name, in that order."""
    progress = make()
    values = {
        "exchange/flow_records/qwen/llama": 5.0,
        "exchange/flow_hit_rate/qwen/llama": 0.6,
        "exchange/records": 9.0,
    }
    progress.apply(MetricsRecord(role="exchange", policy="", step=1, time_unix_s=0.0, values=values), 1.0)
    progress.apply(metrics("supervisor", policy="", process__restarts=2), 1.0)
    assert progress.flows == {("qwen", "llama"): {"records": 5.0, "hit_rate": 0.6}}
    assert (progress.exchange, progress.process) == ({"records": 9.0}, {"restarts": 2})


def test_a_new_pid_is_an_event() -> None:
    """A role that comes back under another pid was started again; the same pid is no news."""
    progress = make()
    progress.apply(beat("worker/qwen/0", pid=11), 1.0)
    progress.apply(beat("worker/qwen/0", pid=11), 2.0)
    assert not progress.events
    progress.apply(beat("worker/qwen/0", pid=12), 3.0)
    assert list(progress.events) == [(3.0, "worker/qwen/0 was started again (pid 11 -> 12)")]


def test_silence_is_measured_from_arrival() -> None:
    """A heartbeat ages by the local clock, and its durations go on growing; the foreign clock says nothing."""
    progress = make()
    progress.apply(beat("learner/qwen", for_s=0.5), 100.0)
    sign = progress.learner_of("qwen")
    assert sign is not None
    assert (sign.age_s(104.0), sign.for_s(104.0)) == (4.0, 4.5)
    assert not progress.is_silent(sign, 110.0)
    assert progress.is_silent(sign, 110.1)


def test_the_first_rank_speaks_for_a_learner_of_several() -> None:
    """What is shown of a learner with two ranks is the sign of rank 0, whichever came last."""
    progress = make()
    progress.apply(beat("learner/qwen", doing="training"), 1.0)
    progress.apply(beat("learner/qwen/rank1", doing="following"), 2.0)
    sign = progress.learner_of("qwen")
    assert sign is not None
    assert sign.beat.doing == "training"


def test_a_finished_learner_may_be_silent() -> None:
    """After its last step a learner has ended; a worker of the same policy has not."""
    progress = make()
    progress.apply(metrics("learner/qwen", step=320, reward__mean=0.2), 1.0)
    progress.apply(beat("learner/qwen"), 1.0)
    progress.apply(beat("worker/qwen/0"), 1.0)
    assert not progress.is_silent(progress.roles["learner/qwen", "qwen"], 60.0)
    assert progress.is_silent(progress.roles["worker/qwen/0", "qwen"], 60.0)


def test_a_policy_that_the_configuration_does_not_know_gets_a_place() -> None:
    """Telemetry of an unknown policy is shown rather than lost or fatal."""
    progress = make()
    progress.apply(metrics("learner/phi", policy="phi", reward__mean=0.2), 1.0)
    assert list(progress.policies) == ["qwen", "llama", "phi"]


def test_kind_of_a_role_is_its_first_part() -> None:
    """Slashes part a role's name."""
    assert [kind_of(role) for role in ("worker/qwen/0", "learner/qwen", "exchange")] == [
        "worker",
        "learner",
        "exchange",
    ]


def test_the_synthetic_stream_reduces(make_stream: Callable[..., object]) -> None:
    """A whole run goes through, and its end is its end."""
    progress = make()
    for now_s, record in make_stream(steps=320):  # type: ignore[attr-defined]
        progress.apply(record, now_s)
    assert [policy.step for policy in progress.policies.values()] == [320, 320]
    assert progress.started_s == 20


def meeting(asked: float, **hits: float) -> dict[str, float]:
    return {"sharing/asked_prompts": asked} | {f"sharing/hit_prompts_from/{name}": n for name, n in hits.items()}


def test_a_pair_that_misses_each_other_is_told_once_until_it_meets_again() -> None:
    """Below 5 % of 20 steps' prompts; from 20 % on it meets; other pairs are their own matter."""
    peers = MissedPeers()
    told = [missed for step in range(1, 31) for missed in peers.take("qwen", step, meeting(8, llama=0, phi=4))]
    assert told == [MissedPair(5, "qwen", "llama", 0, 40)] == peers.now
    told = [missed for step in range(31, 61) for missed in peers.take("qwen", step, meeting(8, llama=3, phi=4))]
    assert (told, peers.now) == ([], [])
    told = [missed for step in range(61, 91) for missed in peers.take("qwen", step, meeting(8, llama=0, phi=0))]
    assert [(one.step, one.source) for one in told] == [(78, "llama"), (79, "phi")]
    assert [one.source for one in peers.now] == ["llama", "phi"]


def test_a_few_prompts_tell_nothing_about_a_pair() -> None:
    """Not before 5 steps and 20 prompts; a regime without such meetings never."""
    peers = MissedPeers()
    assert not [one for step in range(1, 5) for one in peers.take("qwen", step, meeting(100, llama=0))]
    assert not [one for step in range(1, 20) for one in peers.take("llama", step, meeting(1, qwen=0))]
    assert not [one for step in range(1, 50) for one in peers.take("phi", step, {"sharing/asked_prompts": 9.0})]


def test_meetings_of_voided_steps_are_forgotten() -> None:
    """A resume repeats them: what they said must not count twice."""
    peers = MissedPeers()
    for step in (1, 2, 3, 4, 3, 4, 3, 4):
        assert not peers.take("qwen", step, meeting(8, llama=0))
    assert peers.take("qwen", 5, meeting(8, llama=0)) == [MissedPair(5, "qwen", "llama", 0, 40)]


def test_a_run_that_ended_is_missed_for_another_reason():
    """Its pace helps nobody; what is wrong is whose records they are."""
    missed = MissedPair(5, "qwen", "replay.llama", 1, 40)
    assert missed_note(missed, "prp") == (
        "qwen found records of replay.llama on only 1 of 40 prompts by step 5, so prp trains it like independent:"
        " the run in sharing.replay.run has hardly any records on the prompts of this run"
    )
    assert "the policies train at different paces" in missed_note(missed._replace(source="llama"), "prp")
