"""Memory of a unit's GPUs, as the driver reports it: how much is in use, and whether engines gave it back."""

from collections.abc import Iterable, Sequence

from mrl.processes.planning.devices import ask_driver

ASK_S = 5.0
"""Seconds that the driver has to answer one query."""
ASK_AGAIN_S = 1.0
"""Least seconds between a "not given back" and the next query."""
SPARE_MIB = 512
"""MiB that a GPU may hold beyond what it held at first and still count as given back."""
SLEEPER_MIB = 2048
"""MiB of a GPU that a sleeping server may hold: contexts, captured graphs, workspaces of kernels and collectives.

By their sources neither vLLM nor SGLang gives these back unless its options say so; their size was not measured."""
RETURN_S = 10.0
"""Seconds after which the driver surely shows the memory of an ended process as free."""


class UnitMemory:
    """Memory of the GPUs of one unit, compared with what they held at first."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = gpus
        self._first_mib = used_gpu_mib(gpus)
        self._refused_s: float | None = None
        """Monotonic time of the newest "not given back"; None after a "given back"."""
        self._held_since_s: float | None = None
        """Monotonic time of the first "not given back" since the memory was last free."""

    def is_given_back(self, now_s: float, *, num_sleepers: int) -> bool:
        """Whether the GPUs hold no more than at first, apart from SPARE_MIB and SLEEPER_MIB for each sleeping engine.

        Call this only when no other process is on the unit. A driver that does not answer proves nothing about a
        sleeping engine; without sleepers the end of all processes is proof enough.
        """
        if self._first_mib is None:
            return num_sleepers == 0
        if self._refused_s is not None and now_s - self._refused_s < ASK_AGAIN_S:
            return False
        now_mib = used_gpu_mib(self._gpus)
        spare_mib = SPARE_MIB + num_sleepers * SLEEPER_MIB
        is_free = num_sleepers == 0 if now_mib is None else all(
            held <= first + spare_mib for held, first in zip(now_mib, self._first_mib, strict=True)
        )  # fmt: skip
        self._refused_s = None if is_free else now_s
        self._held_since_s = None if is_free else now_s if self._held_since_s is None else self._held_since_s
        return is_free

    def is_kept(self, now_s: float) -> bool:
        """Whether memory that only sleeping engines can hold was not given back for more than RETURN_S."""
        return self._held_since_s is not None and now_s - self._held_since_s > RETURN_S


def used_gpu_mib(gpus: Sequence[str]) -> list[int] | None:
    """Return MiB in use on each of these GPUs, as the driver reports; None where the driver cannot be asked."""
    answer = _asked(gpus, "memory.used")
    return None if answer is None else read_used_mib(answer)


def gpu_models(gpus: Sequence[str]) -> list[str]:
    """Return the driver's name for the model of each of these GPUs; [] where the driver cannot be asked."""
    models = [line.strip() for line in _asked(gpus, "name") or ()]
    return models if len(models) == len(gpus) and all(models) else []


def _asked(gpus: Sequence[str], what: str) -> list[str] | None:
    if not gpus:
        return None
    ask = [f"--id={','.join(gpus)}", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    return ask_driver(ask, within_s=ASK_S)[0]


def read_used_mib(lines: Iterable[str]) -> list[int] | None:
    """Return the numbers in `nvidia-smi`'s answer; None when a line is no number ("[N/A]" on some devices)."""
    words = [line.strip() for line in lines if line.strip()]
    return [int(word) for word in words] if words and all(word.isdigit() for word in words) else None
