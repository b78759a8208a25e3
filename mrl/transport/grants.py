"""Grants: one role, and for learners and workers one policy. A key has one grant."""

import re
from dataclasses import dataclass

from mrl.errors import ConfigError

STANDING_ROLES = ("supervisor", "exchange", "allocator", "gateway", "admin")
"""Roles that serve the whole run; `admin` is a person with a tool."""
POLICY_ROLES = ("learner", "worker")
ROLES = STANDING_ROLES + POLICY_ROLES

_POLICY = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


@dataclass(frozen=True, slots=True)
class Grant:
    """A role, with a policy if the role needs one. Raises ConfigError when the two do not fit together."""

    role: str
    policy: str = ""

    def __post_init__(self) -> None:
        """Check role and policy.

        A learner's grant without a policy would cover the learners of all policies; a policy name with a slash would
        cover other policies' clients.
        """
        if self.role not in ROLES:
            raise ConfigError("unknown role", where="ROLE", got=self.role, wanted=", ".join(ROLES))
        if self.role in POLICY_ROLES and not _POLICY.fullmatch(self.policy):
            raise ConfigError(
                f"a {self.role} needs a policy", where="POLICY", got=self.policy, wanted="the name of a policy"
            )
        if self.role in STANDING_ROLES and self.policy:
            raise ConfigError(f"the role {self.role} takes no policy", where="POLICY", got=self.policy)

    @property
    def name(self) -> str:
        """The grant in one word: "learner/qwen", or the role alone."""
        return f"{self.role}/{self.policy}" if self.policy else self.role

    def covers(self, client: str) -> bool:
        """Whether a client of this name may speak under the grant: "worker/qwen" covers "worker/qwen/0"."""
        return client == self.name or client.startswith(f"{self.name}/")


STANDING_GRANTS = tuple(map(Grant, STANDING_ROLES))


def grant_of(client: str) -> Grant:
    """Return a client's grant: "worker/qwen" for "worker/qwen/0". Raises ConfigError for a name without a valid one."""
    role, _, rest = client.partition("/")
    return Grant(role, rest.partition("/")[0] if role in POLICY_ROLES else "")
