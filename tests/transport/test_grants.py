"""What a grant covers, and which grants there are."""

import pytest

from mrl.errors import ConfigError
from mrl.transport.grants import Grant, grant_of


@pytest.mark.parametrize(
    ("grant", "client", "is_covered"),
    [
        (Grant("worker", "qwen"), "worker/qwen", True),
        (Grant("worker", "qwen"), "worker/qwen/0", True),
        (Grant("worker", "qwen"), "worker/qwen2/0", False),
        (Grant("worker", "qwen"), "worker/llama/0", False),
        (Grant("worker", "qwen"), "learner/qwen", False),
        (Grant("worker", "qwen"), "worker", False),
        (Grant("worker", "qwen"), "", False),
        (Grant("exchange"), "exchange", True),
        (Grant("admin"), "admin/4711", True),
        (Grant("admin"), "administrator", False),
    ],
)
def test_a_grant_covers_its_own_name_and_what_lies_below(grant, client, is_covered):
    """Never a sibling whose name only begins alike."""
    assert grant.covers(client) is is_covered


@pytest.mark.parametrize("client", ["learner/qwen", "learner/qwen/rank1", "worker/llama-3_b/12", "exchange", "admin/7"])
def test_the_grant_of_a_client_covers_it(client):
    """As wide as role and policy, no wider."""
    grant = grant_of(client)
    assert grant.covers(client)
    assert client.startswith(grant.name)
    assert grant.name.count("/") == (grant.role in ("learner", "worker"))


@pytest.mark.parametrize(
    ("role", "policy", "words"),
    [
        ("king", "", "unknown role.*'king'.*learner"),
        ("learner", "", "needs a policy"),
        ("worker", "a/rank1", "needs a policy.*'a/rank1'"),
        ("worker", "Qwen", "needs a policy"),
        ("exchange", "qwen", "takes no policy.*'qwen'"),
    ],
)
def test_a_grant_that_cannot_be_is_refused(role, policy, words):
    """One clear line; a slash in a policy would reach into the names of others."""
    with pytest.raises(ConfigError, match=words):
        Grant(role, policy)
