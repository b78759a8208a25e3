"""Some rows of a batch are the batch of these rows."""

from dataclasses import fields

import numpy as np
import pytest

from mrl.alignment.pair_card import written_by
from mrl.alignment.peer_answer import bare_text
from mrl.alignment.receiver import load_receiver
from mrl.alignment.selection import select_rows
from mrl.alignment.translate import translate_batch

TEXTS = ["reverse: yah 12 + 34", "def f(x): return x\n", "na\u00efve caf\u00e9", "hay"]


@pytest.mark.parametrize("rows", [[], [0], [2], [1, 3], [0, 2, 4, 5], list(range(6))])
def test_selecting_is_translating_these_alone(folders, rows):
    """Every field is what it would be without the others: rejected, bare and cut rows included."""
    peer, receiver = load_receiver(folders["byte_level"]), load_receiver(folders["metaspace"])
    answers = [*written_by(peer, TEXTS), bare_text(b"\xff", finished=True), bare_text(b"sun nus", finished=True)]
    whole = translate_batch(answers, receiver, max_tokens=6)
    alone = translate_batch([answers[row] for row in rows], receiver, max_tokens=6)
    found = select_rows(whole, rows)
    for field in fields(alone):
        one, other = getattr(found, field.name), getattr(alone, field.name)
        assert np.array_equal(one, other), field.name
        if field.name != "reject_reason":
            assert one.dtype == other.dtype, field.name
