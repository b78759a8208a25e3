"""Where a part of a stage measures, and where its figures go: one JSON line each, told as soon as it is known."""

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
    """A part that cannot be run here; the message says what is missing."""


@dataclass(frozen=True)
class Bench:
    """One part's place."""

    stage: str
    part: str
    device: str
    """"cuda" or "cpu"."""
    device_name: str
    folder: Path
    """Of the results."""
    scratch: Path
    """Of what the parts of this call leave for each other; removed at the end."""
    ends_at_s: float
    """By `time.monotonic`: when the stage's time is used up."""
    lines_to: int
    """File descriptor of the lines."""

    def of(self, on_gpu: T, on_cpu: T) -> T:
        """The shape for this device."""
        return on_gpu if self.device == "cuda" else on_cpu

    @property
    def left_s(self) -> float:
        """Of the stage's time."""
        return self.ends_at_s - time.monotonic()

    def tell(self, name: str, value: float | str, unit: str, **more: Any) -> None:
        """A figure. Raises ValueError for one that is no finite number."""
        if not isinstance(value, str) and not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
        self.write({"part": self.part, "name": name, "value": value, "unit": unit, **more})

    def write(self, line: dict[str, Any]) -> None:
        """One line to the file and to whoever looks on."""
        text = json.dumps({"stage": self.stage, **line, "device": self.device_name}, allow_nan=False) + "\n"
        with (self.folder / FILE).open("a", encoding="utf-8") as file:
            file.write(text)
        os.write(self.lines_to, text.encode())

    def settle(self) -> None:
        """Wait for what is queued on the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, act: Callable[[], object], rounds: int = 3) -> float:
        """The best of some rounds after one that warms up."""
        best = math.inf
        for number in range(rounds + 1):
            self.settle()
            began_s = time.perf_counter()
            act()
            self.settle()
            best = min(best, time.perf_counter() - began_s) if number else best
        return best
