"""Properties of every alignment, as checks over generated answers.

A check takes the receivers of all kinds and a source of chance, and fails by an assertion. Expectations are computed
slowly, one token at a time, from the definitions (`definitions`).
"""

from tests.support.alignment_properties import (
    answers_told_by_sources,
    batches_and_limits,
    figures,
    own_tokenizer,
    policies_over_bytes,
    rows_of_text,
    spans_alone,
    spread_numbers,
    tokenizer_sources,
    wire_fields,
)

ROOMS = (
    spans_alone,
    rows_of_text,
    batches_and_limits,
    own_tokenizer,
    answers_told_by_sources,
    wire_fields,
    spread_numbers,
    figures,
    policies_over_bytes,
    tokenizer_sources,
)
CHECKS = {
    name.removeprefix("check_"): check
    for room in ROOMS
    for name, check in vars(room).items()
    if name.startswith("check_") and check.__module__ == room.__name__
}
