import pytest

from mrl.models.tokenizers import TOKENIZERS, train_byte_level, train_metaspace

TEXTS = [f"Spell this word backward (example: sun -> nus): {word}\n" for word in ("hay", "Oslo", "tree")] * 20
TEXTS += [f'How many times does the letter "h" appear in the text: "{word}"?\n' for word in ("hut", "oak")] * 20
TEXTS += ["reverse <answer>yah</answer>", "count <answer>12</answer>"] * 20


def pieces(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@pytest.mark.parametrize(
    "text",
    [
        *TEXTS[:1], TEXTS[-1], " two  spaces ", "tab\tand\nline", "naïve ß 漢字 👩‍🔬", "<0x0A> </s> <|endoftext|>",
    ],
)  # fmt: skip
def test_every_text_comes_back(kind, text):
    """Encoding and decoding keeps the text, also what the tokenizer was not trained on."""
    tokenizer = TOKENIZERS[kind](TEXTS, 640)
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_subjects_and_answers_are_spelled(kind):
    """Words at the end of a prompt, in quotes and in answers are letters; other words are whole."""
    tokenizer = TOKENIZERS[kind](TEXTS, 640)
    prompt = [piece.strip("\u0120\u2581") for piece in pieces(tokenizer, TEXTS[0])]
    assert {"Spell", "this", "word", "backward"} <= set(prompt)
    assert prompt[-4:-1] == ["h", "a", "y"]
    quoted = [piece.strip('\u0120\u2581"?') for piece in pieces(tokenizer, 'in the text: "oak"?')]
    assert [piece for piece in quoted if piece.isalpha()][-3:] == ["o", "a", "k"]
    answer = [piece.strip("\u0120\u2581") for piece in pieces(tokenizer, "reverse <answer>yah</answer>")]
    assert answer == ["reverse", "<answer>", "y", "a", "h", "</answer>"]


def test_the_two_kinds_cut_the_same_text_differently():
    """Token boundaries differ, so that text between the two must be cut anew."""
    byte_level, metaspace = train_byte_level(TEXTS, 640), train_metaspace(TEXTS, 640)
    one = [piece.replace("\u0120", " ") for piece in pieces(byte_level, TEXTS[0].strip())]
    other = [piece.replace("\u2581", " ") for piece in pieces(metaspace, TEXTS[0].strip())]
    assert "".join(one) == "".join(other) == TEXTS[0].strip()
    assert one != other


def test_metaspace_has_all_bytes_as_plain_vocabulary():
    """All 256 byte pieces are there, and none of them is a special or added token."""
    tokenizer = train_metaspace(TEXTS, 640)
    names = {f"<0x{byte:02X}>" for byte in range(256)}
    assert names <= set(tokenizer.get_vocab())
    assert not names & set(tokenizer.get_added_vocab())


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_vocabulary_is_bounded_and_has_end_and_padding(kind):
    """The size asked for is an upper bound; EOS and padding are distinct."""
    tokenizer = TOKENIZERS[kind](TEXTS, 400)
    assert len(tokenizer) <= 400
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
