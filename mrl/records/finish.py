"""Why an answer has no further token."""

from enum import StrEnum


class FinishReason(StrEnum):
    """A closed set, by the names that inference servers give; an answer has an end of its own after `STOP` only."""

    STOP = "stop"
    """The policy ended it, with its EOS or a stop string."""
    LENGTH = "length"
    """It was cut at the token limit."""
    ABORT = "abort"
    """The engine gave it up before either."""
