"""Episodes of a game for the warm start: every turn has its form, and how well it is played is a matter of a share.

A policy learns to answer as the game reads it, and to play well in `skill` of the turns. What it lacks is the choice,
which reinforcement learning finds.
"""

import random
from collections.abc import Callable

from mrl.records.episodes import Message
from mrl.tasks.environments.doors import named_class
from mrl.tasks.environments.tool_syntax import PLAIN
from mrl.tasks.environments.user_class import ClassEnvironment, tools_of
from mrl.tasks.games.game_names import GAMES
from mrl.tasks.games.lookup import NUMBERS
from mrl.tasks.games.maze import DOORS
from mrl.tasks.operations import write_completion

MAX_TURNS = 8
Said = tuple[tuple[str, str], ...]
"""(what the game said, what the policy answered) of each turn."""


def demonstrated(game: str, seed: int, rng: random.Random, *, skill: float) -> Said:
    """The turns of one episode from this start state, each played well with the probability `skill`."""
    name = GAMES[game]
    kind = named_class(name)
    environment = ClassEnvironment(kind, tools_of(kind, name))
    turn = environment.reset(seed, {})
    said: Said = ()
    while not turn.done and len(said) < MAX_TURNS:
        prompt = _text(turn.messages)
        completion = PLAYERS[game](prompt, said, rng, rng.random() < skill)
        said = (*said, (prompt, completion))
        turn = environment.step(PLAIN.read(completion))
    return said


def _guess(prompt: str, said: Said, rng: random.Random, plays_well: bool) -> str:
    """Halves what is left, or guesses any number."""
    low, high = 1, int((said[0][0] if said else prompt).rstrip(".").rpartition(" ")[2])
    top = high
    answers = [*(answer for answer, _ in said[1:]), prompt] if said else []
    for (_, completion), answer in zip(said, answers, strict=True):
        number = int(completion.partition(">")[2].partition("<")[0])
        low, high = (max(low, number + 1), high) if answer == "higher" else (low, min(high, number - 1))
    number = (low + high) // 2 if plays_well else rng.randint(1, top)
    return write_completion("guess", str(number))


def _look(prompt: str, said: Said, rng: random.Random, plays_well: bool) -> str:
    """Looks the word up and says what it was told, or makes an answer up."""
    if plays_well and not said:
        return f'call lookup {{"key":"{prompt.rpartition(" ")[2]}"}}'
    is_told = bool(said) and prompt.isdigit()
    return write_completion("found", prompt if is_told else str(rng.randint(*NUMBERS)))


def _go(prompt: str, said: Said, rng: random.Random, plays_well: bool) -> str:
    """Follows the draught, or takes any door."""
    door = prompt.rpartition(" ")[2] if plays_well else str(rng.randint(1, DOORS))
    return write_completion("go", door)


PLAYERS: dict[str, Callable[[str, Said, random.Random, bool], str]] = {
    "higher_lower": _guess,
    "lookup": _look,
    "maze": _go,
}
"""Game -> (what it said last, turns so far, rng, whether to play well) -> the policy's turn."""


def _text(messages: tuple[Message, ...]) -> str:
    return "\n".join(message.content for message in messages)
