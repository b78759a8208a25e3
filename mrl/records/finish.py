"""The reason for which an answer has no further token."""

from enum import StrEnum


class FinishReason(StrEnum):
    """Reasons by the names that inference servers use. Only an answer with `STOP` has an end of its own."""

    STOP = "stop"
    """The policy ended the answer, with its EOS or a stop string."""
    LENGTH = "length"
    """The answer was cut at the token limit."""
    ABORT = "abort"
    """The engine gave the answer up before an end or the limit."""
