"""The launchers that people use by hand."""

import os
import subprocess
from pathlib import Path

LAUNCHERS = Path(__file__).parents[3] / "launchers"


def test_torchrun_by_hand_meets_in_private_files_of_this_host(tmp_path: Path) -> None:
    """As under the supervisor: no standalone store, loopback only, a rendezvous of its own."""
    folder = tmp_path / "my run"
    folder.mkdir()
    show = tmp_path / "show"
    show.write_text('#!/bin/bash\nprintf "%s\\n" "$@"; env\n')
    show.chmod(0o755)
    done = subprocess.run(
        ["bash", str(LAUNCHERS / "torchrun.sh"), str(folder), "qwen", "2"],
        env={**os.environ, "PYTHON": str(show), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
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
