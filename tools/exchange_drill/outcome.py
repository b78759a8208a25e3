"""Results of a drill."""

from dataclasses import dataclass, field
from statistics import median


@dataclass
class Outcome:
    """Results of one drill, one row of the table."""

    fault: str
    tried: int = 0
    acknowledged: int = 0
    lost: int = 0
    """Records acknowledged, and then neither trained on, nor held, nor counted as evicted."""
    doubled: int = 0
    """Records trained on more than once."""
    evicted: int = 0
    """Records acknowledged, not delivered, and counted by the daemon as evicted."""
    recoveries_s: list[float] = field(default_factory=list)
    """Seconds from each fault's end (a daemon's death: its begin) until records flow: acknowledged and delivered."""
    recovery_bound_s: float | None = None
    peak_bytes: int = 0
    """Highest resident memory of the daemon; 0 where it was not measured."""
    peak_bound_bytes: int = 0
    deaths: int = 0
    """Ends of the daemon that the drill did not cause."""
    failures: list[str] = field(default_factory=list)
    """Other failures, in words."""
    notes: list[str] = field(default_factory=list)

    @property
    def recovery_s(self) -> tuple[float, float] | None:
        """Median and longest recovery in seconds; None when none was measured."""
        return (median(self.recoveries_s), max(self.recoveries_s)) if self.recoveries_s else None

    def faults(self) -> list[str]:
        """Reasons why the drill is not passed; empty when it is."""
        found = [*self.failures]
        found += [f"{self.lost} lost"] if self.lost else []
        found += [f"{self.doubled} trained on twice"] if self.doubled else []
        if self.peak_bound_bytes and self.peak_bytes > self.peak_bound_bytes:
            found.append(f"peak {self.peak_bytes / 1e6:.0f} MB of at most {self.peak_bound_bytes / 1e6:.0f} MB")
        if self.recovery_s and self.recovery_bound_s and self.recovery_s[1] > self.recovery_bound_s:
            found.append(f"back after {self.recovery_s[1]:.1f} s, bound {self.recovery_bound_s:g} s")
        return found
