"""What is unanswered: sent again in growing pauses, and answered only by all parts in order."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.exchange.outbox import MAX_RESEND_S, RESEND_S, Outbox, Unanswered


def outbox(*seqs, **fields):
    """Messages sent at time 0, each of one byte."""
    box = Outbox()
    for seq in seqs:
        box.add(seq, Unanswered(bytes([seq]), 0.0, **fields))
    return box


def test_pauses_double_up_to_a_limit():
    """Two seconds, four, eight, and never more than thirty."""
    box, sent = outbox(1), []
    for now_s in range(200):
        if box.overdue(float(now_s)):
            sent.append(now_s)
    pauses = [after - before for before, after in zip([0, *sent], sent, strict=False)]
    assert pauses[:5] == [RESEND_S, 4, 8, 16, MAX_RESEND_S]
    assert set(pauses[5:]) == {MAX_RESEND_S}


def test_only_what_is_due_is_sent_again():
    """A fresh start sends everything and begins the pauses anew."""
    box = outbox(1)
    box.add(2, Unanswered(b"late", 1.0))
    assert box.overdue(RESEND_S) == [b"\x01"]
    box.start_over()
    assert box.overdue(99.0) == []
    assert box.next_to_send(100, 2.5) == [b"\x01", b"late"]
    assert box.overdue(4.4) == []
    assert box.overdue(4.5) == [b"late"]


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 9), max_size=12), window_bytes=st.integers(0, 20), data=st.data())
def test_what_is_unanswered_stays_within_the_window(sizes, window_bytes, data):
    """In order, whatever is answered when; one message goes however small the window; in the end all have gone."""
    box, out, answered = Outbox(), [], []
    for seq, size in enumerate(sizes):
        box.add(seq, Unanswered(bytes([seq]) * size, 0.0, is_sent=False))
    while len(answered) < len(sizes):
        out += [body[0] for body in box.next_to_send(window_bytes, 0.0)]
        waiting = [seq for seq in out if seq not in answered]
        assert len(waiting) == 1 or sum(sizes[seq] for seq in waiting) <= window_bytes
        answered.append(data.draw(st.sampled_from(waiting)))
        box.remove(answered[-1])
    assert out == list(range(len(sizes)))
    assert (box.num_bytes, len(box)) == (0, 0)


def test_bytes_are_those_of_what_waits():
    """Whichever way it left."""
    box = outbox(1, 2, 3, 4)
    assert (box.num_bytes, len(box)) == (4, 4)
    box.remove(1)
    box.remove(1)
    box.remove(box.oldest())
    box.note_part(4, 1, 1)
    assert (box.num_bytes, len(box), 3 in box, 2 in box) == (1, 1, True, False)


def test_clear_up_to_a_number():
    """Later messages do not count."""
    box = outbox(5, 7)
    assert [box.is_clear(seq) for seq in (4, 5, 7)] == [True, False, False]
    box.remove(5)
    assert [box.is_clear(seq) for seq in (5, 6, 7)] == [True, True, False]
    box.remove(7)
    assert box.is_clear(7)


def test_what_somebody_waits_for_is_not_dropped():
    """The oldest of the others goes; nothing when there is none."""
    box = outbox(1, 2, is_awaited=True)
    box.add(3, Unanswered(b"x", 0.0, num_records=7))
    assert box.oldest() == 3
    box.remove(3)
    assert box.oldest() is None
    assert len(box) == 2


def test_watches_are_dropped_alone():
    """They are asked anew; other questions stay."""
    box = outbox(1, 2, is_watch=True)
    box.add(3, Unanswered(b"x", 0.0))
    box.drop_watches()
    assert (1 in box, 2 in box, 3 in box) == (False, False, True)


@settings(deadline=None)
@given(came=st.lists(st.integers(1, 4), max_size=30))
def test_an_answer_is_whole_when_its_parts_came_in_one_unbroken_row(came):
    """Parts of several sendings of one answer, some lost: the end of the list holds 1, 2, 3, 4 as last occurrences."""
    box, whole = outbox(9), False
    row: list[int] = []
    for part in came:
        box.note_part(9, part, 4)
        row = [1] if part == 1 else [*row, part] if row and part == row[-1] + 1 else row
        whole = whole or row == [1, 2, 3, 4]
        assert (9 not in box) == whole
