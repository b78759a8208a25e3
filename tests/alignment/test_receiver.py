import threading

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mrl.alignment.flags import Rejected
from mrl.alignment.receiver import Receiver, load_receiver
from mrl.alignment.tokenizer_file import read_tokenizer_file
from mrl.errors import ModelFolderError
from tests.support.retokenizing import Retokenized, retokenize

KINDS = ["byte_level", "byte_level_nfc", "byte_level_prefix_space"]
KINDS += ["metaspace", "metaspace_prepend", "metaspace_first", "metaspace_always"]
TEXTS = [
    "reverse: yah",
    " leading space",
    "  two leading",
    "trailing ",
    "a\nb\r\n\tc",
    "caf\u00e9 \u6f22\u5b57 \U0001f469\u200d\U0001f52c",
    "<|im_end|></s><unk><tool><th\u00efnk>",
    "\u0120 <0x0A>",
    "yah<tool>yah",
]


@pytest.fixture(params=KINDS)
def receiver(request, receiver_of):
    return receiver_of(request.param)


@pytest.mark.parametrize("text", TEXTS)
def test_retokenized_text_joins_to_the_same_bytes(receiver, text):
    """What is emitted stands for exactly the bytes that were given, leading spaces and special literals included."""
    result = retokenize(receiver, text.encode(), finished=False, max_tokens=1000)
    assert isinstance(result, Retokenized)
    assert result.token_ids.dtype == np.int32
    assert receiver.completion_bytes(result.token_ids) == text.encode()
    assert not receiver.table.special_ids & set(result.token_ids.tolist())


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "metaspace_prepend"])
def test_ids_are_those_of_the_tokenizer(receiver_of, tokenizers_by_kind, kind):
    """A plain text gets the ids that the unchanged tokenizer gives it."""
    text = "reverse: yah and 12 + 34"
    result = retokenize(receiver_of(kind), text.encode(), finished=False, max_tokens=100)
    assert result.token_ids.tolist() == tokenizers_by_kind[kind].encode(text, add_special_tokens=False).ids


def test_finished_text_gets_own_eos(receiver):
    """The own EOS closes a finished text, counts towards the limit, and has no bytes."""
    open_ids = retokenize(receiver, b"reverse: yah", finished=False, max_tokens=100).token_ids
    closed_ids = retokenize(receiver, b"reverse: yah", finished=True, max_tokens=100).token_ids
    assert closed_ids.tolist() == [*open_ids.tolist(), receiver.eos_id]
    assert receiver.completion_bytes(closed_ids) == b"reverse: yah"
    assert isinstance(retokenize(receiver, b"reverse: yah", finished=True, max_tokens=len(closed_ids)), Retokenized)
    assert retokenize(receiver, b"reverse: yah", finished=True, max_tokens=len(open_ids)) == Rejected("too_long")


def test_text_handed_over_as_it_is_does_not_pass_an_nfc_reader(receiver_of):
    """Below the normalisation, ids of another text than the one given are told apart."""
    cut = receiver_of("byte_level_nfc").cut_texts(["cafe\u0301"], ["cafe\u0301".encode()])
    assert cut.faults == {0: "bytes_differ"}


def test_finished_text_without_an_own_eos_is_the_text(folders):
    """A receiver that has no EOS gives the ids of the text alone."""
    endless = Receiver(read_tokenizer_file(folders["byte_level"]), eos_ids=())
    open_ids, closed_ids = (
        retokenize(endless, b"yah", finished=finished, max_tokens=9).token_ids.tolist() for finished in (False, True)
    )
    assert open_ids == closed_ids
    with pytest.raises(ValueError, match="no EOS"):
        _ = endless.eos_id


def test_own_ids_become_bytes_through_the_table(receiver_of, tokenizers_by_kind):
    """Own ids give their bytes, EOS, holes and embedding padding give none, and a cut character stays cut."""
    receiver = receiver_of("byte_level")
    ids = tokenizers_by_kind["byte_level"].encode("yah \U0001f469").ids
    assert receiver.completion_bytes([*ids, receiver.eos_id, 10**6]) == "yah \U0001f469".encode()
    assert receiver.completion_bytes(ids[:-1]) == "yah \U0001f469".encode()[: -len(receiver.table.pieces[ids[-1]])]
    with pytest.raises(ValueError, match="negative"):
        receiver.completion_bytes([-1])


def test_phantom_space_is_taken_off_once(receiver_of):
    """With a dummy prefix the first space of own ids is no text, the second is."""
    receiver = receiver_of("metaspace_prepend")
    space = receiver.table.pieces.index(b" ")
    assert receiver.completion_bytes([space]) == b""
    assert receiver.completion_bytes([receiver.eos_id, space, space]) == b" "
    assert receiver_of("metaspace").completion_bytes([space]) == b" "


def test_non_special_added_token_is_used(receiver_of, tokenizers_by_kind):
    """A non-special added token stands for its literal UTF-8, not for the character map."""
    receiver = receiver_of("byte_level")
    result = retokenize(receiver, "<th\u00efnk>".encode(), finished=False, max_tokens=9)
    assert result.token_ids.tolist() == [tokenizers_by_kind["byte_level"].token_to_id("<th\u00efnk>")]


def test_wordpiece_is_refused(save_folder):
    """Kinds whose bytes cannot be known exactly are refused with one clear line."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=100, special_tokens=["[UNK]", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(["a small text"], trainer)
    with pytest.raises(ModelFolderError, match=r"exactly: its pieces do not record spaces.*WordPiece.*byte-level BPE"):
        load_receiver(save_folder(tokenizer))


@pytest.mark.parametrize(
    ("model", "decoder", "why"),
    [
        (models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0), decoders.Metaspace(), "without byte fallback an unk"),
        (models.Unigram([("<0x41>", 0.0)], byte_fallback=True), decoders.Metaspace(), "emits a special token wherever"),
        (models.WordLevel({"a": 0}, unk_token="a"), None, "an unknown word becomes one <unk>"),
        (models.BPE({"a": 0}, []), decoders.Fuse(), "decoder is not byte-level, and without byte fallback"),
        (models.BPE({"a": 0}, [], byte_fallback=True), decoders.Fuse(), "decoder does not define the bytes"),
    ],
    ids=["unigram", "unigram_with_bytes", "word_level", "bpe", "bpe_with_bytes"],
)
def test_every_refused_kind_says_why(save_folder, model, decoder, why):
    """Not only that it is refused: what of a text would be lost."""
    tokenizer = Tokenizer(model)
    if decoder:
        tokenizer.decoder = decoder
    with pytest.raises(ModelFolderError, match=f"cannot be aligned exactly: .*{why}"):
        load_receiver(save_folder(tokenizer))


@pytest.mark.parametrize(
    ("normalizer", "why"),
    [
        (normalizers.NFKC(), "NFKC rewrites characters such as \ufb01"),
        (normalizers.Lowercase(), "Lowercase removes case"),
        (
            normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()]),
            "Nmt turns line breaks.* and its normalizer NFKC",
        ),
    ],
    ids=["nfkc", "lowercase", "t5_like"],
)
def test_probe_refuses_a_normalizer_that_changes_text(save_folder, folders, normalizer, why):
    """A tokenizer of a supported kind that does not reproduce the probes is refused at load, with the step to blame."""
    tokenizer = Tokenizer.from_file(str(folders["byte_level"] / "tokenizer.json"))
    tokenizer.normalizer = normalizer
    with pytest.raises(ModelFolderError, match=f"byte for byte: its normalizer {why}.*bytes_differ"):
        load_receiver(save_folder(tokenizer))


def test_missing_byte_tokens_are_refused(save_folder, make_metaspace):
    """Byte fallback with holes cannot express every text."""
    with pytest.raises(ModelFolderError, match=r"byte for byte: \d+ of the 256 bytes have no token of their own"):
        load_receiver(save_folder(make_metaspace(num_bytes=128)))


def test_missing_or_broken_files_say_so(tmp_path):
    """A folder without tokenizer.json, or with a broken one, is the user's to cure."""
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json is missing"):
        load_receiver(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFolderError, match="not valid JSON"):
        load_receiver(tmp_path)


@pytest.mark.parametrize("num_texts", [0, 1, 2, 7, 50])
def test_threads_cut_texts_as_one_thread_does(receiver, monkeypatch, num_texts):
    """Whatever rows a thread takes: ids and bounds are those of the rows one by one, in their order."""
    texts = [f"{TEXTS[n % len(TEXTS)]} {n}" for n in range(num_texts)]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(3))
    names = set[str]()
    rows_of = receiver._encoder._rows

    def noted(part):
        names.add(threading.current_thread().name)
        return rows_of(part)

    monkeypatch.setattr(receiver._encoder, "_rows", noted)
    monkeypatch.setattr("mrl.alignment.encoders.PIECE_CHARS", 30)
    cut = receiver._encoder.encode(texts)

    alone = [rows_of([text])[0].ids for text in texts]
    assert [part.tolist() for part in np.split(cut.token_ids, cut.offsets[1:-1])] == (alone or [[]])
    assert cut.offsets.tolist() == np.cumsum([0, *map(len, alone)]).tolist()
    assert any(name.startswith("encoding") for name in names) == (num_texts > 2)
