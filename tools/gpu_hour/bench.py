"""Place of a part of a stage, and the way of its figures: one JSON line each, written as soon as it is known."""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
FILE = "gpu_hour.jsonl"


class SkippedError(Exception):
    """A part that cannot be run on this machine; the message says what is missing."""


@dataclass(frozen=True)
class Bench:
    """Place of one part: its device, folders, time and output."""

    stage: str
    part: str
    device: str
    """"cuda" or "cpu"."""
    device_name: str
    folder: Path
    """Folder of the results."""
    scratch: Path
    """Folder of files that the parts of this call leave for each other; removed at the end."""
    ends_at_s: float
    """Time, by `time.monotonic`, at which the stage's time is used up."""
    lines_to: int
    """File descriptor to which the lines are also written."""

    def of(self, on_gpu: T, on_cpu: T) -> T:
        """Value for this device."""
        return on_gpu if self.device == "cuda" else on_cpu

    @property
    def left_s(self) -> float:
        """Seconds left of the stage's time."""
        return self.ends_at_s - time.monotonic()

    def tell(self, name: str, value: float | str, unit: str, **more: Any) -> None:
        """Write a figure. Raises ValueError for a number that is not finite."""
        if not isinstance(value, str) and not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
        self.write({"part": self.part, "name": name, "value": value, "unit": unit, **more})

    def write(self, line: dict[str, Any]) -> None:
        """Write one line to the file and to `lines_to`."""
        text = json.dumps({"stage": self.stage, **line, "device": self.device_name}, allow_nan=False) + "\n"
        with (self.folder / FILE).open("a", encoding="utf-8") as file:
            file.write(text)
        os.write(self.lines_to, text.encode())

    def settle(self) -> None:
        """Wait for the work that is queued on the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, act: Callable[[], object], rounds: int = 3) -> float:
        """Seconds of the best of some rounds, after one that warms up."""
        best = math.inf
        for number in range(rounds + 1):
            self.settle()
            began_s = time.perf_counter()
            act()
            self.settle()
            best = min(best, time.perf_counter() - began_s) if number else best
        return best
