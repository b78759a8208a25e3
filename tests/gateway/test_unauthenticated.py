"""Connections without a key have a short time, and there are few of them."""

from types import SimpleNamespace

from mrl.gateway.unauthenticated import MAX_STRANGERS, STRANGER_S, UnauthenticatedConnections


class Connection:
    """Remembers whether it was closed."""

    def __init__(self):
        self.is_gone = False
        self.transport = SimpleNamespace(abort=self.abort)

    def abort(self):
        """As a transport's."""
        self.is_gone = True


def test_whoever_shows_no_key_in_time_goes():
    """Those with a key stay, however long they say nothing."""
    now_s = [0.0]
    strangers = UnauthenticatedConnections(lambda: now_s[0])
    stranger, friend = Connection(), Connection()
    strangers.let_in(SimpleNamespace(protocol=friend))
    assert strangers.send_away([stranger, friend]) == 0
    now_s[0] = STRANGER_S + 1
    assert strangers.send_away([stranger, friend]) == 1
    assert (stranger.is_gone, friend.is_gone) == (True, False)


def test_of_too_many_the_oldest_go():
    """A crowd that comes anew displaces itself."""
    now_s = [0.0]
    strangers = UnauthenticatedConnections(lambda: now_s[0])
    early = [Connection() for _ in range(10)]
    strangers.send_away(early)
    now_s[0] = 1.0
    late = [Connection() for _ in range(MAX_STRANGERS - 3)]
    assert strangers.send_away([*late, *early]) == 7
    assert sum(one.is_gone for one in early) == 7
    newest = [Connection() for _ in range(MAX_STRANGERS)]
    assert strangers.send_away([*newest, *late, *early[7:]]) == 3, "the others may be about to show a key"
