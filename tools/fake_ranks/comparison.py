"""Memory and traffic of a rank without data, against those of the memory plan and of arithmetic."""

from dataclasses import dataclass

from bench_row import Row

from fake_ranks.layouts import Layout
from fake_ranks.links import COMPUTED_PER_S, Traffic, needed_bits_per_s, of_update, reckoned, traffic
from fake_ranks.rank import train_one_step
from mrl.config.policy_tables import ELEMENT_BYTES
from mrl.memory_plan.needs import Need

PEAK_BOUND, BYTES_BOUND = "<=1.1", "<=1.01"
GIB, GB, CARD_BITS_PER_S = 1024**3, 1e9, 400e9
HEADS = (
    ["layout", "plan GiB", "counted GiB", "plan / counted", "fullest at"],
    ["layout", "passes", "arithmetic s", "within a host GB", "between hosts GB", "Gb/s for 10 %", "share at 400 Gb/s"],
    ["layout", "a version GB", "gathered within a host GB", "gathered between hosts GB"],
)
"""Headings of three tables: memory of a rank, its traffic in an update, its traffic to publish a version."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Figures of one layout. Memory and traffic are those of one rank."""

    layout: Layout
    planned: Need
    peak_bytes: int
    fullest_at: str
    num_passes: int
    compute_s: float
    """Seconds of the arithmetic of one update."""
    update: Traffic
    reckoned: Traffic
    publication: Traffic

    @property
    def peak_share(self) -> float:
        """Planned memory divided by counted memory."""
        return self.planned.mib * 1024**2 / self.peak_bytes

    @property
    def needed_gbps(self) -> float:
        """Speed of a GPU's network card with which an update's traffic takes a tenth of its arithmetic, in Gb/s."""
        return needed_bits_per_s(self.update.between, self.compute_s) / GB

    def rows(self) -> list[Row]:
        """Rows of the JSON object."""
        name, peak_gib = self.layout.name, self.peak_bytes / GIB
        return [
            Row(f"peak: {name}", peak_gib, "GiB", "memory plan", _apart(self.peak_share), PEAK_BOUND),
            _bytes_row(f"update, within a host: {name}", self.update.within, self.reckoned.within),
            _bytes_row(f"update, between hosts: {name}", self.update.between, self.reckoned.between),
            Row(f"network for a tenth of the arithmetic: {name}", self.needed_gbps, "Gb/s"),
            Row(f"publication, within a host: {name}", self.publication.within / GB, "GB"),
            Row(f"publication, between hosts: {name}", self.publication.between / GB, "GB"),
        ]

    def cells(self) -> tuple[list[str], list[str], list[str]]:
        """A line of each of the three tables."""
        name, update, published = self.layout.name, self.update, self.publication
        share = 8 * update.between / CARD_BITS_PER_S / self.compute_s
        memory = [f"{self.planned.mib / 1024:.1f}", f"{self.peak_bytes / GIB:.1f}", f"{self.peak_share:.2f}"]
        passes = [str(self.num_passes), f"{self.compute_s:.0f}"]
        sent = [f"{update.within / GB:.0f}", f"{update.between / GB:.1f}", f"{self.needed_gbps:.0f}", f"{share:.1%}"]
        gathered = [f"{published.within / GB:.0f}", f"{published.between / GB:.1f}"]
        version = f"{ELEMENT_BYTES['bfloat16'] * self.layout.size.parameters / GB:.1f}"
        return [name, *memory, self.fullest_at], [name, *passes, *sent], [name, version, *gathered]


def compare(layout: Layout) -> Comparison:
    """Train one step on the first rank of a layout, of at most two passes, and compare its figures."""
    batch, num_passes = layout.fullest_pass()
    trained = train_one_step(layout.config, layout.table, batch, min(2, num_passes))
    return Comparison(
        layout=layout,
        planned=layout.planned(),
        peak_bytes=trained.peak.peak_bytes,
        fullest_at=trained.peak.name,
        num_passes=num_passes,
        compute_s=num_passes * trained.flops_per_pass / COMPUTED_PER_S,
        update=of_update(trained.phases, num_passes, layout.per_host),
        reckoned=reckoned(layout.size, layout, num_passes),
        publication=traffic(trained.publication.sent, layout.per_host),
    )


def _bytes_row(name: str, counted: float, told: float) -> Row:
    ratio = _apart(told / counted) if counted and told else float(counted != told) + 1
    return Row(name, counted / GB, "GB", "arithmetic", ratio, BYTES_BOUND)


def _apart(share: float) -> float:
    return max(share, 1 / share)
