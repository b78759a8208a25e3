"""Load of a host: what is measured, that nobody waits for it, and the real NVML package with a library of C."""

import ctypes
import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from mrl.metrics import gpu_load, host_load
from mrl.metrics.gpu_load import GpuLoad
from mrl.metrics.host_load import HostLoad
from mrl.metrics.names import is_known

BOUND_S = 30.0
DRIVER = """
#include <string.h>
typedef struct { unsigned int gpu, memory; } util_t;
typedef struct { unsigned long long total, free, used; } memory_t;
static int places[3] = {0, 1, 2};
int nvmlInitWithFlags(unsigned int flags) { return INIT; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "told by C"; }
int nvmlSystemGetDriverVersion(char *text, unsigned int length) { strncpy(text, "999.1", length); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    if (index > 1) return 6;
    *device = &places[index];
    return 0;
}
int nvmlDeviceGetHandleByUUID(const char *name, void **device) {
    if (strncmp(name, "MIG-", 4)) return 6;
    *device = &places[2];
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *device, util_t *found) {
    if (*(int *)device == 2) return 3;
    found->gpu = 25 + 50 * *(int *)device;
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory_t *found) {
    found->total = 80ull << 30;
    found->used = (unsigned long long)(1 + *(int *)device) << 30;
    found->free = found->total - found->used;
    return 0;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned int *milliwatts) {
    if (*(int *)device == 2) return 3;
    *milliwatts = 350500;
    return 0;
}
"""
"""A library with the symbols that the package calls: two GPUs, and a part of one that tells its memory alone."""
ASK = """
import json, sys
from mrl.metrics.gpu_load import GpuLoad
load = GpuLoad(["0", "1", "7", "MIG-x", "GPU-gone"])
print(json.dumps([load.absent, load.driver(), load.values()]))
"""


def asked_with_driver(folder: Path, init: int) -> list[object]:
    """What `GpuLoad` says in a process in which the real package finds this library."""
    pytest.importorskip("pynvml", reason="pip install 'mrl[nvml]'")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = folder / "driver.c"
    source.write_text(DRIVER)
    command = [compiler, "-shared", "-fPIC", f"-DINIT={init}", "-o", str(folder / "libnvidia-ml.so.1"), str(source)]
    subprocess.run(command, check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder)}
    said = subprocess.run([sys.executable, "-c", ASK], env=environment, check=True, capture_output=True, timeout=60)
    found: list[object] = json.loads(said.stdout)
    return found


def test_the_driver_tells_what_it_can_of_each_gpu(tmp_path: Path) -> None:
    """By the real package; a GPU that is not there tells nothing, and a part of one its memory alone."""
    assert asked_with_driver(tmp_path, 0) == [
        "",
        "999.1",
        [
            {"busy_share": 0.25, "memory_mib": 1024.0, "memory_free_mib": 79 * 1024.0, "power_w": 350.5},
            {"busy_share": 0.75, "memory_mib": 2048.0, "memory_free_mib": 78 * 1024.0, "power_w": 350.5},
            {},
            {"memory_mib": 3072.0, "memory_free_mib": 77 * 1024.0},
            {},
        ],
    ]


def test_a_driver_that_does_not_start_is_none(tmp_path: Path) -> None:
    """As after its upgrade beneath a machine that runs; code 9."""
    absent, driver, values = asked_with_driver(tmp_path, 9)
    assert str(absent).startswith("NVML cannot be initialized: ")
    assert (driver, values) == ("", [{}] * 5)


def test_the_real_package_has_what_is_called() -> None:
    """Names, numbers of arguments, and fields of what comes back."""
    nvml = pytest.importorskip("pynvml", reason="pip install 'mrl[nvml]'")
    takes = {
        "nvmlInit": 0,
        "nvmlSystemGetDriverVersion": 0,
        "nvmlDeviceGetHandleByIndex": 1,
        "nvmlDeviceGetHandleByUUID": 1,
        "nvmlDeviceGetUtilizationRates": 1,
        "nvmlDeviceGetMemoryInfo": 1,
        "nvmlDeviceGetPowerUsage": 1,
    }
    for name, num in takes.items():
        inspect.signature(getattr(nvml, name)).bind(*range(num))
        assert f"nvml.{name}" in inspect.getsource(gpu_load), name
    assert [name for name, _ in nvml.c_nvmlUtilization_t._fields_] == ["gpu", "memory"]
    assert dict(nvml.c_nvmlMemory_t._fields_) == dict.fromkeys(("total", "free", "used"), ctypes.c_ulonglong)
    assert issubclass(nvml.NVMLError, Exception)


def test_without_package_or_gpu_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything loaded."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    load = GpuLoad(["0"])
    assert load.absent == "the package pynvml is not installed: pip install 'mrl[nvml]'"
    assert (load.values(), load.driver()) == ([{}], "")
    assert (GpuLoad([]).absent, GpuLoad([]).values()) == ("no GPU", [])


def measured(load: HostLoad) -> dict[str, float]:
    began_s = time.monotonic()
    while not (found := load.take()):
        assert time.monotonic() - began_s < BOUND_S
        time.sleep(0.001)
    load.close()
    return found


def test_a_host_tells_its_load_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In plausible numbers, each under a name of the table; what was taken is not told again."""
    told = [{"busy_share": 0.5}, {}, {"memory_mib": 7.0}]
    monkeypatch.setattr(host_load, "GpuLoad", lambda gpus: SimpleNamespace(values=lambda: told))
    found = measured(HostLoad(tmp_path, ["0", "1", "2"], host="node/1", every_s=0.01))

    parts = ("cpu_share", "disk_free_mib", "memory_free_mib", "memory_mib")
    names = [f"host/{part}/node:1" for part in parts]
    assert sorted(found) == ["gpu/busy_share/node:1:0", "gpu/memory_mib/node:1:2", *names]
    assert all(map(is_known, found))
    mib = 1024 * 1024
    assert 0 <= found[names[0]] <= 1
    assert found[names[1]] == pytest.approx(psutil.disk_usage(str(tmp_path)).free / mib, rel=0.1)
    assert 0 < found[names[2]] < (psutil.virtual_memory().total + psutil.swap_memory().total) / mib
    assert 0 < found[names[3]] < psutil.virtual_memory().total / mib
    assert "host/cpu_share/here" in measured(HostLoad(tmp_path, [], host="", every_s=0.01))


def test_what_cannot_be_told_leaves_the_rest(tmp_path: Path) -> None:
    """A folder that is gone."""
    found = measured(HostLoad(tmp_path / "gone", [], host="", every_s=0.01))
    assert sorted(found) == ["host/cpu_share/here", "host/memory_free_mib/here", "host/memory_mib/here"]


def test_nobody_waits_for_a_driver_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No values come, and the calls return."""
    is_asked, goes_on = threading.Event(), threading.Event()

    def hang(gpus: object) -> SimpleNamespace:
        is_asked.set()
        goes_on.wait(BOUND_S)
        return SimpleNamespace(values=list)

    monkeypatch.setattr(host_load, "GpuLoad", hang)
    load = HostLoad(tmp_path, ["0"], host="", every_s=0.01)
    assert is_asked.wait(BOUND_S)
    assert load.take() == {}
    load.close()
    goes_on.set()


def test_zero_measures_nothing(tmp_path: Path) -> None:
    """No thread is started."""
    before = threading.active_count()
    assert HostLoad(tmp_path, [], host="", every_s=0).take() == {}
    assert threading.active_count() == before
