"""The kinds of environment: a user's class, "module:Class"; an OpenEnv server, "ws://HOST:PORT"; an agent, "agent:...".

`python -m mrl.tasks.environments.opening MODULE:CLASS ROW` says in one line what is wrong with a class.
"""

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

from mrl.plugins import see_modules
from mrl.tasks.environments.contract import Environment
from mrl.tasks.environments.gateway_location import MARK
from mrl.tasks.environments.user_class import ClassEnvironment, ClassMistake, check_reward, check_row, tools_of

URLS = ("ws://", "wss://")


def open_environment(name: str) -> Callable[[], Environment]:
    """Return a function that makes one episode per call. Raises ClassMistake, with the cure, for an unfit class."""
    if name.startswith(MARK):
        from mrl.tasks.environments.agent_seat import AgentSeat

        return lambda: AgentSeat(name)
    if name.startswith(URLS):
        from mrl.tasks.environments.openenv import OpenEnvEnvironment

        return lambda: OpenEnvEnvironment(name)
    kind = named_class(name)
    tools = tools_of(kind, name)
    return lambda: ClassEnvironment(kind, tools)


def named_class(name: str) -> type:
    """Return the class "module:Class". Raises ClassMistake."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ClassMistake(f'{name!r} does not name a class; write "module:Class", or a URL, ws://HOST:PORT')
    found: type = named_object(module, attribute)
    return found


def named_object(module: str, attribute: str) -> Any:
    """Return the attribute of a user's module. Raises ClassMistake."""
    see_modules()
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError:
        raise ClassMistake(f"the module {module} has no {attribute}") from None
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything at its import
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise ClassMistake(f"the module {module} cannot be imported: {told}") from None


def main(words: list[str]) -> int:
    """Return 0 for a class that can be an environment and takes the row, which is JSON; else 2, and print why."""
    name, row = words
    try:
        kind = named_class(name)
        tools_of(kind, name)
        check_row(kind, name, json.loads(row))
        check_reward(kind, name)
    except ClassMistake as mistake:
        print(mistake, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
