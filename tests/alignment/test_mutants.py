"""Bugs planted one at a time in copies of the modules: the property named beside each must notice.

A row says which module, which text becomes which, and the property. The copies are imported in place of the package
while the properties run, and never touch the package itself.
"""

import importlib.util
import shutil
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

import mrl.alignment

PACKAGE = Path(mrl.alignment.__file__).parent
PROPERTIES = Path(__file__).with_name("properties.py")
SEEDS = range(3)

DEFINITION, SWAPPED = "spans_are_those_of_the_definition", "swapped_sides_give_swapped_spans"
REFINING, ROW_BY_ROW = "refining_the_peer_never_lowers_the_span_count", "batch_equals_row_by_row"
ACCOUNTING, TEXT = "every_logprob_is_in_a_span_or_dropped", "rows_stand_for_the_peer_text"
NORMALISED, CUT = "normalised_rows_keep_their_boundaries", "cut_answers_are_prefixes"
IDENTITY, IDS, TOLD = "the_own_tokenizer_passes_untouched", "lying_ids_are_rejected", "false_descriptions_are_rejected"
FIELDS, SPREAD = "lying_fields_are_rejected", "spreading_keeps_the_total_of_every_span"
ADVANTAGES, SAMPLED = "advantages_are_byte_weighted_means", "sampled_answers_travel"
THERE_AND_BACK = "swapped_tokenizers_give_swapped_spans"
PLAIN, ENDLESS = "plain_text_gives_no_special_id", "an_end_without_counterpart_is_dropped"

MUTANTS = [
    ("spans", "is_closing &= lengths > 0", "is_closing &= lengths >= 0", DEFINITION),
    ("spans", "row_starts[row + 1] - 1)", "row_starts[row + 1])", DEFINITION),
    ("spans", "span_of_token = closed[:-1]", "span_of_token = closed[1:]", DEFINITION),
    ("spans", "[shared] = True", "[shared[1::2]] = is_common_end[row_ends] = True", DEFINITION),
    ("spans", "shared = receiver_ends[1:][is_peer_end[receiver_ends[1:]]]", "shared = receiver_ends[1:]", SWAPPED),
    ("spans", "is_common_end[shared] = True", "is_common_end[row_ends] = True", REFINING),
    (
        "spans",
        "of_peer, peer_starts = _number(is_common_end",
        "of_peer, peer_starts = _number(is_peer_end",
        THERE_AND_BACK,
    ),
    ("translate", "first, taken = row, 0", "first, taken = row + 1, 0", ROW_BY_ROW),
    ("translate", "is_kept[cut : spans.row_starts[place + 1]] = False", "is_kept[cut:] = False", ROW_BY_ROW),
    ("aligned_batch", "where=part >= 0", "where=part >= -1", ROW_BY_ROW),
    ("aligned_batch", "peer_spans - np.int32(first)", "peer_spans", ROW_BY_ROW),
    ("translate", "sums_at(dropped_row, logprobs[~is_booked], num_rows)", "np.zeros(num_rows)", ACCOUNTING),
    ("translate", "logprobs[is_booked], num_spans", "logprobs[is_booked] * 0.999, num_spans", ACCOUNTING),
    ("translate", "max_tokens])", "max_tokens - 1])", CUT),
    ("translate", "peer.flags[row] |= Flag.RECV_TRUNC", "pass", CUT),
    ("translate", 'peer.reject({row: "too_long"})', "pass", CUT),
    ("peer_rows", "ends[ends <= valid_bytes]", "ends[ends < valid_bytes]", TEXT),
    ("peer_rows", "& 0xC0) != 0x80", "& 0xC0) != 0x81", TEXT),
    ("peer_rows", "rows.lengths[tokens] = normalized", "_ = normalized", TEXT),
    ("peer_rows", "rows.flags[row] |= Flag.NORM", "pass", TEXT),
    ("peer_rows", "rows.flags[row] |= Flag.TAIL", "pass", TEXT),
    ("peer_rows", "flags = is_cut * Flag.TAIL | is_odd", "flags = is_odd", TEXT),
    ("peer_rows", "is_odd * Flag.NONCANON | ", "", TEXT),
    ("peer_rows", "> ends_well", "> 0", TEXT),
    ("own_rows", "ends & is_whole & can_end", "ends & can_end", TEXT),
    ("own_rows", "text_lengths + ~is_text", "text_lengths + ~is_text * 2", TEXT),
    ("receiver", "return [n for n, text in enumerate(data)", "return [n for n, text in ()", TEXT),
    ("byte_table", "] -= 1", "] -= 0", TEXT),
    ("normalization", "new_ends[entered > passed] = 0", "pass", NORMALISED),
    ("normalization", "np.cumsum(self.growth)])[passed]", "self.growth])[passed]", NORMALISED),
    ("normalization", 'ends, side="left"', 'ends, side="right"', NORMALISED),
    ("normalization", "range(0x1161, 0x11C3)", "range(0)", NORMALISED),
    ("own_rows", "np.ones(len(tokens), np.int32)", "text_lengths[tokens]", IDENTITY),
    ("own_rows", "order = np.argsort(rows)", "order = np.arange(len(rows))", IDENTITY),
    ("own_rows", "own.size and own.min() < 0", "False", IDS),
    ("own_rows", "told != text_lengths", "told != told", TOLD),
    ("own_rows", "wrong = set(receiver", "wrong = set() and set(receiver", TOLD),
    ("own_rows", "peer.kept[rows[ends & is_whole & ~has_eos]] -= 1", "pass", ENDLESS),
    ("own_rows", "|= Flag.EOS_UNMAPPED", "|= 0", ENDLESS),
    ("peer_answer", " & (logprobs >= MIN_LOGPROB_NATS)", "", FIELDS),
    ("peer_answer", "logprobs <= LOGPROB_ROUNDING_NATS", "logprobs <= 1", FIELDS),
    ("peer_answer", "if not is_credible.all():", "if (logprobs > 0).any():", FIELDS),
    ("peer_answer", "row_sums(lengths, offsets) != sizes", "row_sums(lengths, offsets) > sizes", FIELDS),
    ("peer_answer", "is_odd = (lengths < 0) | (special & (lengths != 0))", "is_odd = lengths < 0", FIELDS),
    ("peer_answer", "is_odd = (lengths < 0) | (special", "is_odd = (special", FIELDS),
    ("peer_answer", "if len(shape) != 1 or not shape == logprobs.shape", "if not shape", FIELDS),
    ("peer_answer", " or len(answer.completion) > MAX_COMPLETION_BYTES", "", FIELDS),
    ("peer_answer", "whole = len(data) % wanted.itemsize == 0", "whole = True", FIELDS),
    ("spreading", "_span_sums(batch, own)) / batch.span_receiver_tokens", "_span_sums(batch, own))", SPREAD),
    ("spreading", "np.cumsum(batch.span_receiver_tokens, dtype=np.int64) - 1", "batch.span_of_token * 0", SPREAD),
    ("spreading", "(total != 0)", "(total == total)", SPREAD),
    ("spreading", "np.where(is_alone, batch.span_logprob[batch.span_of_token], ", "(", SPREAD),
    ("spreading", "weights * (values - first[span])", "(values - first[span])", ADVANTAGES),
    ("spreading", "== 0)[span]] = 1.0", "== 0)[span]] = 0.0", ADVANTAGES),
    ("spreading", "(first + deviation)", "(first + deviation * 1.001)", ADVANTAGES),
    ("byte_table", "audible = np.flatnonzero(lengths)", "audible = np.arange(len(lengths))", SAMPLED),
    ("byte_table", '= None if token.get("special") else literal', "= literal", PLAIN),
    ("byte_table", 'literal = (\n            str(token["content"]).encode()', "literal = (\n            b''", SAMPLED),
    ("source", "odd.add(row)", "pass", SAMPLED),
    ("encoders", "encode_special_tokens = True", "encode_special_tokens = False", PLAIN),
    ("receiver", "if is_special.any():", "if False:", PLAIN),
    ("translate", 'Flag.SPECIAL_OUT if reason == "special_out" else 0', "0", PLAIN),
]


@contextmanager
def package_from(folder: Path):
    """`mrl.alignment` imported from another folder, for as long as the block lasts."""
    saved = {name: module for name, module in sys.modules.items() if name.startswith("mrl.alignment")}
    for name in saved:
        del sys.modules[name]
    replaced = ModuleType("mrl.alignment")
    replaced.__path__ = [str(folder)]
    sys.modules["mrl.alignment"] = replaced
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith("mrl.alignment")]:
            del sys.modules[name]
        sys.modules.update(saved)


def run_property(name: str, folders: dict[str, Path]) -> None:
    """One property, with the alignment package that is importable now."""
    spec = importlib.util.spec_from_file_location("alignment_properties_of_a_copy", PROPERTIES)
    properties = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(properties)
    receivers = properties.load(folders)
    for seed in SEEDS:
        properties.CHECKS[name](receivers, Random(seed))


def is_noticed(name: str, folders: dict[str, Path], copy: Path) -> bool:
    """Whether the property fails, in whatever way, on the package in `copy`."""
    noticed = True
    with package_from(copy), suppress(Exception):
        run_property(name, folders)
        noticed = False
    return noticed


@pytest.mark.parametrize(("module", "old", "new", "name"), MUTANTS)
def test_mutant_is_noticed(tmp_path, folders, module, old, new, name):
    """A planted bug makes its property fail."""
    copy = shutil.copytree(PACKAGE, tmp_path / "alignment", ignore=shutil.ignore_patterns("__pycache__"))
    source = (copy / f"{module}.py").read_text(encoding="utf-8")
    assert source.count(old) == 1, "the text to change stands exactly once in the module"
    (copy / f"{module}.py").write_text(source.replace(old, new), encoding="utf-8")
    assert is_noticed(name, folders, copy)


def test_a_copy_without_a_bug_passes(tmp_path, folders):
    """What the mutants show is the bug, not the copying; and every property has a mutant that it notices."""
    copy = shutil.copytree(PACKAGE, tmp_path / "alignment", ignore=shutil.ignore_patterns("__pycache__"))
    names = {name for *_, name in MUTANTS}
    spec = importlib.util.spec_from_file_location("alignment_properties_list", PROPERTIES)
    properties = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(properties)
    assert names == set(properties.CHECKS)
    assert [name for name in sorted(names) if is_noticed(name, folders, copy)] == []
