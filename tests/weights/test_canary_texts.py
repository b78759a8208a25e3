"""A canary's texts are few and short, and spread over what they are taken from."""

import numpy as np
import pytest

from mrl.weights.canary_texts import (
    MAX_PROMPT_TOKENS,
    MAX_ROW_TOKENS,
    MAX_TOKENS,
    MIN_TOKENS,
    NUM_PROMPTS,
    largest_canary,
    longest_row,
    texts_of_prompts,
    texts_of_step,
)


def ids(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def test_of_prompts_the_ends_are_taken():
    """Beginnings are alike under a chat template."""
    texts = texts_of_prompts([ids(300), ids(7)] + [ids(5)] * 40)

    assert len(texts) == NUM_PROMPTS
    assert texts[0] == list(range(300 - MAX_ROW_TOKENS, 300))
    assert texts[1] == list(range(7))


def test_of_a_step_the_end_of_a_prompt_and_the_beginning_of_its_answer_are_taken():
    """What it fits, no more."""
    (text,) = texts_of_step([ids(100)], [ids(500, first=1000)])

    expected = [*range(100 - MAX_PROMPT_TOKENS, 100), *range(1000, 1000 + MAX_ROW_TOKENS - MAX_PROMPT_TOKENS)]
    assert text == expected


@pytest.mark.parametrize(
    ("rows", "answer", "tokens"), [(4, 50, 4 * 60), (40, 50, MIN_TOKENS), (512, 90, 1600), (4096, 90, MAX_TOKENS)]
)
def test_a_canary_costs_a_small_share_of_a_step(rows, answer, tokens):
    """At least some hundred tokens where there are any, at most two thousand; rows from all over the step."""
    texts = texts_of_step([ids(10, first=row) for row in range(rows)], [ids(answer)] * rows)

    assert tokens <= sum(len(text) for text in texts) < tokens + MAX_ROW_TOKENS
    assert largest_canary(rows, 10, answer) == (len(texts), len(texts[0])), "as the memory plan reckons"
    firsts = [text[0] for text in texts]
    assert firsts[0] == 0
    assert firsts[-1] == rows - 1
    assert len(set(firsts)) == len(firsts)


def test_a_row_has_something_to_score_and_room_for_the_token_that_a_server_samples():
    """Whatever a tokenizer makes of a prompt."""
    assert texts_of_prompts([ids(1, first=5), ids(2, first=7)]) == [[5, 5, 5, 5], [7, 8, 7, 8]]
    assert [longest_row(tokens) for tokens in (16, 4096)] == [15, MAX_ROW_TOKENS]
    assert len(texts_of_step([ids(40)], [ids(40)], max_row_tokens=15)[0]) == 15
    with pytest.raises(ValueError, match="needs at least one prompt"):
        texts_of_prompts([])
