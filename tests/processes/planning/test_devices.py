"""The GPUs that a host shows, by the word of its user, its driver, or its files. A script stands in for nvidia-smi."""

import time
from pathlib import Path

import pytest

from mrl.processes.planning import devices
from mrl.processes.planning.devices import ask_driver, listed_gpus, sizes_mib, visible_gpus

TWO = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5d1e0a3c-1)\nGPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-77aa-2)\n"
CUT = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-b08b-0)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4-1)
  MIG 3g.20gb     Device  1: (UUID: MIG-cba6-2)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-b08b-1)
"""


@pytest.fixture(autouse=True)
def _ask_anew() -> None:
    devices._shown.cache_clear()


def fake_driver(folder: Path, script: str) -> dict[str, str]:
    """An environment whose nvidia-smi is this script."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def device_files(folder: Path, *numbers: int) -> Path:
    folder.mkdir()
    for name in (*(f"nvidia{number}" for number in numbers), "nvidiactl", "nvidia-uvm"):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("told", "names"),
    [
        ("3,1", ["3", "1"]),
        ("GPU-77aa, MIG-c6d4-1", ["GPU-77aa", "MIG-c6d4-1"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,-1,1", ["0"]),
    ],
)
def test_what_the_user_or_slurm_names_is_taken_as_it_is(tmp_path: Path, told: str, names: list[str]) -> None:
    """The driver is not asked, also where the list is empty. As CUDA reads it, what is no name ends it."""
    environment = fake_driver(tmp_path, "touch $0.asked; exit 1")
    assert visible_gpus({**environment, "CUDA_VISIBLE_DEVICES": told}, device_files(tmp_path / "dev", 0)) == names
    assert not (tmp_path / "nvidia-smi.asked").exists()


def test_gpus_are_called_by_the_ids_of_their_driver(tmp_path: Path) -> None:
    """A container that was given /dev/nvidia2 and /dev/nvidia3 calls neither "2" nor "3"."""
    environment = fake_driver(tmp_path, f'[ "$1" = "-L" ] && printf "{TWO}"')
    assert visible_gpus(environment, device_files(tmp_path / "dev", 2, 3)) == ["GPU-5d1e0a3c-1", "GPU-77aa-2"]


def test_of_a_gpu_in_parts_its_parts_are_offered() -> None:
    """CUDA shows no whole one then; the one that is not cut stays whole."""
    assert listed_gpus(CUT.splitlines()) == ["MIG-c6d4-1", "MIG-cba6-2", "GPU-b08b-1"]
    assert listed_gpus(["No devices found."]) == []


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (
            "echo 'Driver/library version mismatch' >&2; exit 18",
            "failed with exit code 18: Driver/library version mismatch",
        ),
        ("echo 'No devices found.'", "lists no GPU"),
    ],
)
def test_a_driver_that_lists_none_is_told_of_and_cuda_counts_from_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, why: str
) -> None:
    """As many as there are device files, whatever their numbers."""
    environment = fake_driver(tmp_path, script)
    assert visible_gpus(environment, device_files(tmp_path / "dev", 2, 10)) == ["0", "1"]
    told = capsys.readouterr()
    assert why in told.out + told.err


def test_a_host_without_gpus_shows_none_and_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the driver's program nor a device file."""
    assert visible_gpus({"PATH": str(tmp_path)}, device_files(tmp_path / "dev")) == []
    told = capsys.readouterr()
    assert told.out + told.err == ""


def test_a_driver_that_hangs_is_left_alone(tmp_path: Path) -> None:
    """Nobody waits for it, nor for what it started, which holds its output open."""
    environment = fake_driver(tmp_path, "trap '' TERM\nsleep 600 &\nsleep 600")
    began_s = time.monotonic()
    assert ask_driver(["-L"], path=environment["PATH"], within_s=0.2) == (
        None,
        "nvidia-smi did not answer within 0.2 s",
    )
    assert time.monotonic() - began_s < 60


def test_sizes_are_found_by_number_and_by_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA takes the beginning of an id as well; what the driver does not tell is left out."""
    rows = "0, GPU-5d1e0a3c-1, 81559\\n1, GPU-77aa-2, [N/A]\\n2, GPU-9999-3, 24564\\n"
    monkeypatch.setenv("PATH", fake_driver(tmp_path, f'printf "{rows}"')["PATH"])
    assert sizes_mib(["GPU-5d1e", "1", "2", "MIG-1"]) == {"GPU-5d1e": 81559.0, "2": 24564.0}
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert sizes_mib(["0"]) == {}
