"""Small games in the words that locally made policies know: deterministic by seed, offline, a few turns each.

- `higher_lower`    a number to guess; each wrong guess is answered by "higher" or "lower"
- `lookup`          a number in a table that only a tool reads
- `maze`            a way through several rooms, where every wrong door ends the game
- `game_names`      the games by name
- `demonstrations`  episodes of a game for the warm start, most of them played badly
"""
