"""Texts of a canary: few and short, since learner and engines score them at every version."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

NUM_PROMPTS = 16
MIN_ROW_TOKENS, MAX_ROW_TOKENS = 4, 96
MAX_PROMPT_TOKENS = 32
"""Most prompt tokens of a row with an answer: the last ones of the prompt."""
MIN_TOKENS, MAX_TOKENS = 512, 2048
TRAINED_SHARE = 1 / 32
"""Tokens of a canary as a share of those of the step, within the bounds above. Three passes of a canary then cost a
thirtieth of the step's passes."""

Int32s = npt.NDArray[np.int32]


def longest_row(context_tokens: int) -> int:
    """Return the most tokens of a row that a server with this context can score: it samples one more."""
    return min(MAX_ROW_TOKENS, context_tokens - 1)


def texts_of_prompts(prompts: Sequence[Int32s], *, max_row_tokens: int = MAX_ROW_TOKENS) -> list[list[int]]:
    """Return the ends of some prompts: before the first step there are no answers. Raises ValueError without any."""
    if not prompts:
        raise ValueError("a canary needs at least one prompt")
    return [_row(prompt[-max_row_tokens:]) for prompt in prompts[:NUM_PROMPTS]]


def texts_of_step(
    prompts: Sequence[Int32s], answers: Sequence[Int32s], *, max_row_tokens: int = MAX_ROW_TOKENS
) -> list[list[int]]:
    """Return rows that are trained on, spread over the step: the end of a prompt and the beginning of its answer."""
    rows = [
        _row(np.concatenate([prompt[-MAX_PROMPT_TOKENS:], answer])[:max_row_tokens])
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    trained = sum(prompt.size + answer.size for prompt, answer in zip(prompts, answers, strict=True))
    count = _rows_of(trained, len(rows), sum(len(row) for row in rows))
    return [rows[place] for place in np.linspace(0, len(rows) - 1, count).astype(int)]


def largest_canary(num_rows: int, prompt_tokens: int, answer_tokens: int) -> tuple[int, int]:
    """Return (rows, tokens of each) of the canary of a step with `num_rows` rows of these lengths."""
    longest = min(MAX_ROW_TOKENS, min(prompt_tokens, MAX_PROMPT_TOKENS) + answer_tokens)
    return _rows_of(num_rows * (prompt_tokens + answer_tokens), num_rows, num_rows * longest), longest


def _rows_of(trained_tokens: int, num_rows: int, tokens: int) -> int:
    """Return how many rows are enough, of `num_rows` rows with `tokens` tokens together."""
    wanted = min(MAX_TOKENS, max(MIN_TOKENS, round(TRAINED_SHARE * trained_tokens)))
    return min(num_rows, -(-wanted * num_rows // tokens))


def _row(token_ids: Int32s) -> list[int]:
    """Return a row; one too short to be split into a prompt and something to score has its tokens repeated."""
    return np.resize(token_ids, max(MIN_ROW_TOKENS, token_ids.size)).tolist()
