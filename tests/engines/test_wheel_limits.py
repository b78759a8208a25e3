"""Whether a machine can run the pinned wheels for GPUs."""

import re
from pathlib import Path

import pytest

from mrl.engines import wheel_limits
from mrl.engines.wheel_limits import Machine, lacks, this_machine

FINE = Machine(580, (2, 34), True)


@pytest.mark.parametrize(
    ("engine", "machine", "told"),
    [
        ("vllm", FINE, []),
        ("sglang", FINE, []),
        ("vllm", Machine(None, None, True), []),
        ("vllm", Machine(575, (2, 31), True), [r"vllm on GPUs: driver 575; wanted >= 580.*cure: a newer driver"]),
        ("sglang", Machine(600, (2, 31), True), [r"sglang on GPUs: glibc 2\.31; wanted >= 2\.34; cure: "]),
        (
            "vllm",
            Machine(580, (2, 9), False),
            [r"glibc 2\.9; wanted >= 2\.28", r"no Python 3\.11.*engine-env vllm"],
        ),
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


def test_limits_are_those_of_the_lists():
    """Their heads say the driver, and SGLang's the C library."""
    recipes = Path(__file__).parents[2] / "mrl" / "engines" / "recipes"
    for engine in wheel_limits.GLIBC:
        assert f"driver {wheel_limits.DRIVER} or newer" in (recipes / f"{engine}-gpu.txt").read_text()
    assert "glibc 2.34" in (recipes / "sglang-gpu.txt").read_text()
