"""Environments for tests of the rollout loop; imported by environment processes, by this name, through PYTHONPATH."""

import os


class Counting:
    """Environment that ends the episode after `turns` turns, and rewards the number of the seed."""

    def reset(self, seed, turns=3, **row):
        self._seed, self._turns, self._left = seed, turns, turns
        self._row = row
        if row.get("fails") == "reset":
            raise RuntimeError("no start")
        if row.get("first"):
            return "a" * row["first"]
        return f"seed {os.getpid() if row.get('fails') == 'differs' else seed}"

    def step(self, text):
        self._left -= 1
        if self._row.get("fails") == "step":
            os._exit(3)
        last = "z" * self._row.get("last", 0)
        return f"left {self._left}{last * (self._left == 0)}", self._left == 0

    def get_reward(self, answer=""):
        return float(len(answer)) if self._row.get("counts_letters") else float(self._seed)


class Asking:
    """Environment with a tool, which rewards the tool's use."""

    def reset(self, seed):
        self._asked = False
        return f"seed {seed}"

    def ask(self, key: str) -> str:
        """Asks."""
        self._asked = True
        return key

    def get_reward(self):
        return float(self._asked)


class Listening:
    """Environment that repeats all turns so far, ends after four turns, and rewards the number of the seed."""

    def reset(self, seed, **row):
        self._seed, self._row, self._heard = seed, row, []
        return f"seed {seed}"

    def step(self, text):
        self._heard.append(f"{text}{os.getpid()}" if self._row.get("says") == "never the same" else text)
        return f"heard {' '.join(self._heard)}", len(self._heard) == 4

    def get_reward(self):
        return float(self._seed)
