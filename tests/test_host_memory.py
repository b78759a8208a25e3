"""How much memory a process may have: that of the host, or less where its control group says so."""

from pathlib import Path

import psutil
import pytest

from mrl import host_memory
from mrl.host_memory import free_memory_bytes, host_memory_bytes

MIB = 1024**2
STAT = "anon {anon}\ninactive_file {file}\nactive_file 0\ntotal_inactive_file {file}\ntotal_active_file 0\n"


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make a control group of so many MiB, of which some are used, the page cache included."""

    def make(line: str, folder: str, names: tuple[str, str], *, limit: str, used_mib: int, cache_mib: int = 0) -> None:
        own = tmp_path / "fs" / folder
        own.mkdir(parents=True, exist_ok=True)
        (own / names[0]).write_text(f"{limit}\n")
        (own / names[1]).write_text(f"{used_mib * MIB}\n")
        (own / "memory.stat").write_text(STAT.format(anon=1, file=cache_mib * MIB))
        (tmp_path / "cgroup").write_text(f"1:cpu:/\n{line}\n")
        monkeypatch.setattr(host_memory, "OF_PROCESS", tmp_path / "cgroup")
        monkeypatch.setattr(host_memory, "GROUPS", tmp_path / "fs")

    return make


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/job", "job", host_memory.V2[:2]),
        ("0::/job/task", "job", host_memory.V2[:2]),
        ("0::/of/the/host", "", host_memory.V2[:2]),
        ("4:hugetlb,memory:/job", "memory/job", host_memory.V1[:2]),
        ("4:memory:/docker/0123", "memory", host_memory.V1[:2]),
    ],
)
def test_a_control_group_is_a_limit(group, line: str, folder: str, names: tuple[str, str]) -> None:
    """Its own, one above it, or, in a container, the only one that is to be seen; the page cache is no use of it."""
    group(line, folder, names, limit=str(96 * MIB), used_mib=40, cache_mib=10)
    assert host_memory_bytes() == 96 * MIB
    assert free_memory_bytes() == 66 * MIB + psutil.swap_memory().free


def test_a_group_without_a_limit_is_none(group) -> None:
    group("0::/", "", host_memory.V2[:2], limit="max", used_mib=40)
    assert host_memory_bytes() == psutil.virtual_memory().total


def test_without_groups_it_is_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "OF_PROCESS", tmp_path / "none")
    assert host_memory_bytes() == psutil.virtual_memory().total
    assert 0 < free_memory_bytes() <= psutil.virtual_memory().total + psutil.swap_memory().total
