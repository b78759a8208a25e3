"""A run across hosts with addresses of their own: nothing is shared but files, and every link is encrypted."""

import json
import subprocess
import sys

import psutil
import pytest

from tests.system.conftest import keep_qwen

pytestmark = pytest.mark.system
REMOTE = '["ip", "netns", "exec", "{host}"]'


def inside(host: str, *words: str) -> list[str]:
    """An mrl command on one of the hosts."""
    return ["ip", "netns", "exec", host, sys.executable, "-m", "mrl", *words]


def address_of(run, name: str) -> str:
    """The host part of where a role listens."""
    text = (run.folder / "endpoints" / f"{name}.json").read_text()
    return json.loads(text)["address"].removeprefix("tcp://").partition(":")[0]


def test_a_run_across_two_hosts(make_run, namespaces):
    """Learner and engine of one policy here, of the other there. The second host is lost and comes back; the policy on
    it is stopped from there by the run folder alone, with its last step saved; the other one finishes."""
    run = make_run(steps=16)
    hosts = ",".join(f"{name}={address}" for name, address in zip(namespaces.hosts, namespaces.addresses, strict=True))
    words = ["--hosts", hosts, "--launch.remote", REMOTE, "--exchange.host", "0.0.0.0"]
    first, second = namespaces.hosts
    run.start(argv=inside(first, "launch", str(run.config), *words))
    run.until(lambda: run.step("llama") >= 1, "a step on the second host")
    addresses = [address_of(run, name) for name in ("exchange", "allocator", "learner-qwen", "learner-llama")]
    assert addresses == [namespaces.addresses[0]] * 3 + [namespaces.addresses[1]]

    psutil.Process(run.pid(f"supervisor/{second}")).kill()
    run.until(lambda: f"host {second} is back" in run.log.read_text(), "the second host again")
    told = len(run.metrics("learner/llama"))
    run.until(lambda: len(run.metrics("learner/llama")) > told, "a step after the loss")
    done = subprocess.run(
        inside(second, "stop", str(run.folder), "--policy", "llama", "--wait"), timeout=300, check=False
    )
    assert done.returncode == 0

    assert run.finish() == 0, run.tail()
    assert "llama is stopped by " in run.log.read_text()
    assert run.step("qwen") == 16
    assert sum(record["values"]["sharing/asked_prompts"] for record in run.metrics("learner/")) > 0
    saved = [int(path.name.removeprefix("step_")) for path in (run.folder / "checkpoints" / "llama").glob("step_*")]
    assert max(saved) == run.metrics("learner/llama")[-1]["step"]
    assert not run.left_over()


@pytest.mark.parametrize("weights", ["files", pytest.param("broadcast", marks=pytest.mark.slow)])
def test_a_policy_whose_worker_lives_on_another_host(make_run, namespaces, weights):
    """Learner here, engine there, where it may be lost: what the policy learns from goes on coming.

    What only processes of one host share lies in no folder that both see.
    """
    run = make_run(steps=12)
    keep_qwen(run.config, weights)
    hosts = ",".join(f"{name}={address}" for name, address in zip(namespaces.hosts, namespaces.addresses, strict=True))
    words = ["--hosts", hosts, "--launch.remote", REMOTE, "--exchange.host", "0.0.0.0"]
    first, second = namespaces.hosts
    run.start(argv=inside(first, "launch", str(run.config), *words))
    run.until(lambda: run.step("qwen") >= 1, "a step")
    there = psutil.Process(run.pid(f"supervisor/{second}"))
    assert run.pid("worker/qwen/0") in [child.pid for child in there.children(recursive=True)]
    shared = [path for path in run.folder.rglob("*") if path.is_socket() or path.suffix in (".ranks", ".progress")]
    assert shared == []

    if weights == "files":
        psutil.Process(run.pid("worker/qwen/0")).kill()
        run.until(lambda: "worker/qwen/0 was killed by signal 9" in run.log.read_text(), "word of the worker's death")
        told = run.step("qwen")
        run.until(lambda: run.step("qwen") > told, "a step after the loss of the worker")
    assert run.finish(240) == 0, run.tail()
    assert run.step("qwen") == 12
    assert not run.left_over()
