"""Earlier versions of a policy: processes that serve them start when they are asked for, make room, and end."""

import asyncio
import os

import openai
import pytest

from mrl.gateway import checkpoint_servers
from mrl.records.direct_requests import DirectChunk, WorkerRoom
from tests.gateway.test_direct_requests import TALK, run, says, until

PROCESS = """
import os, signal, sys, time
from pathlib import Path
from mrl.gateway.gateway_connection import GatewayConnection
from mrl.records.direct_requests import DirectAnswer, DirectRequest, WorkerRoom

folder, policy, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
(folder / "starts").open("a").write(f"{os.getpid()} {policy}@{step}\\n")
if (folder / "fails").exists():
    sys.exit(3)
ends = []
if (folder / "stubborn").exists():
    signal.signal(signal.SIGTERM, lambda *_: ends.append(True))
while (folder / "slow").exists():
    time.sleep(0.01)
line = GatewayConnection(folder)
line.send(WorkerRoom(policy, 8, step, True))
while True:
    if ends:
        line.close()
        while (folder / "stubborn").exists():
            time.sleep(0.01)
        sys.exit()
    for asked in line.take():
        if isinstance(asked, DirectRequest) and not (folder / "silent").exists():
            line.send(DirectAnswer(request_id=asked.request_id, version=step, num_given_tokens=1, text=f"of {step}"))
    time.sleep(0.01)
"""


def kept(folder, script, *, most=1):
    """What an async function of a rig returns; a gateway tends its desk beside it, as it does in a run."""

    async def tended(rig, _):
        async def tend():
            while True:
                rig.desk.tend()
                await asyncio.sleep(0.01)

        tending = asyncio.ensure_future(tend())
        try:
            return await script(rig)
        finally:
            tending.cancel()

    return run(folder, tended, kept_versions=most, process=("-c", PROCESS, str(folder)))


async def ask(rig, model):
    """What it says."""
    found = await rig.client.chat.completions.create(model=model, messages=TALK)
    return found.choices[0].message.content, found.system_fingerprint


def starts(folder):
    """Process ids and what they serve, in their order."""
    lines = (folder / "starts").read_text().split("\n")[:-1] if (folder / "starts").exists() else []
    return [(int(line.split()[0]), line.split()[1]) for line in lines]


def is_alive(pid):
    """Whether it has not ended; one that has is reaped by whoever tends it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_earlier_version_is_served_beside_those_that_train(tmp_path):
    """One process for all that ask for it; whoever names no step gets the newest all the same."""

    async def script(rig):
        await rig.worker(says("newest"))
        names = [model.id for model in (await rig.client.models.list()).data]
        answers = await asyncio.gather(*(ask(rig, model) for model in ["qwen@40", "qwen", "qwen@40", "qwen@5"]))
        return names, answers, [await ask(rig, "qwen@40"), await ask(rig, "qwen")]

    old, new = ("of 40", "qwen@40"), ("newest", "qwen@5")
    names, together, later = kept(tmp_path, script)
    assert names == ["qwen", "llama", "qwen@40", "qwen@80", "qwen@120"]
    assert (together, later) == ([old, new, old, new], [old, new])
    ((pid, served),) = starts(tmp_path)
    assert served == "qwen@40"
    assert not is_alive(pid), "it ends with the gateway"


def test_a_version_is_served_where_no_worker_is_and_worked_for_by_nobody_else(tmp_path, monkeypatch):
    """It needs none of the policy's workers, and does no work of theirs."""
    monkeypatch.setattr("mrl.gateway.direct_queue.NO_WORKER_S", 0.0)

    async def script(rig):
        said = await ask(rig, "qwen@80")
        with pytest.raises(openai.InternalServerError, match="no worker of qwen is connected"):
            await ask(rig, "qwen")
        return said

    assert kept(tmp_path, script) == ("of 80", "qwen@80")


def test_a_version_that_workers_have_is_theirs_until_they_go_on(tmp_path):
    """Then it is served from its checkpoint: for a request that waits, and for one that newer weights overtook."""

    async def script(rig):
        worker = await rig.worker(says("by a worker", version=41), version=40)
        overtaken = await ask(rig, "qwen@40")
        full = WorkerRoom("qwen", 0, 80)
        worker.line.send(full)
        await until(lambda: any(one.room == full for one in rig.desk._workers))
        waiting = asyncio.ensure_future(ask(rig, "qwen@80"))
        await until(lambda: rig.desk.num_waiting == 1)
        assert len(starts(tmp_path)) == 1
        worker.line.send(WorkerRoom("qwen", 0, 81))
        return overtaken, await waiting

    assert kept(tmp_path, script, most=2) == (("of 40", "qwen@40"), ("of 80", "qwen@80"))


def test_one_that_rests_makes_room_for_another(tmp_path, monkeypatch):
    """The first has ended before the other starts: there is memory for so many."""
    monkeypatch.setattr(checkpoint_servers, "RESTING_S", 0.0)

    async def script(rig):
        found = [await ask(rig, "qwen@40")]
        ((first, _),) = starts(tmp_path)
        left = tmp_path / "run" / "kept_versions" / "qwen-40"
        left.mkdir(parents=True)
        found.append(await ask(rig, "qwen@80"))
        return found, is_alive(first) or left.exists()

    found, is_first_alive = kept(tmp_path, script)
    assert (found, is_first_alive) == ([("of 40", "qwen@40"), ("of 80", "qwen@80")], False)
    assert [served for _, served in starts(tmp_path)] == ["qwen@40", "qwen@80"]


def test_one_that_answers_makes_no_room(tmp_path, monkeypatch):
    """Whoever asks for another is told what to wait for, and which key makes more room."""
    (tmp_path / "silent").touch()
    monkeypatch.setattr(checkpoint_servers, "RESTING_S", 0.2)

    async def script(rig):
        busy = asyncio.ensure_future(ask(rig, "qwen@40"))
        await until(lambda: rig.desk._workers)
        await asyncio.sleep(0.4)  # longer than it may rest
        with pytest.raises(openai.RateLimitError, match=r"gateway.kept_versions = 1, busy: qwen@40"):
            await ask(rig, "qwen@80")
        (tmp_path / "silent").unlink()
        busy.cancel()

    kept(tmp_path, script)
    assert [served for _, served in starts(tmp_path)] == ["qwen@40"]


def test_one_whose_checkpoint_goes_is_served_on(tmp_path):
    """Its process has the weights."""

    async def script(rig):
        first = await ask(rig, "qwen@40")
        rig.checkpoints["qwen"].remove(40)
        found = [first, await ask(rig, "qwen@40")]
        with pytest.raises(openai.NotFoundError, match="step 80, 120"):
            await ask(rig, "qwen@41")
        return found

    assert kept(tmp_path, script) == [("of 40", "qwen@40")] * 2


def test_one_that_nobody_asks_for_ends(tmp_path, monkeypatch):
    """It is started again for the next request."""
    monkeypatch.setattr(checkpoint_servers, "IDLE_S", 0.3)

    async def script(rig):
        await ask(rig, "qwen@40")
        await until(lambda: rig.desk.kept.num_alive == 0)
        return await ask(rig, "qwen@40")

    assert kept(tmp_path, script) == ("of 40", "qwen@40")
    assert [served for _, served in starts(tmp_path)] == ["qwen@40"] * 2


def test_one_that_cannot_be_served_is_an_error_of_those_that_wait(tmp_path, monkeypatch):
    """At once, and with where to look; whoever asks on hears the same, until it is tried again after a pause."""
    (tmp_path / "fails").touch()

    async def script(rig):
        words = "qwen@40 exited with code 3; see the gateway's log"
        for _ in range(3):
            with pytest.raises(openai.InternalServerError, match=words):
                await ask(rig, "qwen@40")
        (tmp_path / "fails").unlink()
        monkeypatch.setattr(checkpoint_servers, "PAUSE_S", 0.0)
        return await ask(rig, "qwen@40")

    assert kept(tmp_path, script) == ("of 40", "qwen@40")
    assert len(starts(tmp_path)) == 2


def test_a_host_that_starts_no_process_costs_those_that_wait(tmp_path, monkeypatch):
    """And nobody else."""

    async def script(rig):
        monkeypatch.setattr(checkpoint_servers.subprocess, "Popen", no_process)
        with pytest.raises(openai.InternalServerError, match=r"qwen@40 cannot be served: .*no more processes"):
            await ask(rig, "qwen@40")
        await rig.worker(says("newest"))
        return await ask(rig, "qwen")

    def no_process(*_, **__):
        raise OSError("no more processes")

    assert kept(tmp_path, script) == ("newest", "qwen@5")


def test_one_that_is_ending_is_not_started_beside_itself(tmp_path):
    """It starts anew when the other one has gone."""
    (tmp_path / "stubborn").touch()

    async def script(rig):
        found = [await ask(rig, "qwen@40")]
        (served,) = rig.desk.kept._served.values()
        served.end(rig.desk.kept._clock())
        asking = asyncio.ensure_future(ask(rig, "qwen@40"))
        await until(lambda: rig.desk._waiting)
        assert len(starts(tmp_path)) == 1
        (tmp_path / "stubborn").unlink()
        found.append(await asking)
        return found

    assert kept(tmp_path, script, most=2) == [("of 40", "qwen@40")] * 2
    assert [served for _, served in starts(tmp_path)] == ["qwen@40"] * 2


def test_one_that_does_not_end_is_killed(tmp_path, monkeypatch):
    """By whoever tends it, and by whoever closes."""
    (tmp_path / "stubborn").touch()
    monkeypatch.setattr(checkpoint_servers, "END_S", 0.0)

    async def script(rig):
        found = [await ask(rig, "qwen@40")]
        (served,) = rig.desk.kept._served.values()
        served.end(rig.desk.kept._clock())
        found.append(await ask(rig, "qwen@40"))
        return found

    assert kept(tmp_path, script) == [("of 40", "qwen@40")] * 2
    (first, _), (second, _) = starts(tmp_path)
    assert not is_alive(first)
    assert not is_alive(second)


def test_one_starts_after_the_other(tmp_path):
    """Two that load at the same time would each count the same free memory as theirs."""
    (tmp_path / "slow").touch()

    async def script(rig):
        asking = [asyncio.ensure_future(ask(rig, f"qwen@{step}")) for step in (40, 80)]
        await until(lambda: starts(tmp_path))
        assert rig.desk.kept.num_alive == 1
        (tmp_path / "slow").unlink()
        return await asyncio.gather(*asking)

    assert kept(tmp_path, script, most=2) == [("of 40", "qwen@40"), ("of 80", "qwen@80")]
    assert [served for _, served in starts(tmp_path)] == ["qwen@40", "qwen@80"]


def test_a_stream_that_newer_weights_overtake_before_its_first_piece_is_sampled_anew(tmp_path):
    """From the checkpoint; the worker is told to forget it, and it counts as one answer."""

    def newer(request):
        return DirectChunk(request_id=request.request_id, version=41, text="no")

    async def script(rig):
        worker = await rig.worker(newer, version=40)
        stream = await rig.client.chat.completions.create(model="qwen@40", messages=TALK, stream=True)
        said = [chunk.choices[0].delta.content or "" async for chunk in stream]
        await until(lambda: worker.withdrawn)
        return "".join(said), worker.withdrawn == [worker.asked[0].request_id], rig.desk.counts["answers"]

    assert kept(tmp_path, script) == ("of 40", True, 1)


def test_a_crowd_that_waits_for_one_version_costs_one_look_at_the_checkpoints_each(tmp_path):
    """And each word of a worker costs none."""
    (tmp_path / "slow").touch()

    async def script(rig):
        looks = []
        rig.desk.kept._steps = lambda policy: looks.append(policy) or {40, 80}
        asking = [asyncio.ensure_future(ask(rig, "qwen@80"))]  # which loads, and the others wait for it
        await until(lambda: starts(tmp_path))
        asking += [asyncio.ensure_future(ask(rig, "qwen@40")) for _ in range(49)]
        await until(lambda: rig.desk.num_waiting == 50)
        num_looks = len(looks)
        worker = await rig.worker(says())
        for room in range(20, 40):
            told = WorkerRoom("qwen", room, 5)
            worker.line.send(told)
            await until(lambda told=told: any(one.room == told for one in rig.desk._workers))
        after = len(looks) - num_looks
        (tmp_path / "slow").unlink()
        await asyncio.gather(*asking)
        return num_looks, after

    looks, after = kept(tmp_path, script, most=2)
    assert (looks <= 52, after) == (True, 0)


def test_where_kept_versions_are_served_no_other_way_is_told(tmp_path):
    """A step without a checkpoint is refused with those that have one."""

    async def script(rig):
        await rig.worker(says())
        with pytest.raises(openai.NotFoundError, match=r"checkpoints of qwen exist for step 40, 80, 120$"):
            await ask(rig, "qwen@41")

    kept(tmp_path, script)
