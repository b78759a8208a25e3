"""Any text of assigned characters, in any segmentation, for every kind and every ordered pair of kinds."""

import unicodedata
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.alignment.translate import translate_batch
from tests.support.alignment_properties.generated import as_stranger, make_answer, sampled_answer
from tests.support.alignment_properties.kinds import KINDS, METASPACE, load
from tests.support.alignment_properties.rows_of_text import expect_row

# Characters without a meaning yet may combine in one edition of Unicode and not in another.
combining = st.characters(categories=("Mn", "Mc")) | st.sampled_from("aeu\u0301\u0323\u0308\u1112\u1161\u11ab\uac00")
texts = st.text(st.characters(exclude_categories=("Cs", "Cn")) | combining, min_size=1, max_size=24)
chances = st.integers(0, 2**32).map(Random)


@pytest.fixture(scope="module")
def receivers(folders):
    return load(folders)


@settings(max_examples=60)
@given(text=texts, random=chances)
def test_any_text_arrives_at_every_kind(receivers, text, random):
    """Cut anywhere and said in any tokens, a text is carried over span by span, or refused for the one known reason."""
    answer = make_answer(random, text)
    for kind in KINDS:
        batch = translate_batch([answer], receivers[kind], max_tokens=10_000)
        expect_row(kind, receivers[kind], answer, batch.row(0))


@settings(max_examples=200)
@given(text=texts, random=chances, source=st.sampled_from(KINDS), kind=st.sampled_from(KINDS))
def test_any_text_travels_between_kinds(receivers, text, random, source, kind):
    """What one tokenizer writes of any text arrives at any other."""
    text = unicodedata.normalize("NFC", text) if receivers[source].reads_nfc else text
    text = text.replace("\u2581", "_") if source in METASPACE else text
    answer = as_stranger(sampled_answer(random, receivers[source], text))
    batch = translate_batch([answer], receivers[kind], max_tokens=10_000)
    expect_row(kind, receivers[kind], answer, batch.row(0))
