"""The book of connections, without a socket."""

import pytest

from mrl.transport.allow_list import AllowList
from mrl.transport.grants import Grant
from mrl.transport.keys import load_client_keys, revoke_client_key
from mrl.transport.links import Link, Links, routing_id

QWEN, LLAMA = Grant("worker", "qwen"), Grant("worker", "llama")
HERE = (3, 4)


@pytest.fixture
def allowed(keys):
    """A server's view of the allow-list."""
    return AllowList(keys.folder)


@pytest.fixture
def key_of(keys):
    """The public key of a grant."""
    return lambda grant: load_client_keys(keys.folder, grant).public.decode()


def any_grant(_grant):
    return True


def test_a_link_is_known_only_with_its_key(allowed, key_of):
    """The same routing id with another valid key is a stranger, and refused."""
    links = Links(allowed, any_grant)
    routing = routing_id("worker/qwen/0")
    assert links.known(routing, key_of(QWEN)) is None
    link = links.admit(routing, key_of(QWEN), HERE)
    assert link == Link(b"worker/qwen/0", key_of(QWEN), QWEN, HERE)
    assert links.known(routing, key_of(QWEN)) is link
    assert links.known(routing, key_of(LLAMA)) is None
    assert links.admit(routing, key_of(LLAMA), HERE) == "impersonation"
    assert links.route(b"worker/qwen/0") == routing


def test_nobody_can_guess_a_routing_id():
    """Two of the same name differ, and neither begins with a zero byte, which ZeroMQ keeps for itself."""
    first, second = routing_id("worker/qwen/0"), routing_id("worker/qwen/0")
    assert first != second
    assert len(first) == len(b"worker/qwen/0") + 17
    assert first[0] != 0


def test_the_newest_link_gets_the_answers_and_keeps_them(allowed, key_of):
    """What the old link still had to say does not take them back."""
    links = Links(allowed, any_grant)
    old, new = routing_id("worker/qwen/0"), routing_id("worker/qwen/0")
    links.admit(old, key_of(QWEN), HERE)
    links.admit(new, key_of(QWEN), HERE)
    assert links.known(old, key_of(QWEN)) is not None
    assert links.route(b"worker/qwen/0") == new


def test_a_role_that_is_not_admitted_is_refused(allowed, key_of):
    """At the handshake and at the first message."""
    links = Links(allowed, lambda grant: grant == QWEN)
    assert (links.refusal(key_of(QWEN)), links.refusal(key_of(LLAMA)), links.refusal("x" * 40)) == (
        "", "role", "unknown_key"
    )  # fmt: skip
    assert links.admit(routing_id("worker/llama/0"), key_of(LLAMA), HERE) == "role"
    assert links.route(b"worker/llama/0") is None


def test_links_of_a_revoked_key_are_dropped_and_others_stay(allowed, key_of, keys):
    """Each of them is returned once, and has no route any more."""
    links = Links(allowed, any_grant)
    qwen = [links.admit(routing_id(f"worker/qwen/{number}"), key_of(QWEN), HERE) for number in range(2)]
    links.admit(routing_id("worker/llama/0"), key_of(LLAMA), HERE)
    revoke_client_key(keys.folder, "worker/qwen")
    allowed.reload()
    assert links.drop_refused() == qwen
    assert links.drop_refused() == []
    assert (links.route(b"worker/qwen/0"), links.route(b"worker/llama/0") is None) == (None, False)
    assert links.refusal(qwen[0].key) == "revoked_key"


def test_the_book_is_bounded(allowed, key_of):
    """The oldest links are forgotten, with their routes; a forgotten link is let in anew when it speaks."""
    links = Links(allowed, any_grant, max_links=10)
    routings = [routing_id(f"worker/qwen/{number}") for number in range(100)]
    for routing in routings:
        links.admit(routing, key_of(QWEN), HERE)
    assert [number for number in range(100) if links.route(f"worker/qwen/{number}".encode())] == list(range(90, 100))
    assert [routing in routings[90:] for routing in routings] == [
        links.known(routing, key_of(QWEN)) is not None for routing in routings
    ]
    assert isinstance(links.admit(routings[0], key_of(QWEN), HERE), Link)


def test_who_says_no_name_is_no_impersonator(allowed, key_of):
    """So come messages whose connection lost its name to a newer one."""
    assert Links(allowed, any_grant).admit(b"\0abcd", key_of(QWEN), HERE) == "unnamed"


def test_a_forgotten_old_link_does_not_take_the_route_with_it(allowed, key_of):
    """The route belongs to the newer one."""
    links = Links(allowed, any_grant, max_links=2)
    old, new = routing_id("worker/qwen/0"), routing_id("worker/qwen/0")
    for routing in (old, new):
        links.admit(routing, key_of(QWEN), HERE)
    links.admit(routing_id("worker/qwen/1"), key_of(QWEN), HERE)
    assert links.known(old, key_of(QWEN)) is None
    assert links.route(b"worker/qwen/0") == new
