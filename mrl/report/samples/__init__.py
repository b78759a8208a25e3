"""Answers of a run for a person to read.

`answer_filter` selects answers, `sample_lines` writes them for a terminal, and `sample_page` writes them as one page
with a search. `conversations` shows the turns of episodes, and `live_episode` shows new episodes in the live view.
"""
