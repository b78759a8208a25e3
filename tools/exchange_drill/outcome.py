"""What a drill found."""

from dataclasses import dataclass, field
from statistics import median


@dataclass
class Outcome:
    """One row of the table."""

    fault: str
    tried: int = 0
    acknowledged: int = 0
    lost: int = 0
    """Acknowledged and never trained on."""
    doubled: int = 0
    """Trained on more than once."""
    evicted: int = 0
    """Acknowledged, not delivered, and counted by the daemon as evicted."""
    recoveries_s: list[float] = field(default_factory=list)
    """From each fault's end (of a daemon's death: its begin) until records are acknowledged and delivered again."""
    recovery_bound_s: float | None = None
    peak_bytes: int = 0
    """Highest resident memory of the daemon; 0 where it was not looked at."""
    peak_bound_bytes: int = 0
    deaths: int = 0
    """Ends of the daemon that the drill did not bring about."""
    failures: list[str] = field(default_factory=list)
    """Whatever else should not be."""
    notes: list[str] = field(default_factory=list)

    @property
    def recovery_s(self) -> tuple[float, float] | None:
        """Median and longest; None when nothing was measured."""
        return (median(self.recoveries_s), max(self.recoveries_s)) if self.recoveries_s else None

    def faults(self) -> list[str]:
        """Why the drill is not passed; empty when it is."""
        found = [*self.failures]
        found += [f"{self.lost} lost"] if self.lost else []
        found += [f"{self.doubled} trained on twice"] if self.doubled else []
        if self.peak_bound_bytes and self.peak_bytes > self.peak_bound_bytes:
            found.append(f"peak {self.peak_bytes / 1e6:.0f} MB of at most {self.peak_bound_bytes / 1e6:.0f} MB")
        if self.recovery_s and self.recovery_bound_s and self.recovery_s[1] > self.recovery_bound_s:
            found.append(f"back after {self.recovery_s[1]:.1f} s, bound {self.recovery_bound_s:g} s")
        return found
