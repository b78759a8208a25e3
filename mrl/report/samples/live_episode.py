"""Episodes in the live view: the newest of each policy, one at a time, as a conversation that fits its place."""

from typing import Any

import msgspec
from rich.text import Text

from mrl.records.telemetry_messages import SampleRecord
from mrl.report.samples.answer_filter import shown_words
from mrl.report.samples.sample_lines import STAR, talk_within

SHOWN_S = 8.0
"""Seconds for which one episode is shown, however many others arrive meanwhile."""
PAUSE = ("", False)


class LiveEpisodes:
    """Newest own episode of each policy, and newest episode of a peer that it trained on, shown in turn."""

    def __init__(self) -> None:
        self._newest: dict[tuple[str, bool], SampleRecord] = {}
        """(policy, whether a peer wrote the episode) -> episode."""
        self._key = PAUSE
        self._shown: SampleRecord | None = None
        self._until_s = 0.0

    def take(self, sample: SampleRecord) -> None:
        """Take in a sample. A sample without turns is no episode and changes nothing."""
        if sample.turns:
            self._newest[sample.policy, sample.kind == "rescue"] = sample

    def forget_above(self, policy: str, step: int) -> None:
        """Drop episodes of the policy from steps above `step`, which a resume at `step` voided."""
        self._newest = {at: one for at, one in self._newest.items() if one.policy != policy or one.step <= step}

    def at(self, now_s: float, *, with_pauses: bool) -> SampleRecord | None:
        """Return the episode to show at `now_s`; None without any, and `with_pauses` once after each round."""
        keys = [*self._newest, *[PAUSE] * with_pauses]
        if not self._newest:
            return None
        if now_s >= self._until_s or self._key not in keys:
            self._key = keys[(keys.index(self._key) + 1) % len(keys) if self._key in keys else 0]
            self._shown, self._until_s = self._newest.get(self._key), now_s + SHOWN_S
        return self._shown


def episode_text(sample: SampleRecord, width: int, height: int, colour: str) -> Text:
    """Return at most `height` lines of `width` cells. Turns that a policy sampled have its colour and a star."""
    row: dict[str, Any] = msgspec.to_builtins(sample)
    text = Text(" episode ", "bold", overflow="ellipsis", no_wrap=True).append(shown_words(row), "default not bold")
    for line in talk_within(row, width - 1, height - 1):
        text.append(f"\n {line}", colour if line.startswith(STAR) else "dim")
    return text
