"""The launchers that people use by hand."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from mrl.config.schema import RunConfig
from mrl.learner.ranks.rank_place import rank_place
from mrl.processes.planning.slurm import lead_s
from mrl.transport.endpoints import ADDRESS, HOST

LAUNCHERS = Path(__file__).parents[3] / "launchers"
TASKS = {"t": {"source": "words", "dataset": "reverse"}}


OF_THE_LAUNCHER = ("HOSTS", "PLACE", "ADDRESS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def by_hand(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The launcher in front of a Python that prints its words and its environment."""
    show = tmp_path / "show"
    show.write_text('#!/bin/bash\nprintf "%s\\n" "$@"; env\n')
    show.chmod(0o755)
    others = {name: value for name, value in os.environ.items() if name not in OF_THE_LAUNCHER}
    return subprocess.run(
        ["bash", str(LAUNCHERS / "torchrun.sh"), str(tmp_path / "my run"), "qwen", "2"],
        env={**others, "PYTHON": str(show), "TMPDIR": str(tmp_path), **variables},
        capture_output=True,
        text=True,
    )


def test_torchrun_by_hand_meets_in_private_files_of_this_host(tmp_path: Path) -> None:
    """As under the supervisor: no standalone store, loopback only, a rendezvous of its own."""
    folder = tmp_path / "my run"
    folder.mkdir()
    done = by_hand(tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert "--standalone" not in said
    assert said[said.index("--rdzv-conf") + 1] == "store_type=file,keep_alive_interval=600"
    meeting = said[said.index("--rdzv-id") + 1]
    assert meeting.startswith("qwen-by-hand-")
    (local,) = tmp_path.glob("mrl-by-hand-*")
    assert said[said.index("--rdzv-endpoint") + 1] == str(local / meeting)
    assert {"GLOO_SOCKET_IFNAME=lo", "NCCL_SOCKET_IFNAME=lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"} <= set(said)
    assert f"MRL_LOCAL_FOLDER={local}" in said
    assert local.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == []
    assert said[said.index("--nproc-per-node") + 1] == "2"


def test_torchrun_by_hand_tells_the_ranks_of_several_hosts_who_they_are(tmp_path: Path) -> None:
    """What the supervisor would; they choose the interface by themselves. Agents do not speak to each other."""
    done = by_hand(tmp_path, HOSTS="a,b", PLACE="1", ADDRESS="10.0.0.2")
    said = done.stdout.splitlines()
    place = rank_place(dict(line.split("=", 1) for line in said if "=" in line) | {"RANK": "1", "WORLD_SIZE": "2"})
    assert (place.rank, place.size, place.hosts) == (3, 4, ("a", "b"))
    assert {f"{HOST}=b", f"{ADDRESS}=10.0.0.2", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"} <= set(said)
    assert not [line for line in said if "SOCKET_IFNAME" in line]
    assert said[said.index("--rdzv-conf") + 1] == "store_type=file,keep_alive_interval=600"
    by_name = by_hand(tmp_path, HOSTS="a,b", PLACE="0").stdout.splitlines()
    assert f"{HOST}=a" in by_name
    assert not [line for line in by_name if line.startswith(f"{ADDRESS}=")], "its hostname says it"


@pytest.mark.parametrize(
    ("place", "told"), [({}, "PLACE: which of HOSTS this one is"), ({"PLACE": "2"}, "HOSTS has no such PLACE")]
)
def test_torchrun_by_hand_wants_to_know_which_host_this_is(tmp_path: Path, place: dict[str, str], told: str) -> None:
    """Before it starts anything."""
    done = by_hand(tmp_path, HOSTS="a,b", **place)
    assert (done.returncode, done.stdout) == (1, "")
    assert told in done.stderr


@pytest.mark.parametrize(
    ("launcher", "given"),
    [("slurm.sbatch", r"TERM@(\d+)"), ("kubernetes.yaml", r"terminationGracePeriodSeconds: (\d+)")],
)
def test_a_run_by_hand_has_time_to_save(launcher: str, given: str) -> None:
    """As much as `mrl launch --slurm` gives a small model; and whoever has a large one reads there what it needs."""
    text = (LAUNCHERS / launcher).read_text()
    needed_s = lead_s(
        RunConfig.model_validate({"run": {"name": "r", "steps": 1}, "tasks": TASKS, "policies": {"a": {}}})
    )
    assert int(re.search(given, text)[1]) >= needed_s  # type: ignore[index]
    assert "supervision.stop_s" in text
