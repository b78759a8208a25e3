"""Whether a machine can run the pinned wheels for GPUs."""

import re

import pytest

from mrl.engines import wheel_limits
from mrl.engines.environment import RECIPES
from mrl.engines.wheel_limits import Machine, lacks, this_machine

FINE = Machine(580, (2, 34), True, True)


@pytest.mark.parametrize(
    ("engine", "machine", "told"),
    [
        ("vllm", FINE, []),
        ("sglang", FINE, []),
        ("vllm", Machine(None, None, True, True), []),
        ("vllm", Machine(575, (2, 31), True, True), [r"vllm on GPUs: driver 575; wanted >= 580.*cure: a newer driver"]),
        ("sglang", Machine(600, (2, 31), True, True), [r"sglang on GPUs: glibc 2\.31; wanted >= 2\.34; cure: "]),
        (
            "vllm",
            Machine(580, (2, 9), False, True),
            [r"glibc 2\.9; wanted >= 2\.28", r"no Python 3\.11.*engine-env vllm"],
        ),
        ("sglang", Machine(580, (2, 34), True, False), [r"sglang on GPUs: no nvcc by CUDA_HOME.*cure: .*CUDA 13"]),
        ("sglang", Machine(None, (2, 34), True, False), []),
        ("vllm", Machine(580, (2, 34), True, False), []),
    ],
)
def test_what_a_machine_lacks_is_told_in_one_line_with_its_cure(engine, machine, told):
    """What is not known is not told."""
    lines = lacks(engine, machine)

    assert len(lines) == len(told)
    assert all(re.search(pattern, line) for pattern, line in zip(told, lines, strict=True))


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version:", 535),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)\n", 580),
        ("something else", None),
    ],
)
def test_the_driver_is_read_from_the_kernel(tmp_path, monkeypatch, text, driver):
    """Both kinds of module say it."""
    monkeypatch.setattr(wheel_limits, "DRIVER_FILE", tmp_path / "version")
    assert this_machine().driver is None
    (tmp_path / "version").write_text(text)

    assert this_machine().driver == driver


def test_the_compiler_is_looked_for_where_sglang_does(tmp_path, monkeypatch):
    """CUDA_HOME before CUDA_PATH, and either before PATH, even where it has none; else the usual place."""
    for name in ("path", "home", "usual"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "nvcc").touch(mode=0o755)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(wheel_limits, "CUDA", tmp_path / "nowhere")
    assert not this_machine().has_nvcc

    monkeypatch.setattr(wheel_limits, "CUDA", tmp_path / "usual")
    assert this_machine().has_nvcc
    monkeypatch.setattr(wheel_limits, "CUDA", tmp_path / "nowhere")
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    assert this_machine().has_nvcc
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "nowhere"))
    assert not this_machine().has_nvcc
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert this_machine().has_nvcc


def test_limits_are_those_of_the_lists():
    """Their heads say the driver, and SGLang's the C library."""
    for engine in wheel_limits.GLIBC:
        assert f"driver {wheel_limits.DRIVER} or newer" in (RECIPES / f"{engine}-gpu.txt").read_text()
    assert "glibc 2.34" in (RECIPES / "sglang-gpu.txt").read_text()
