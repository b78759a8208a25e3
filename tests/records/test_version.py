"""Versions, ages and voided epochs."""

import pytest

from mrl.records.version import Version, age_versions, is_void


def test_versions_compare_by_epoch_first():
    """A resumed run is newer than anything before it, whatever the step."""
    assert Version(0, 9) < Version(1, 2) < Version(1, 3)


@pytest.mark.parametrize(
    ("newest", "oldest", "age"),
    [(Version(0, 9), Version(0, 4), 5), (Version(0, 4), Version(0, 9), 0), (Version(1, 6), Version(0, 4), 2)],
)
def test_age_counts_steps_and_is_never_negative(newest, oldest, age):
    """Across a resume only the step counts."""
    assert age_versions(newest, oldest) == age


@pytest.mark.parametrize(
    ("version", "void"),
    [(Version(0, 11), True), (Version(0, 10), False), (Version(1, 11), False), (Version(2, 11), False)],
)
def test_only_later_steps_of_earlier_epochs_are_void(version, void):
    """A resume at 1.10 takes back 0.11, and nothing of its own epoch."""
    assert is_void(version, Version(1, 10)) is void
