"""What is still on a unit: processes of an engine, wherever they went, and memory that a GPU has not given back."""

from collections.abc import Iterable, Mapping, Sequence

import psutil

from mrl.launch.devices import ask_driver

ASK_S = 5.0


def processes_with(variables: Mapping[str, str]) -> list[int]:
    """Processes of this user that have all of these in the environment that they were started with."""
    return [pid for pids in grouped_by("", variables).values() for pid in pids]


def grouped_by(name: str, variables: Mapping[str, str]) -> dict[str, list[int]]:
    """The same by the value of another variable, "" where it is not set.

    Every descendant inherits them, also one that leads a session of its own or whose parent has died. Those that have
    ended and are not yet reaped do not count: they hold nothing.
    """
    found: dict[str, list[int]] = {}
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:  # of another user, or gone
            continue
        if variables.items() <= environment.items():
            found.setdefault(environment.get(name, ""), []).append(process.pid)
    return found


def used_gpu_mib(gpus: Sequence[str]) -> list[int] | None:
    """Memory in use on each of these GPUs, by the driver's own word; None where it cannot be asked."""
    answer = _asked(gpus, "memory.used")
    return None if answer is None else read_used_mib(answer)


def gpu_models(gpus: Sequence[str]) -> list[str]:
    """What the driver calls each of these GPUs; empty where it cannot be asked."""
    models = [line.strip() for line in _asked(gpus, "name") or ()]
    return models if len(models) == len(gpus) and all(models) else []


def _asked(gpus: Sequence[str], what: str) -> list[str] | None:
    if not gpus:
        return None
    ask = [f"--id={','.join(gpus)}", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    return ask_driver(ask, within_s=ASK_S)[0]


def read_used_mib(lines: Iterable[str]) -> list[int] | None:
    """The numbers of `nvidia-smi`'s answer; None when one of them is none ("[N/A]" on some devices)."""
    words = [line.strip() for line in lines if line.strip()]
    return [int(word) for word in words] if words and all(word.isdigit() for word in words) else None
