"""Every exception that mrl raises on purpose, as one tree.

    MRLError
    +-- UserError                 the person can cure it: one line, exit code 2
    |   +-- ConfigError           a config file or an override is wrong
    |   |   +-- PluginError       a plug-in (regime, task source, verifier, tracker) is missing or unusable
    |   +-- RunFolderError        the run folder exists, is missing, or cannot be written
    |   +-- ModelFolderError      a policy's model folder is missing or unusable
    |   |   +-- TokenizerRefused  a policy's tokenizer is of a kind that cannot be aligned exactly
    |   +-- TaskError             a task or data set that does not exist or cannot be loaded
    |   +-- MissingError          a model, data file or package is still to be fetched; the cure names the command
    |   +-- AddressError          a port is busy or an address is not allowed
    |   +-- EngineError           an engine has no environment, lacks a route, or cannot serve the model
    |   +-- DeviceError           there is no GPU, or memory does not suffice
    +-- RecordError               bytes that are no valid record; the message names the field
    +-- WeightsError              published weights fail their checksum or canary, or do not fit the model
    |   +-- WeightsGone           published weights are no longer where they lay
    +-- EngineLost                an engine died, hangs, or serves other weights than it says; it is restarted
    |   +-- WeightsUnproved       an engine serves other weights than it should, or does not tell which
    +-- CheckpointError           a checkpoint is missing, incomplete, or of another model
    +-- DiskBroken                the state of the exchange's file is unknown; the exchange ends and reads it anew
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
    """Further mistakes that were found together with this error; each is printed on a line of its own."""
    is_placed: bool = False
    """Whether `where` already tells if a mistake in a configuration comes from the file or from the command line."""

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
    """Put `where` in front of the place that a UserError raised in the block names."""
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
    """A plug-in that a configuration names (regime, task source, verifier, tracker) cannot be found, loaded or used."""


class RunFolderError(UserError):
    """The run folder exists already, is missing, or cannot be written."""


class ModelFolderError(UserError):
    """A policy's model folder is missing, unreadable, or not a causal language model."""


class TokenizerRefused(ModelFolderError):
    """A tokenizer cannot be aligned exactly, because the bytes or ids of its tokens are not certain."""


class TaskError(UserError):
    """A task or data set does not exist or cannot be loaded."""


class MissingError(UserError):
    """A model, data file or package is still to be fetched; `mrl check` lists what is missing instead of failing."""


class AddressError(UserError):
    """A port is busy, or an address is not allowed without authentication."""


class EngineError(UserError):
    """An engine cannot be used as it is: it has no environment, lacks a route, or does not serve the model."""


class DeviceError(UserError):
    """A device is missing, or its memory or the host's does not suffice."""


class RecordError(MRLError, ValueError):
    """Bytes from outside this process are no valid record; the message names the field."""


class WeightsError(MRLError, ValueError):
    """Published weights fail their checksum or their canary, or do not fit the model."""


class WeightsGone(WeightsError):
    """Published weights are no longer where they lay: pruned, or in the memory of a process that has ended."""


class EngineLost(MRLError):
    """An engine died, hangs, or serves other weights than it says; restarted, it may serve again."""


class WeightsUnproved(EngineLost):
    """An engine's scores or bytes are not those of the weights that it should serve, or it does not tell them."""


class CheckpointError(MRLError, ValueError):
    """A checkpoint is missing, incomplete, or belongs to another model."""


class DiskBroken(MRLError):
    """The state of the exchange's file on the disk is unknown.

    After a failed fsync the kernel may have dropped the pages, and the next fsync succeeds all the same. The process
    that owns the file must end and start again from what can be read.
    """


class PeerLost(MRLError, TimeoutError):
    """A bounded wait for another process ran out; the message says what was awaited, from whom, how long."""


class RoleFailed(MRLError, RuntimeError):
    """A role cannot continue; the supervisor ends the run and prints this reason."""
