"""A log that is opened again and again."""

import pytest
from log_disks import open_log


@pytest.fixture
def reopen(tmp_path):
    """Opens the log of one folder and replays it; what was open before is closed."""
    opened = []

    def open_again(**options):
        close(opened)
        log = open_log(tmp_path / "log", **options)
        opened.append(log)
        return log, list(log.replay())

    yield open_again
    close(opened)


def close(opened):
    """Close and forget."""
    while opened:
        opened.pop().close()
