"""Values that a verifier may return for an answer, and the kinds of failure where it returns no reward.

A reward is a finite number, or several by name: the answer's reward is then their weighted sum. Any other value is a
failure of one of a few kinds, described in one line with the file and line of its cause.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

MAX_REWARD = 1e6
"""Largest absolute reward. Sums and differences of rewards stay below the bound of values that cross between
processes."""

RAISED = "raised"
NO_NUMBER = "no_number"
NOT_FINITE = "not_finite"
TOO_LARGE = "too_large"
NAMES = "reward_names"
MEMORY = "memory"
TIMEOUT = "timeout"
EXITED = "exited"
TOO_LONG = "too_long"
UNREADABLE = "unreadable"
UNEVALUATED = "unevaluated"
FAILURES = {
    RAISED: "the verifier raised an exception",
    NO_NUMBER: "the verifier returned neither a number nor a dict of named numbers",
    NOT_FINITE: "the verifier returned NaN or an infinity",
    TOO_LARGE: f"the verifier returned a number above {MAX_REWARD:,.0f} in absolute value",
    NAMES: "the verifier returned other reward names than the task has",
    MEMORY: "the verifier exceeded the memory limit of its process",
    TIMEOUT: "the verifier exceeded its time limit",
    EXITED: "the verifier's process ended",
    TOO_LONG: "the verifier was not called, because its input is too long",
    UNREADABLE: "the data set's own scorer raised an exception, because it cannot read the answer",
    UNEVALUATED: "the evaluator returned no text for the answer",
}
"""Kind of failure -> its meaning."""
OF_THE_ANSWER = (UNREADABLE, UNEVALUATED)
"""Kinds for which the answer is to blame: it is wrong, and no verifier has failed."""

UNNAMED = ""
"""Name of a reward that was returned without one."""
MAX_NAMED = 16
MAX_WORDS_CHARS, MAX_PLACE_CHARS = 500, 300
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """Result of a verifier for one answer: rewards by name, or the kind of failure and how it came about."""

    rewards: dict[str, float] = {}
    failure: str = ""
    words: str = ""
    spent: dict[str, int] = {}
    """Cost of the verdict by name, where the verifier states it."""

    @classmethod
    def of(cls, reward: float) -> "Outcome":
        """Return the outcome of a single number."""
        return cls({UNNAMED: reward})


def with_costs(outcome: Outcome, told: object) -> Outcome:
    """Return the outcome with the cost that the verifier's value or exception states (`spent`)."""
    spent = getattr(told, "spent", None)
    return msgspec.structs.replace(outcome, spent=spent._asdict()) if isinstance(spent, JudgeCosts) else outcome


class JudgeCosts(NamedTuple):
    """Cost of questions to a judge: requests sent, tokens that the server counted, and answers found in the cache."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: int = 0

    def plus(self, other: "JudgeCosts") -> "JudgeCosts":
        """Return the sum of both."""
        return JudgeCosts(*(one + two for one, two in zip(self, other, strict=True)))


class CodeLine(NamedTuple):
    """One line of code in a traceback."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        file = os.path.relpath(self.file) if self.file.startswith(os.getcwd() + os.sep) else self.file
        return f"{file}:{self.line} in {self.function}"


def place_of(lines: Sequence[CodeLine]) -> str:
    """Return where a failure happened: the innermost of `lines`, then the verifier's own line if that is another.

    `lines` begin with the verifier. Example: "/usr/lib/python3.11/json/decoder.py:355 in raw_decode, called at
    my_verifiers.py:7 in judge".
    """
    if not lines:
        return ""
    own = next(line for line in reversed(lines) if line.file == lines[0].file)
    return f"{lines[-1]}" if own is lines[-1] else f"{lines[-1]}, called at {own}"


def failed(kind: str, what: str, place: str = "") -> Outcome:
    """Return an outcome of this kind of failure, described in one line."""
    place = f" ({place[:MAX_PLACE_CHARS]})" * bool(place)
    words = " ".join(what.split())[: MAX_WORDS_CHARS - len(place)] + place
    return Outcome(failure=kind, words=words.encode(errors="replace").decode())


def outcome_of(returned: object, place: str = "") -> Outcome:
    """Return the outcome that a verifier's return value means; `place` is the verifier's place in its file."""
    if not isinstance(returned, Mapping):
        return _checked({UNNAMED: returned}, place)
    if not returned or len(returned) > MAX_NAMED:
        return failed(NAMES, f"returned {len(returned)} rewards; wanted 1 to {MAX_NAMED}", place)
    for name in returned:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return failed(NAMES, f"returned a reward named {name!r:.80}; wanted letters, digits, '_', '.', '-'", place)
    return _checked(returned, place)


def weighted_sum(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the reward of an answer; a name without a weight has weight 1."""
    return math.fsum(weights.get(name, 1.0) * reward for name, reward in rewards.items())


def other_names(got: Mapping[str, float], wanted: Sequence[str], *, known_from: str) -> str:
    """Return what is wrong with the names of these rewards, in words; empty when they are the `wanted` ones."""
    unknown, missing = sorted(set(got) - set(wanted)), sorted(set(wanted) - set(got))
    parts = [f"unknown reward {_named(unknown)}"] * bool(unknown)
    parts += [f"missing reward {_named(missing)}"] * bool(missing)
    return f"{', '.join(parts)}; {known_from} {_named(sorted(wanted))}" if parts else ""


def _named(names: Sequence[str]) -> str:
    return ", ".join(name or "(a single number)" for name in names)


def _checked(returned: Mapping[str, object], place: str) -> Outcome:
    rewards = {}
    for name, value in returned.items():
        what = f"returned {value!r:.80}" + (f" as {name}" if name else "")
        try:
            if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
                raise TypeError
            rewards[name] = float(value)
        except (TypeError, ValueError):  # an array may have more than one number
            return failed(NO_NUMBER, f"{what}, which is not a number", place)
        if not math.isfinite(rewards[name]):
            return failed(NOT_FINITE, what, place)
        if abs(rewards[name]) > MAX_REWARD:
            what = f"{what}, which exceeds {MAX_REWARD:,.0f} in absolute value; scale the rewards"
            return failed(TOO_LARGE, what, place)
    return Outcome(rewards)
