"""Load of NVIDIA GPUs by their driver (NVML): busy share, memory, power.

The package `pynvml` (extra `nvml`) is optional; without the package or a driver there are no values of GPUs.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

MIB = 1024 * 1024
MODULE, EXTRA = "pynvml", "nvml"


class GpuLoad:
    """Asks the driver of this host about some GPUs. No call has a time limit: a faulty driver may never answer."""

    def __init__(self, gpus: Sequence[str]) -> None:
        """`gpus` are names as in CUDA_VISIBLE_DEVICES: numbers in the order of the bus, or ids of GPUs or MIG parts."""
        self._nvml, self.absent = _library() if gpus else (None, "no GPU")
        self._handles = [self._asked(self._handle, name) for name in gpus]

    def values(self) -> list[dict[str, float]]:
        """Return busy_share, memory_mib, memory_free_mib and power_w of each GPU, as far as the driver tells them.

        A part of a GPU (MIG) has values of memory alone.
        """
        return [{} if handle is None else self._of(handle) for handle in self._handles]

    def driver(self) -> str:
        """Return the version of the driver; empty without a driver."""
        told = self._asked(lambda nvml: nvml.nvmlSystemGetDriverVersion())
        return told.decode() if isinstance(told, bytes) else told or ""

    def _of(self, handle: Any) -> dict[str, float]:
        found: dict[str, float] = {}
        if (rates := self._asked(lambda nvml: nvml.nvmlDeviceGetUtilizationRates(handle))) is not None:
            found["busy_share"] = rates.gpu / 100
        if (memory := self._asked(lambda nvml: nvml.nvmlDeviceGetMemoryInfo(handle))) is not None:
            found |= {"memory_mib": memory.used / MIB, "memory_free_mib": memory.free / MIB}
        if (power_mw := self._asked(lambda nvml: nvml.nvmlDeviceGetPowerUsage(handle))) is not None:
            found["power_w"] = power_mw / 1000
        return found

    def _asked(self, ask: Callable[..., Any], *words: str) -> Any:
        """Return the driver's answer; None without a driver, or where it does not tell this value of this GPU."""
        if self._nvml is None:
            return None
        try:
            return ask(self._nvml, *words)
        except self._nvml.NVMLError:
            return None

    @staticmethod
    def _handle(nvml: ModuleType, name: str) -> Any:
        return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)


def _library() -> tuple[ModuleType | None, str]:
    """Return (the package, with a driver found, "") or (None, reason)."""
    if importlib.util.find_spec(MODULE) is None:
        return None, f"the package {MODULE} is not installed: pip install 'mrl[{EXTRA}]'"
    nvml = importlib.import_module(MODULE)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return None, f"NVML cannot be initialized: {error}"
    return nvml, ""
