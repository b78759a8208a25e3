"""Newest version and resume points of every policy, as announced."""

from mrl.records.tags import Tags
from mrl.records.version import Version, age_versions, is_void

MAX_RESUMES = 256
"""Resumes remembered of one policy. Records from before the oldest are no longer found void, but they are stale."""


class VersionTracker:
    """Dates records: their age in versions, and whether a resume made them void."""

    def __init__(self) -> None:
        self.newest: dict[str, Version] = {}
        self._resumes: dict[str, dict[int, Version]] = {}

    def announce(self, policy: str, version: Version, *, resumed: bool) -> bool:
        """Note an announcement; return whether it says anything new. Within a run epoch versions never go back."""
        resumes = self._resumes.setdefault(policy, {})
        is_known = version.run_epoch in resumes or (len(resumes) >= MAX_RESUMES and version.run_epoch < min(resumes))
        is_new = resumed and not is_known
        if is_new:
            resumes[version.run_epoch] = version
            if len(resumes) > MAX_RESUMES:
                del resumes[min(resumes)]
        if policy not in self.newest or version > self.newest[policy]:
            self.newest[policy] = version
            is_new = True
        return is_new

    def age(self, record: Tags) -> int:
        """Return the versions between the source's newest and the record's oldest; 0 before any announcement."""
        newest = self.newest.get(record.source)
        return 0 if newest is None else age_versions(newest, record.oldest)

    def is_void(self, record: Tags) -> bool:
        """Whether a part of the record was sampled by a version that a later resume took back."""
        resumes = self._resumes.get(record.source)
        if not resumes:
            return False
        return any(is_void(record.newest, resume) for resume in resumes.values())
