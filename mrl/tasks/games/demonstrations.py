"""Episodes of a game for the warm start: every turn has the right form, and a share of the turns is played well.

A policy learns to answer in the form that the game reads, and to play well in the share `skill` of the turns. It lacks
only the choice, which reinforcement learning finds.
"""

import random
from collections.abc import Callable

from mrl.records.episodes import Message
from mrl.tasks.environments.opening import named_class
from mrl.tasks.environments.tool_syntax import PLAIN
from mrl.tasks.environments.user_class import ClassEnvironment, tools_of
from mrl.tasks.games.game_names import GAMES
from mrl.tasks.games.lookup import NUMBERS
from mrl.tasks.games.maze import DOORS
from mrl.tasks.operations import write_completion

MAX_TURNS = 8
Said = tuple[tuple[str, str], ...]
"""(text of the game, the policy's completion) of each turn."""


def demonstrated(game: str, seed: int, rng: random.Random, *, skill: float) -> Said:
    """Return the turns of one episode from this start state, each played well with probability `skill`."""
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
    """Return a guess: the middle of the numbers left, or any number."""
    low, high = 1, int((said[0][0] if said else prompt).rstrip(".").rpartition(" ")[2])
    top = high
    answers = [*(answer for answer, _ in said[1:]), prompt] if said else []
    for (_, completion), answer in zip(said, answers, strict=True):
        number = int(completion.partition(">")[2].partition("<")[0])
        low, high = (max(low, number + 1), high) if answer == "higher" else (low, min(high, number - 1))
    number = (low + high) // 2 if plays_well else rng.randint(1, top)
    return write_completion("guess", str(number))


def _look(prompt: str, said: Said, rng: random.Random, plays_well: bool) -> str:
    """Return a call that looks the word up, then the number found; or a made-up number."""
    if plays_well and not said:
        return f'call lookup {{"key":"{prompt.rpartition(" ")[2]}"}}'
    is_told = bool(said) and prompt.isdigit()
    return write_completion("found", prompt if is_told else str(rng.randint(*NUMBERS)))


def _go(prompt: str, said: Said, rng: random.Random, plays_well: bool) -> str:
    """Return the door that the draught tells, or any door."""
    door = prompt.rpartition(" ")[2] if plays_well else str(rng.randint(1, DOORS))
    return write_completion("go", door)


PLAYERS: dict[str, Callable[[str, Said, random.Random, bool], str]] = {
    "higher_lower": _guess,
    "lookup": _look,
    "maze": _go,
}
"""Game -> player: (last text of the game, turns so far, rng, whether to play well) -> the policy's turn."""


def _text(messages: tuple[Message, ...]) -> str:
    return "\n".join(message.content for message in messages)
