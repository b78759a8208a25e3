"""The games by name."""

GAMES: dict[str, str] = {
    "higher_lower": "mrl.tasks.games.higher_lower:HigherLower",
    "lookup": "mrl.tasks.games.lookup:Lookup",
    "maze": "mrl.tasks.games.maze:Maze",
}
"""Name -> "module:Class". A new game is one file, one line here, and a player in `demonstrations`."""
