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
        (
            "vllm",
            Machine(575, (2, 31), True, True),
            [r"vllm on GPUs: driver 575; wanted >= 580.*cure: install a newer"],
        ),
        ("sglang", Machine(600, (2, 31), True, True), [r"sglang on GPUs: glibc 2\.31; wanted >= 2\.34; cure: "]),
        (
            "vllm",
            Machine(580, (2, 9), False, True),
            [r"glibc 2\.9; wanted >= 2\.28", r"no Python 3\.11.*engine-env vllm"],
        ),
        (
            "vllm",
            Machine(580, (2, 34), True, False),
            [r"vllm on GPUs: no C\+\+ .*cure: install g\+\+.*python3\.11-dev"],
        ),
        ("sglang", Machine(None, (2, 34), True, False), []),
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


@pytest.mark.parametrize(
    ("version", "has_headers", "can_compile"),
    [((3, 11), True, True), ((3, 11), False, False), ((3, 12), False, True)],
)
def test_compiling_takes_a_compiler_and_the_headers_of_python(tmp_path, monkeypatch, version, has_headers, can_compile):
    """Those of another Python than this are not known."""
    monkeypatch.setattr(wheel_limits.sysconfig, "get_path", lambda name: str(tmp_path / name))
    monkeypatch.setattr(wheel_limits.sys, "version_info", version)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if has_headers:
        (tmp_path / "include").mkdir()
        (tmp_path / "include" / "Python.h").touch()
    assert not this_machine().can_compile

    (tmp_path / "c++").touch(mode=0o755)
    assert this_machine().can_compile == can_compile


def test_limits_are_those_of_the_lists():
    """Their heads say the driver, and SGLang's the C library."""
    for engine in wheel_limits.GLIBC:
        assert f"driver {wheel_limits.DRIVER} or newer" in (RECIPES / f"{engine}-gpu.txt").read_text()
    assert "glibc 2.34" in (RECIPES / "sglang-gpu.txt").read_text()


def test_cudas_compiler_and_its_headers_are_of_one_version():
    """The headers refuse any other nvcc."""
    list_of = (RECIPES / "sglang-gpu.txt").read_text()
    parts = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime")
    versions = [re.findall(rf"^{part}==(\d+\.\d+)\.", list_of, re.MULTILINE) for part in parts]

    assert versions == [["13.0"]] * len(parts)
