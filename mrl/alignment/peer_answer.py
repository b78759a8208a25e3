"""The wire form of a peer's answer: bytes and numbers that mean the same under every tokenizer.

Shapes: T tokens of one answer, a closing EOS included.

Example: "yah" as two tokens and an EOS is completion b"yah", byte_lengths [2, 1, 0], logprobs [-0.5, -0.1, -0.02],
special [False, False, True], finish_reason "stop".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mrl.alignment.flags import Reason, Rejected
from mrl.alignment.ragged import offsets_of, row_sums, rows_of
from mrl.records.finish import FinishReason

Int32s: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]
Bools: TypeAlias = npt.NDArray[np.bool_]

MAX_COMPLETION_BYTES = 1 << 20
MAX_TOKENS = 1 << 20
MAX_TOKENS_PER_BYTE = 4
FREE_TOKENS = 64
"""Tokens that an answer may have beyond `MAX_TOKENS_PER_BYTE`: a few specials without any text are no flood."""
MAX_FINGERPRINT_CHARACTERS = 128
LOGPROB_ROUNDING_NATS = 1e-5
MIN_LOGPROB_NATS = -1e4
REASONS = frozenset(FinishReason)


@dataclass(frozen=True, slots=True, eq=False)
class PeerAnswer:
    """One answer of a peer. Data from another process becomes one only by `validate`."""

    completion: bytes
    """The answer's bytes; specials and EOS have none. May end inside a character unless `finished`."""
    byte_lengths: Int32s
    """[T] bytes of every token, 0 for zero-width ones; they sum to the length of `completion`."""
    logprobs: Floats
    """[T] log-probability of every token under the policy that sampled it, in nats."""
    special: Bools
    """[T] True where the token is a special one."""
    finish_reason: FinishReason
    """Why the answer ended. After "stop" the last token is the EOS: special, zero-width; where it is not, the EOS was
    not recorded. A special last token of an answer that was cut or given up ends nothing."""
    fingerprint: str
    """Fingerprint of the tokenizer that cut the text."""
    token_ids: Int32s | None = None
    """[T] ids under that tokenizer, for audit; read only by a receiver of the same fingerprint."""
    noncanonical: bool = False
    """Whether the source saw that its tokenizer gives the text other ids than were sampled."""
    traced: bool = True
    """False for a bare text: its tokens are stand-ins, and `logprobs` holds zeros that mean nothing."""

    def fields(self) -> dict[str, Any]:
        """Return the keyword arguments of `validate`, arrays as raw little-endian bytes."""
        ids = None if self.token_ids is None else self.token_ids.astype("<i4").tobytes()
        return {
            "completion": self.completion,
            "byte_lengths": self.byte_lengths.astype("<i4").tobytes(),
            "logprobs": self.logprobs.astype("<f4").tobytes(),
            "special": self.special.astype("u1").tobytes(),
            "finish_reason": str(self.finish_reason),
            "fingerprint": self.fingerprint,
            "token_ids": ids,
            "noncanonical": self.noncanonical,
            "traced": self.traced,
        }

    @property
    def finished(self) -> bool:
        """Whether the peer ended the answer itself."""
        return self.finish_reason is FinishReason.STOP

    @property
    def ends_with_eos(self) -> bool:
        """Whether the last token is the EOS that ended the answer."""
        return self.finished and len(self.special) > 0 and bool(self.special[-1]) and self.byte_lengths[-1] == 0


def bare_text(completion: bytes, *, finished: bool) -> PeerAnswer:
    """Return an answer of which only the text is known: one token for all of it, and an EOS when it is `finished`.

    An unfinished text counts as cut, whatever the reason why it has no end: the text is the same.
    """
    num_tokens = 1 + finished
    return PeerAnswer(
        completion=completion,
        byte_lengths=np.array([len(completion), 0][:num_tokens], dtype=np.int32),
        logprobs=np.zeros(num_tokens, dtype=np.float32),
        special=np.array([False, True][:num_tokens], dtype=bool),
        finish_reason=FinishReason.STOP if finished else FinishReason.LENGTH,
        fingerprint="",
        traced=False,
    )


def validate(
    *,
    completion: Any,
    byte_lengths: Any,
    logprobs: Any,
    special: Any,
    finish_reason: Any,
    fingerprint: Any,
    token_ids: Any = None,
    noncanonical: Any = False,
    traced: Any = True,
) -> PeerAnswer | Rejected:
    """Return a checked answer from fields as `PeerAnswer.fields` gives them (or arrays), or why it is refused. Never
    raises.
    """
    lengths, numbers, marks = _array(byte_lengths, "<i4"), _array(logprobs, "<f4"), _array(special, "u1")
    ids = None if token_ids is None else _array(token_ids, "<i4")
    if lengths is None or numbers is None or marks is None or (token_ids is not None and ids is None):
        return Rejected("type")
    ended = FinishReason(finish_reason) if type(finish_reason) is str and finish_reason in REASONS else finish_reason
    answer = PeerAnswer(completion, lengths, numbers, marks.astype(bool), ended, fingerprint, ids, noncanonical, traced)
    reason = form_fault(answer) or next(iter(number_faults([answer]).values()), None)
    return Rejected(reason) if reason else answer


def _array(field: Any, dtype: str) -> npt.NDArray[Any] | None:
    """Return the field as an array in the machine's byte order, or None when it is no array or a value does not fit."""
    wanted = np.dtype(dtype)
    if isinstance(field, bytes | bytearray):
        data = bytes(field)
        whole = len(data) % wanted.itemsize == 0
        field = np.frombuffer(data, dtype=wanted) if whole else None
    # A subclass may hide values, as masked arrays do, or refuse what arrays can do.
    if type(field) is not np.ndarray or field.dtype.kind not in ("f" if wanted.kind == "f" else "iub"):
        return None
    low, high = {"i": (-(2**31), 2**31 - 1), "u": (0, 1)}.get(wanted.kind, (0, 0))
    if wanted.kind != "f" and field.size and not low <= int(field.min()) <= int(field.max()) <= high:
        return None
    with np.errstate(all="ignore"):
        return field.astype(wanted.newbyteorder("="))


def form_fault(answer: PeerAnswer) -> Reason | None:
    """Return the fault in the types and sizes of the fields of one answer, if any."""
    lengths, logprobs, special, ids = answer.byte_lengths, answer.logprobs, answer.special, answer.token_ids
    for array, code in ((lengths, "i"), (logprobs, "f"), (special, "?"), (lengths if ids is None else ids, "i")):
        if type(array) is not np.ndarray or array.dtype.char != code:
            return "type"
    if type(answer.completion) is not bytes or type(answer.fingerprint) is not str:
        return "type"
    if type(answer.finish_reason) is not FinishReason or not all(
        type(mark) is bool for mark in (answer.noncanonical, answer.traced)
    ):
        return "type"
    shape = lengths.shape
    if len(shape) != 1 or not shape == logprobs.shape == special.shape == (shape if ids is None else ids.shape):
        return "shape"
    if shape[0] > MAX_TOKENS or len(answer.completion) > MAX_COMPLETION_BYTES:
        return "size"
    if shape[0] > MAX_TOKENS_PER_BYTE * len(answer.completion) + FREE_TOKENS:
        return "size"
    return "size" if len(answer.fingerprint) > MAX_FINGERPRINT_CHARACTERS else None


def number_faults(answers: Sequence[PeerAnswer]) -> dict[int, Reason]:
    """Return place -> the fault in the numbers of an answer, for answers whose form is right."""
    if not answers:
        return {}
    offsets = offsets_of(np.fromiter((len(answer.special) for answer in answers), np.int64, len(answers)))
    lengths = np.concatenate([answer.byte_lengths for answer in answers])
    logprobs = np.concatenate([answer.logprobs for answer in answers])
    special = np.concatenate([answer.special for answer in answers])
    is_credible = (logprobs <= LOGPROB_ROUNDING_NATS) & (logprobs >= MIN_LOGPROB_NATS)
    faults: dict[int, Reason] = {}
    if not is_credible.all():
        faults |= dict.fromkeys(rows_of(np.flatnonzero(~is_credible), offsets).tolist(), "logprobs")
    is_odd = (lengths < 0) | (special & (lengths != 0))
    sizes = np.fromiter((len(answer.completion) for answer in answers), np.int64, len(answers))
    faults |= dict.fromkeys(np.flatnonzero(row_sums(lengths, offsets) != sizes).tolist(), "lengths")
    if is_odd.any():
        faults |= dict.fromkeys(rows_of(np.flatnonzero(is_odd), offsets).tolist(), "lengths")
    return faults
