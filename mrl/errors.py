"""Every exception that mrl raises on purpose, as one tree.

    MRLError
    +-- UserError                 the person can cure it: one line, exit code 2
    |   +-- ConfigError           a config file or an override is wrong
    |   |   +-- PluginError       a regime, source, verifier or tracker of somebody else's that cannot be had
    |   +-- RunFolderError        the run folder exists, is missing, or cannot be written
    |   +-- ModelFolderError      a policy's model folder is missing or unusable
    |   |   +-- TokenizerRefused  its tokenizer is of a kind that cannot be aligned exactly
    |   +-- TaskError             a task or data set that does not exist or cannot be loaded
    |   +-- MissingError          a model, data file or package that is still to be fetched; the cure is the command
    |   +-- AddressError          a port is busy or an address is not allowed
    |   +-- EngineError           an engine's environment is missing, it lacks a route, or cannot serve the model
    |   +-- DeviceError           there is no GPU, or memory does not suffice
    +-- RecordError               bytes that are no valid record; the message names the field
    +-- WeightsError              published weights fail their checksum or canary
    +-- EngineLost                an engine died, hangs, or serves other weights than it says; it is started anew
    |   +-- WeightsUnproved       it serves other weights than it says, or nobody can tell
    +-- CheckpointError           a checkpoint is missing, torn or of another model
    +-- DiskBroken                nobody knows what is on the disk; its owner ends and reads it anew
    +-- PeerLost                  a bounded wait for another process ran out
    +-- RoleFailed                a role cannot continue; the supervisor ends the run with this reason

Expected outcomes (a stale group, a truncated answer, a peer that is late, a text that cannot be aligned) are values
that are counted, never exceptions.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class MRLError(Exception):
    """Root of every error that mrl raises on purpose."""


class UserError(MRLError, ValueError):
    """A mistake that the person at the keyboard can cure.

    The message is one line: what is wrong, where, what was found, what was wanted, how to cure it.
    """

    more: "tuple[UserError, ...]" = ()
    """Further mistakes that were found with this one; each is a line of its own."""
    is_placed: bool = False
    """Whether `where` says which of file and command line a mistake of a configuration is in."""

    def __init__(self, what: str, *, where: str = "", got: object = "", wanted: str = "", cure: str = "") -> None:
        self.what, self.where, self.got, self.wanted, self.cure = what, where, got, wanted, cure
        super().__init__(what, where, got, wanted, cure)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_user_error, (type(self), self.what, self.where, self.got, self.wanted, self.cure)

    def __str__(self) -> str:
        parts = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.got != "":
            parts.append(f"got {self.got!r}")
        if self.wanted:
            parts.append(f"wanted {self.wanted}")
        if self.cure:
            parts.append(f"cure: {self.cure}")
        return "; ".join(parts)


@contextmanager
def in_place(where: str) -> Iterator[None]:
    """Mistakes found meanwhile are told as being at `where`, before whatever they say of their place themselves."""
    try:
        yield
    except UserError as error:
        error.where = f"{where}: {error.where}" if error.where else where
        raise


def _rebuild_user_error(kind: type[UserError], what: str, where: str, got: object, wanted: str, cure: str) -> UserError:
    return kind(what, where=where, got=got, wanted=wanted, cure=cure)


class ConfigError(UserError):
    """A config file or a command-line override is wrong."""


class PluginError(ConfigError):
    """A regime, task source, verifier or tracker that a configuration names is not there, or is none."""


class RunFolderError(UserError):
    """The run folder exists already, is missing, or cannot be written."""


class ModelFolderError(UserError):
    """A policy's model folder is missing, unreadable, or not a causal language model."""


class TokenizerRefused(ModelFolderError):
    """A tokenizer of a kind whose bytes cannot be known exactly."""


class TaskError(UserError):
    """A task or data set does not exist or cannot be loaded."""


class MissingError(UserError):
    """A model, data file or package that is still to be fetched; `mrl check` lists these instead of failing."""


class AddressError(UserError):
    """A port is busy, or an address is not allowed without authentication."""


class EngineError(UserError):
    """An engine cannot be used as it is: no environment, a missing route, a model that it does not serve."""


class DeviceError(UserError):
    """A device is not there, or its memory or that of the host does not suffice."""


class RecordError(MRLError, ValueError):
    """Bytes from outside that are no valid record; the message names the field."""


class WeightsError(MRLError, ValueError):
    """Published weights that fail their checksum, their canary, or do not fit the model."""


class WeightsGone(WeightsError):
    """Published weights that are no longer where they lay: pruned, or in the memory of a process that has ended."""


class EngineLost(MRLError):
    """An engine that died, hangs, or serves other weights than it says; started anew, it may serve again."""


class WeightsUnproved(EngineLost):
    """An engine whose scores or bytes are not those of the weights that it should serve, or that does not tell them."""


class CheckpointError(MRLError, ValueError):
    """A checkpoint that is missing, torn, or belongs to another model."""


class DiskBroken(MRLError):
    """Nobody knows what is on the disk.

    After a failed fsync the kernel may have dropped the pages, and the next fsync succeeds all the same: whoever owns
    the log has to end, and to start again from what can be read.
    """


class PeerLost(MRLError, TimeoutError):
    """A bounded wait for another process ran out; the message says what was awaited, from whom, how long."""


class RoleFailed(MRLError, RuntimeError):
    """A role cannot continue; the supervisor ends the run and prints this reason."""
