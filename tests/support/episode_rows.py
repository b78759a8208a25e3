"""Rows of an episode, read from the answer that a learner gets."""

from mrl.records.finish import FinishReason
from mrl.records.rollouts import Answer
from mrl.rollout.episode import PlayedEpisode


def rows_of(played: PlayedEpisode) -> list[list[int]]:
    """Return the tokens before each turn in its row, read from the answer that the learner gets."""
    answer = Answer(
        token_ids=played.token_ids.tobytes(), logprobs=b"", versions=[], completion=b"", reward=0.0,
        finish_reason=FinishReason.STOP, segments=played.segments,
    )  # fmt: skip
    assert answer.has_sound_rows
    starts = [] if answer.row_starts is None else answer.row_starts.tolist()
    found, end = [], 0
    for segment in played.segments:
        start = max([0, *(one for one in starts if one <= end)])
        prompt = [] if start else played.prompt_token_ids.tolist()
        if segment.is_sampled:
            found.append([*prompt, *played.token_ids[start:end].tolist()])
        end += segment.num_tokens
    return found
