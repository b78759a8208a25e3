"""A learner whose ranks live on two hosts: they share the run folder alone, and ranks, agents and hosts are lost."""

import ipaddress
import itertools
import os
import re
import signal
import sys
from pathlib import Path

import check_layouts
import psutil
import pytest

from tests.support.calm_steps import calm_steps
from tests.support.spread_learners import SPREAD, launch

pytestmark = pytest.mark.system
LISTEN = "0A"
"""A state in /proc/net/tcp."""
OFTEN = [f"--policies.{policy}.learner.checkpoint_every=1" for policy in ("qwen", "llama")]


def go_on(run, policy: str, what: str) -> None:
    """Two more steps of a policy."""
    told = run.step(policy)
    run.until(lambda: run.step(policy) >= told + 2, f"steps of {policy} {what}")


def lives(run, policy: str) -> int:
    """How often its learner lived."""
    return 1 + int((run.folder / "checkpoints" / policy / "run_epoch").read_text())


def listening(run, title: str) -> set[str]:
    """Addresses of version 4 at which a process listens, in the namespace that it lives in."""
    process = Path("/proc") / str(run.titles()[title])
    links = [os.readlink(path) for path in (process / "fd").iterdir()]
    inodes = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:")}
    rows = [line.split() for line in (process / "net" / "tcp").read_text().splitlines()[1:]]
    own = [row[1].partition(":")[0] for row in rows if row[3] == LISTEN and row[9] in inodes]
    return {str(ipaddress.ip_address(int.from_bytes(bytes.fromhex(found), sys.byteorder))) for found in own}


def test_two_learners_over_two_hosts_outlive_an_agent_and_a_rank(make_run, namespaces):
    """Two hosts with two ranks of one policy and one of the other on each. An agent there and a rank here are killed:
    all ranks of that policy begin their next life together, from the checkpoint; the other policy takes no notice."""
    run = make_run(steps=100_000)
    launch(run, namespaces, *SPREAD, *OFTEN, *calm_steps(run.config))
    run.until(lambda: min(run.step("qwen"), run.step("llama")) >= 2, "two steps of both")
    ranks = {
        "learner/qwen",
        *(f"learner/qwen/rank{rank}" for rank in (1, 2, 3)),
        "learner/llama",
        "learner/llama/rank1",
    }
    assert ranks <= run.titles().keys()
    assert listening(run, "learner/qwen/rank1") == {namespaces.addresses[0]}
    assert listening(run, "learner/qwen/rank3") == {namespaces.addresses[1]}

    psutil.Process(run.titles()["learner/qwen/rank2"]).parent().kill()
    run.until(lambda: lives(run, "qwen") == 2, "a life after the loss of an agent")
    go_on(run, "qwen", "without an agent")
    psutil.Process(run.titles()["learner/qwen/rank1"]).kill()
    run.until(lambda: lives(run, "qwen") == 3, "a life after the loss of a rank")
    go_on(run, "qwen", "without a rank")

    assert lives(run, "llama") == 1
    saved = max(int(path.name.removeprefix("step_")) for path in (run.folder / "checkpoints" / "qwen").glob("step_*"))
    assert sorted(path.name for path in (run.folder / "checkpoints" / "qwen" / f"step_{saved}").glob("rank_*")) == [
        "rank_00000.safetensors",
        "rank_00001.safetensors",
    ], "the ranks of one replica, on one host"
    published = [path.name for path in (run.folder / "weights" / "qwen").glob("[0-9]*/*.safetensors")]
    assert set(published) == {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 143, run.tail()
    assert not run.left_over()


def log_of(run, name: str) -> str:
    """What a process of the run has written."""
    return (run.folder / "logs" / "latest" / f"{name}.log").read_text()


def test_ranks_on_two_hosts_train_what_one_rank_trains(namespaces, tmp_path):
    """Five steps, flat, and with shards within hosts in passes of two sizes, and across; also from a checkpoint of one
    rank. To 1e-5, and exactly between ranks."""
    alone, wanted = check_layouts.Layout(1), check_layouts.spread(4, 2)
    trained, resumed = check_layouts.train_all(
        [alone, *wanted], [(wanted[1], alone), (alone, wanted[1])], tmp_path, hosts=namespaces
    )
    apart = [check_layouts.difference(found[0], trained[0][0]) for found in [*trained[1:], *resumed]]
    assert max(apart) <= 1e-5, apart
    for of_ranks in [*trained, *resumed]:
        assert all(check_layouts.same_bits(one, other) for one, other in itertools.pairwise(of_ranks))


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_named_and_may_come_back(make_run, namespaces):
    """The ranks on both sides end within the bound with a line that names whom they lack, the supervisor over there
    ends with them, and once the network is whole all of it begins again from the checkpoint."""
    run = make_run(steps=60)
    bounds = ["--supervision.silence_s=10", "--launch.alone_s=6", "--supervision.stop_s=2"]
    launch(run, namespaces, *SPREAD, *OFTEN, *calm_steps(run.config), *bounds, "--supervision.max_restarts=40")
    run.until(lambda: min(run.step("qwen"), run.step("llama")) >= 2, "two steps of both")
    second = namespaces.hosts[1]
    namespaces.cut(second)
    told = re.compile(rf"rank [23] on host {second} sent no message for 1\d s")
    run.until(lambda: told.search(log_of(run, "learner-qwen")), "a line that names the host")
    namespaces.cut(second, whole=True)
    run.until(lambda: f"host {second} is back" in run.log.read_text(), "the second host again")
    run.until(lambda: lives(run, "qwen") >= 2 and lives(run, "llama") >= 2, "another life")
    assert run.finish() == 0, run.tail()
    assert [run.step(policy) for policy in ("qwen", "llama")] == [60, 60]
    assert not run.left_over()
