"""Runs whose learners span two hosts, which are network namespaces."""

import sys

REMOTE = '["ip", "netns", "exec", "{host}"]'
SPREAD = [
    "--policies.qwen.learner.processes=4",
    "--policies.qwen.learner.hosts=2",
    "--policies.qwen.learner.sharding=shard",
    "--policies.llama.learner.processes=2",
    "--policies.llama.learner.hosts=2",
]


def launch(run, namespaces, *words: str) -> None:
    """Run `mrl launch` on the first host, which starts the second."""
    hosts = ",".join(f"{name}={address}" for name, address in zip(namespaces.hosts, namespaces.addresses, strict=True))
    argv = [sys.executable, "-m", "mrl", "launch", str(run.config), "--hosts", hosts, "--launch.remote", REMOTE]
    argv += ["--exchange.host", "0.0.0.0", *words]
    run.start(argv=["ip", "netns", "exec", namespaces.hosts[0], *argv])
