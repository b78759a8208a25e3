"""An episode that is played again has to say what it said."""

from concurrent.futures import Future

import pytest

from mrl.records.episodes import Message
from mrl.tasks.environments.contract import EnvironmentTurn
from mrl.tasks.environments.episode_script import Script
from mrl.tasks.environments.wire import OpenEpisode

SAID = EnvironmentTurn((Message("user", "guess"),), stream="session 1")


@pytest.mark.parametrize(
    ("again", "is_lost"),
    [
        (SAID, False),
        (EnvironmentTurn(SAID.messages, stream="session 2"), False),
        (EnvironmentTurn((Message("user", "guess?"),), stream="session 1"), True),
    ],
)
def test_what_is_said_again_is_compared_and_not_to_whom(again, is_lost):
    """An agent that plays it again has another session."""
    script, future = Script(1, wall_s=9.0), Future()
    script.add(OpenEpisode(1, 0, "{}"), future)
    assert script.answer(SAID) == ""
    script.begin_again()
    assert bool(script.answer(again)) == is_lost
    assert future.result() == SAID
