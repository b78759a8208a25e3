"""Groups on their way through real verifier processes, one of which waits for the test."""

import os
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from mrl.config.task_tables import PoolTable, TaskTable
from mrl.engines.engine import Generation
from mrl.errors import RoleFailed
from mrl.metrics.telemetry import Telemetry
from mrl.records.codec import unpack_array
from mrl.records.episodes import EpisodeSegment, Message, Opening
from mrl.records.finish import FinishReason
from mrl.records.rollouts import HeldOutItem, ScoredGroup, WorkItem
from mrl.records.telemetry_messages import SampleRecord, SpansRecord
from mrl.records.version import Version, VersionSpan
from mrl.rollout.episode import PlayedEpisode
from mrl.rollout.groups_in_flight import GroupInFlight
from mrl.rollout.sampling import Sampler
from mrl.rollout.verification import VerificationQueue
from mrl.tasks.pool import build_pool
from mrl.tasks.verify import Verdict

VERIFIER = """
import os

def judge(reference, answer):
    if answer == "held":
        open(os.environ["GATE"]).read()
    if answer in ("first", "second"):
        raise ValueError(answer)
    if answer == "none":
        return None
    if answer == "parts":
        return 0.25
    return float(answer in ("held", "right"))
"""


@pytest.fixture
def gate(tmp_path, monkeypatch) -> Path:
    """A pipe that a verifier of the answer "held" reads to its end."""
    (tmp_path / "gated.py").write_text(VERIFIER)
    os.mkfifo(tmp_path / "gate")
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]))
    return tmp_path / "gate"


@pytest.fixture
def sampler(gate):
    """Tokens are bytes; answers are judged in two processes."""
    table = TaskTable(source="words", dataset="trim", verifier="gated:judge", verifier_timeout_s=1000.0)
    pool = build_pool({"trim": table}, PoolTable(train_prompts=3, held_out_prompts=1))
    yield Sampler("a", 1, None, pool, lambda text: np.arange(2, dtype=np.int32), lambda ids: bytes(ids.tolist()))
    pool.close()


def flight(sampler: Sampler, number: int, *texts: str) -> GroupInFlight:
    """A complete group with these answers."""
    spans = [VersionSpan(4, Version(0, 0))]
    ids = [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]
    answers = [Generation(one, np.zeros(one.size, dtype=np.float32), spans, FinishReason.STOP) for one in ids]
    item = WorkItem(
        ticket=f"0.{number}", position=number, prompt_id=sampler.pool.prompt_at(number).prompt_id,
        group_size=len(texts), step=0,
    )  # fmt: skip
    return GroupInFlight(number, item, np.arange(2, dtype=np.int32), dict(enumerate(answers)))


def until_done(verifying: VerificationQueue, within_s: float = 120.0) -> list[ScoredGroup]:
    deadline_s = time.monotonic() + within_s
    while not (groups := verifying.done()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return groups


def told(groups: list[ScoredGroup]) -> list[tuple[str, list[tuple[bytes, float]]]]:
    return [(group.ticket, [(answer.completion, answer.reward) for answer in group.answers]) for group in groups]


def test_a_slow_verdict_holds_up_its_own_group_alone(sampler, gate):
    """The group handed in later is there first; the span of verifying lasts until the last verdict."""
    spans: list[object] = []
    telemetry = Telemetry("worker/a/0", "a", spans.append)
    verifying = VerificationQueue(sampler, telemetry)
    verifying.hand_in([flight(sampler, 0, "wrong", "held"), flight(sampler, 1, "right", "loose")])
    began_s = time.monotonic()

    assert told(until_done(verifying)) == [("0.1", [(b"right", 1.0), (b"loose", 0.0)])]
    assert len(verifying) == 1
    assert verifying.done() == []
    time.sleep(0.1)  # long enough for a span that ended with the first group to show
    open_s = time.monotonic()

    gate.write_text("go on")
    assert told(until_done(verifying)) == [("0.0", [(b"wrong", 0.0), (b"held", 1.0)])]
    assert len(verifying) == 0
    telemetry.tell_spans()
    told_spans = [span for record in spans if isinstance(record, SpansRecord) for span in record.spans]
    assert {span.kind for span in told_spans if span.is_beside} == {"verifying"}
    assert sum(span.duration_s for span in told_spans if span.is_beside) >= open_s - began_s


def test_all_that_was_handed_in_comes_in_its_order_where_it_is_waited_for(sampler, gate):
    """As a synchronous run needs it, whoever is judged first."""
    verifying = VerificationQueue(sampler, Telemetry("worker/a/0", "a", lambda record: True))
    verifying.hand_in([flight(sampler, 0, "right", "held"), flight(sampler, 1, "right")])
    early = until_done(verifying)
    verifying.hand_in([flight(sampler, 2, "right")])
    gate.write_text("go on")

    assert [group.ticket for group in early] == ["0.1"]
    assert [group.ticket for group in verifying.done(to_the_last=True)] == ["0.0", "0.2"]


def held_out(sampler: Sampler, number: int, text: str) -> GroupInFlight:
    """An answer to the held-out prompt; one without a token was refused."""
    one = flight(sampler, number, text)
    prompt_id = sampler.pool.held_out[0].prompt_id
    return replace(one, item=HeldOutItem(ticket=f"h{number}", prompt_id=prompt_id, version=Version(0, 0)))


def test_held_out_answers_that_cannot_be_judged_cost_themselves(sampler, monkeypatch):
    """One that the engine refused, and one whose verifier does not start, which ends the worker of a group."""
    verifying = VerificationQueue(sampler, Telemetry("worker/a/0", "a", lambda record: True))
    verifying.hand_in([held_out(sampler, 0, "right"), held_out(sampler, 1, ""), held_out(sampler, 2, "wrong")])
    found = verifying.done(to_the_last=True)
    assert [(one.ticket, one.reward, one.failure) for one in found] == [
        ("h0", 1.0, ""), ("h1", 0.0, "refused by the engine"), ("h2", 0.0, "")
    ]  # fmt: skip
    assert (found[0].completion, found[0].versions) == (b"right", [VersionSpan(4, Version(0, 0))])

    def unjudged(_self, _prompt_id, _generations, *, rank):
        failed: Future[list[Verdict]] = Future()
        failed.set_exception(RoleFailed("the verifier does not start"))
        return failed

    monkeypatch.setattr(Sampler, "verdicts", unjudged)
    verifying.hand_in([held_out(sampler, 3, "right")])
    (lost,) = verifying.done(to_the_last=True)
    assert (lost.ticket, lost.failure) == ("h3", "the verifier does not start")
    verifying.hand_in([flight(sampler, 4, "right")])
    with pytest.raises(RoleFailed, match="does not start"):
        verifying.done(to_the_last=True)


def test_the_first_failure_of_every_kind_is_shown_with_its_line_and_its_answer(sampler, tmp_path):
    """Later ones of a kind are counted; the answer carries its own to the learner. Any number is a reward."""
    told_records: list[object] = []
    verifying = VerificationQueue(sampler, Telemetry("worker/a/0", "a", told_records.append))
    with capture_logs() as logs:
        verifying.hand_in([flight(sampler, 0, "first", "second", "none", "parts")])
        (group,) = until_done(verifying)

    line = 1 + VERIFIER.splitlines().index("        raise ValueError(answer)")
    raised = f"ValueError: first ({tmp_path}/gated.py:{line} in judge)"
    assert [(entry["kind"], entry["task"]) for entry in logs] == [("raised", "trim"), ("no_number", "trim")]
    assert (logs[0]["log_level"], logs[0]["reason"]) == ("warning", raised)
    assert [answer.reward for answer in group.answers] == [0.0, 0.0, 0.0, 0.25]
    assert group.answers[0].failure == f"raised: {raised}"
    assert [bool(answer.failure) for answer in group.answers] == [True, True, True, False]
    samples = [record for record in told_records if isinstance(record, SampleRecord)]
    assert [(one.kind, one.completion) for one in samples] == [("unjudged", "first"), ("unjudged", "none")]
    assert samples[0].failure == f"raised: {raised}"
    assert sampler.pool.verifier_values()["verify/failures/raised"] == 2.0


def test_who_waits_for_a_verifier_says_for_which_and_since_when(sampler, gate):
    """The oldest answers count, in however many slices they are waited for."""
    telemetry = Telemetry("worker/a/0", "a", lambda _: None)
    verifying = VerificationQueue(sampler, telemetry)
    assert verifying.awaited_since_s is None
    began_s = time.monotonic()
    verifying.hand_in([flight(sampler, 0, "held")])
    for _ in range(2):
        with telemetry.awaiting("verdicts", whom=verifying.awaited, since_s=verifying.awaited_since_s):
            beat, now_s = telemetry.beat(), time.monotonic()
    assert (beat.awaiting, beat.whom) == ("verdicts", "the verifier of trim")
    assert 0 < beat.for_s <= now_s - began_s
    gate.write_text("go on")
    until_done(verifying)


def test_a_verifier_is_not_given_what_ended_an_answer(sampler):
    """A stop string, that is; what was sampled goes to the learner, and to peers, whole."""
    verifying = VerificationQueue(replace(sampler, stop=(b"\n\n",)), Telemetry("worker/a/0", "a", lambda record: True))
    verifying.hand_in([flight(sampler, 0, "right\n\nQ", "right Q")])
    assert told(verifying.done(to_the_last=True)) == [("0.0", [(b"right\n\nQ", 1.0), (b"right Q", 0.0)])]


def test_a_group_of_episodes_says_what_they_began_with(sampler):
    """In the words of no family, for who scores them; their prompt is the one that they were played behind."""
    verifying, opening = (
        VerificationQueue(sampler, Telemetry("w", "a", lambda record: True)),
        Opening((Message("user", "go"),)),
    )
    plain = flight(sampler, 0, "hm")
    played = PlayedEpisode(
        *(getattr(plain.answers[0], name) for name in ("token_ids", "logprobs", "versions", "finish_reason")),
        prompt_token_ids=np.arange(7, dtype=np.int32),
        segments=[EpisodeSegment(num_tokens=2, is_sampled=True, messages=(Message("assistant", "hm"),))],
        verdict=Verdict(1.0, "hm"),
        ending="done",
        opening=opening,
    )
    verifying.hand_in([replace(plain, answers={0: played})])
    (group,) = until_done(verifying)
    assert (group.opening, unpack_array(group.prompt_token_ids, "i4").tolist()) == (opening, list(range(7)))
