"""How many files and sockets this process may have open: as many as it may give itself, within reason."""

import resource

MOST = 65_536
"""Beyond that nothing of mrl has use for them, and programs that look at each possible one become slow."""


def raise_limit() -> None:
    """Raise the limit of this process, and so of all that it starts, to the hard one, or to `MOST`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
