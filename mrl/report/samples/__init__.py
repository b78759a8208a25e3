"""Answers of a run for a person to read: `wanted_answers` finds those that are wanted, `sample_lines` writes them for a
terminal, `sample_page` as one page with a search; `conversations` tells the turns of episodes, and `live_episode` shows
the newest of them in the live view.
"""
