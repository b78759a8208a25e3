"""Generated texts and answers, and names of the classes that must occur among them."""

import unicodedata
from collections.abc import Callable
from random import Random

import numpy as np

from mrl.alignment.peer_answer import PeerAnswer
from mrl.alignment.receiver import Receiver
from mrl.alignment.sampled_answers import describe_answers
from mrl.records.finish import FinishReason

PLAIN = ("reverse", " yah", "  two", " ", "12", "345 ", "\n", "\r\n\t", "=", ".", "def f(x):", "sun nus")
EMOJI = (
    *("\U0001f469\u200d\U0001f52c", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f44d\U0001f3fd"),
    *("\U0001f1e9\U0001f1ea", "\U0001d4b3"),
)
COMBINING = (
    *("caf\u00e9", "e\u0301", "a\u0323\u0302", "\u1112\u1161\u11ab", "\u212b", "\uf900", "\u0930\u093c", "\u0344"),
    *("\u6f22\u5b57", "\ud55c\uad6d", "\u0627\u0644", "\u0e44\u0e17"),
)
CONTROLS = ("\x00", "\x1f", "\u0085", "\u200b", "\ufeff")
MARKS = ("\u2581", "\u0120", "<0x0A>")
LITERALS = ("</s>", "<|im_end|>", "<unk>", "<|endoftext|>")
ADDED = ("<tool>", "<th\u00efnk>")
FRAGMENTS = (*PLAIN, *EMOJI, *COMBINING, *CONTROLS, *MARKS, *LITERALS, *ADDED)


def make_text(random: Random) -> str:
    """Draw a text of one to nine fragments."""
    return "".join(random.choice(FRAGMENTS) for _ in range(random.randint(1, 9)))


def make_lengths(random: Random, num_bytes: int) -> list[int]:
    """Draw the token lengths of any segmentation, with tokens without bytes anywhere."""
    lengths: list[int] = []
    while num_bytes:
        if random.random() < 0.15:
            lengths.append(0)
        lengths.append(random.randint(1, min(num_bytes, 6)))
        num_bytes -= lengths[-1]
    return lengths + [0] * (random.random() < 0.15)


CUT = (FinishReason.LENGTH, FinishReason.ABORT)


def make_answer(random: Random, text: str | None = None) -> PeerAnswer:
    """Draw the answer of a peer whose tokens end anywhere, cut anywhere, with specials anywhere."""
    data = (make_text(random) if text is None else text).encode()
    finished = random.random() < 0.6
    if not finished:
        data = data[: random.randint(1, len(data))]
    elif random.random() < 0.1:
        data = data[:-1] + b"\xff"
    lengths = make_lengths(random, len(data))
    special = [not length and random.random() < 0.6 for length in lengths]
    if finished and random.random() < 0.9:
        lengths, special = [*lengths, 0], [*special, True]
    return PeerAnswer(
        completion=data,
        byte_lengths=np.array(lengths, dtype=np.int32),
        logprobs=make_logprobs(random, len(lengths)),
        special=np.array(special, dtype=bool),
        finish_reason=FinishReason.STOP if finished else CUT[len(data) % 2],
        fingerprint="peer",
        noncanonical=random.random() < 0.2,
    )


def make_logprobs(random: Random, size: int) -> np.ndarray:
    """Draw log-probabilities, some of them almost 0."""
    return np.array([-random.random() * random.choice((4, 4, 1e-6)) for _ in range(size)], dtype=np.float32)


def make_batch(random: Random, size: int = 12) -> list[PeerAnswer]:
    """Draw the answers of a batch."""
    return [make_answer(random) for _ in range(size)]


def text_for(random: Random, source: Receiver, *, metaspace: bool) -> str:
    """Draw a text that a policy with this tokenizer could sample."""
    text = make_text(random)
    text = unicodedata.normalize("NFC", text) if source.reads_nfc else text
    return text.replace("\u2581", "_") if metaspace else text


def canonical_ids(source: Receiver, text: str) -> list[int]:
    """Return the ids that the tokenizer gives the text."""
    return source.cut_texts([text], [text.encode()]).token_ids.tolist()


def sampled_answer(random: Random, source: Receiver, text: str) -> PeerAnswer:
    """Draw an answer that a policy with this tokenizer might sample.

    It may have a token spelled in single bytes, or a special in the middle; it is cut anywhere or ended by an EOS.
    """
    ids = canonical_ids(source, text)
    if random.random() < 0.3:
        place = random.randrange(len(ids))
        ids[place : place + 1] = [source.table.pieces.index(bytes([byte])) for byte in source.table.pieces[ids[place]]]
    if random.random() < 0.3:
        place = random.choice((0, random.randrange(len(ids))))
        ids.insert(place, random.choice(sorted(source.table.special_ids)))
    finished = random.random() < 0.6
    ids = [*ids, source.eos_id] if finished else ids[: random.randint(1, len(ids))]
    return described(source, ids, make_logprobs(random, len(ids)), finished=finished)


def described(source: Receiver, ids: list[int], logprobs: np.ndarray, *, finished: bool) -> PeerAnswer:
    """Describe one answer of a policy with this tokenizer."""
    return describe_answers(
        source, [np.array(ids, dtype=np.int32)], [logprobs], [FinishReason.STOP if finished else FinishReason.LENGTH]
    )[0]


def as_stranger(answer: PeerAnswer) -> PeerAnswer:
    """Return the answer as of a policy whose tokenizer nobody else has."""
    return PeerAnswer(**(fields_of(answer) | {"fingerprint": "stranger"}))


def fields_of(answer: PeerAnswer) -> dict:
    """Fields of an answer, unchanged."""
    return {name: getattr(answer, name) for name in answer.__dataclass_fields__}


def text_of(answer: PeerAnswer) -> str:
    """Text of the completion, without bytes that are not UTF-8."""
    return answer.completion.decode(errors="ignore")


def is_whole(data: bytes) -> bool:
    """Whether the bytes are UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def splits_a_character(answer: PeerAnswer) -> bool:
    """Whether a token ends inside a character."""
    ends = np.cumsum(answer.byte_lengths)
    return any(0 < end < len(answer.completion) and answer.completion[end] & 0xC0 == 0x80 for end in ends)


def has_any(parts: tuple[str, ...]) -> Callable[[PeerAnswer], bool]:
    """Return a test whether one of these parts is in an answer's text."""
    return lambda answer: any(part in text_of(answer) for part in parts)


CLASSES: dict[str, Callable[[PeerAnswer], bool]] = {
    "special before the end": lambda answer: bool(answer.special[:-1].any()),
    "special before all bytes": lambda answer: bool(answer.special[0]) and len(answer.completion) > 0,
    "cut inside a character": lambda answer: not answer.finished and not is_whole(answer.completion),
    "cut between characters": lambda answer: not answer.finished and is_whole(answer.completion),
    "ended by an EOS": lambda answer: answer.ends_with_eos,
    "a token ends inside a character": splits_a_character,
    "not canonical": lambda answer: answer.noncanonical,
    "emoji with joiners": has_any(("\u200d",)),
    "not in NFC": lambda answer: not unicodedata.is_normalized("NFC", text_of(answer)),
    "a control": has_any(CONTROLS),
    "a literal of a special token": has_any(LITERALS),
    "the content of an added token": has_any(ADDED),
}
ONLY_ANY_SEGMENTATION: dict[str, Callable[[PeerAnswer], bool]] = {
    "silent and not special": lambda answer: bool(((answer.byte_lengths == 0) & ~answer.special).any()),
    "broken bytes in a finished answer": lambda answer: answer.finished and not is_whole(answer.completion),
    "finished without an EOS": lambda answer: answer.finished and not answer.ends_with_eos,
    "the metaspace mark": has_any(("\u2581",)),
}
"""Classes of answers that a tokenizer may not be able to write; generated for peers of no known kind."""
