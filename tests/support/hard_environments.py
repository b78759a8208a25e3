"""Environments that misbehave on demand; imported by environment processes, by this name, through PYTHONPATH."""

import os
import re
import time
from contextlib import suppress
from pathlib import Path

SIGNS = {"loop", "sleep", "regex", "die", "eat", "leave"}


class Echo:
    """Environment that echoes a turn, or does as its text says: hang in Python or C, sleep, die, return nonsense."""

    def reset(self, seed, **row):
        self._turns = 0
        self._row = row
        return self._do(row["reset"]) if "reset" in row else f"seed {seed}"

    def step(self, text):
        self._turns += 1
        return self._do(text)

    def get_reward(self):
        return self._row.get("reward", float(self._turns))

    def _do(self, text):
        if text in SIGNS and self._row.get("sign"):
            Path(self._row["sign"]).write_text("now")  # a pipe, whose reader learns that the hanging begins
        match text:
            case "loop":
                while True:
                    pass
            case "regex":
                re.match(r"(a+)+$", "a" * 64 + "b")
            case "sleep":
                time.sleep(1000)
            case "die":
                os._exit(3)
            case "leave":
                raise SystemExit(4)
            case "raise":
                raise KeyError("n")
            case "eat":
                return str(len([bytearray(64 * 1024 * 1024) for _ in range(1000)]))
            case "long":
                return "x" * 10_000_000
            case "surrogate":
                return "\ud800"
            case "bytes":
                return b"\xff"
            case "number":
                return 7
            case "nan":
                return "bad", float("nan"), True
            case "infinite":
                return "bad", float("inf"), True
            case "end":
                return "over", True
            case "pid":
                return str(os.getpid())
            case "pause":
                time.sleep(0.2)
        return f"{self._turns}: {text}"


class Closing(Echo):
    """Environment that leaves a mark when it is closed, and may hang there."""

    def close(self):
        if "closed" in self._row:
            Path(self._row["closed"]).touch()
        if self._row.get("hangs"):
            time.sleep(1000)


class Stubborn(Closing):
    """Environment that swallows every exception, and plays on."""

    def _do(self, text):
        with suppress(BaseException):
            return super()._do(text)
        return "I heard nothing"


class Changing(Echo):
    """Environment whose first message differs between processes."""

    def reset(self, seed, **row):
        super().reset(seed)
        return str(os.getpid())


class Locking(Echo):
    """Environment with an object that belongs to the thread which made it, as database connections do."""

    def reset(self, seed, **row):
        import sqlite3

        self._db = sqlite3.connect(":memory:")
        return super().reset(seed)

    def step(self, text):
        return str(self._db.execute("select 6 * 7").fetchone()[0])


class Answered:
    """Environment that rewards the length of the last answer."""

    def reset(self, seed):
        return f"seed {seed}"

    def say(self, text: str) -> str:
        """Repeats."""
        return text

    def get_reward(self, answer=""):
        return float(len(answer))


class Shop:
    """Environment with tools, as TRL's classes have them."""

    def reset(self, *, item="bread", **row):
        self._item = item
        self.done = False
        return f" Buy {item}."

    def price(self, name: str, count: int = 1) -> float:
        """Asks for the price
        of something.

        Args:
            name: What it is,
                in one word.
            count (int): How many.

        Returns:
            The price.
        """
        if name == "everything":
            raise MemoryError
        if name != self._item:
            raise LookupError(f"no {name} here")
        return 2.5 * count

    def buy(self) -> None:
        """Buys, and leaves the shop."""
        self.done = True

    def get_reward(self, answer=""):
        return float(self.done or answer == "2.5")

    def _hidden(self):
        """No tool."""
