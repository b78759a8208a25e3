"""The daemon's account as Prometheus metrics, collected on the threads of prometheus_client's HTTP server.

The daemon's loop hands over its newest account and tells each of its rounds. The loop waits for nothing here, and
nothing here waits for the loop. The number of series is bounded: 1024 policies at most (`Limits.policies`), each with a
closed set of reasons and record types, and 4096 pairs of policies. Clients are counted, and are no label.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from mrl.exchange.store import DISK_FULL, LOCKED
from mrl.records.exchange_messages import PairFlow, PolicyStat, Stat

SILENCE_S = 5.0
"""Seconds without a round after which the daemon's loop stands still; it turns at least twice a second."""
SILENT_CLIENT_S = 3.0
"""Seconds without a message after which a client counts as silent; living clients are heard every second."""
MAX_PAIRS = 4096
"""Pairs of policies that get series."""
STORAGE_STATES = ("well", DISK_FULL, LOCKED)

PREFIX = "mrl_exchange_"

Labels = tuple[str, ...]
Rows = Iterable[tuple[Labels, float]]


class ExchangeCollector(Collector):
    """The newest account of a daemon. The daemon's loop calls `hand_over` and `beat`, any other thread the rest."""

    def __init__(self, stat: Stat, clock: Callable[[], float]) -> None:
        self._stat, self._clock = stat, clock
        self._beat_s = clock()

    def hand_over(self, stat: Stat) -> None:
        """Take a newer account of the daemon."""
        self._stat = stat

    def beat(self) -> None:
        """Note that the loop has turned once more."""
        self._beat_s = self._clock()

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families of one account."""
        stat, silence_s = self._stat, max(0.0, self._clock() - self._beat_s)
        is_well = silence_s <= SILENCE_S and not stat.storage
        yield _gauge("healthy", "Whether the daemon is healthy: its loop runs, and records are stored", is_well)
        yield _gauge("loop_silence_seconds", "Time since the last round of the loop", silence_s)
        yield from _of_daemon(stat)
        yield from _of_policies(stat.policies)
        yield from _of_pairs(stat.flows)


def _of_daemon(stat: Stat) -> Iterator[Metric]:
    yield InfoMetricFamily(
        PREFIX.rstrip("_"), "Incarnation of the daemon, new at each start", {"incarnation": stat.incarnation}
    )
    states = [((state,), state == (stat.storage or "well")) for state in STORAGE_STATES]
    yield _gauges("storage_state", "1 for the current state of storing records", ("state",), states)
    gauges = {
        "uptime_seconds": ("Time since the daemon started", stat.uptime_s),
        "budget_bytes": ("Maximum bytes of records held", stat.budget_bytes),
        "used_bytes": ("Bytes of records held", stat.used_bytes),
        "clients": ("Registered clients", len(stat.clients)),
        "silent_clients": ("Registered clients that have been silent for 3 s", _num_silent(stat)),
        "unacknowledged_records": ("Records delivered but not acknowledged", stat.unacknowledged),
        "unserved_requests": ("Score requests not given to any client", stat.unserved),
        "unstored_puts": ("Puts received but not acknowledged", stat.unstored),
        "file_bytes": ("Size of the file and of SQLite's write-ahead log", stat.file_bytes),
    }
    counters = {
        "abandoned_deliveries": ("Records whose delivery was abandoned", stat.abandoned),
        "dropped_watches": ("Watches dropped because there were too many", stat.dropped_watches),
        "later_puts": ("Puts that must be sent again, because nothing was stored", stat.later),
        "commits": ("Transactions committed", stat.commits),
        "commit_seconds": ("Time spent on transactions", stat.commit_s),
        "undelivered_messages": ("Messages whose receiver was gone or too slow", stat.undelivered),
    }
    yield from (_gauge(name, *told) for name, told in gauges.items())
    yield from (_counter(name, *told) for name, told in counters.items())
    dropped = _by(stat.malformed)
    yield _counters("dropped_input", "Messages and connections that were dropped", ("reason",), dropped)


def _of_policies(policies: list[PolicyStat]) -> Iterator[Metric]:
    def gauge(name: str, help_text: str, value: Callable[[PolicyStat], float | None]) -> Metric:
        rows = [
            ((policy_stat.policy,), number) for policy_stat in policies if (number := value(policy_stat)) is not None
        ]
        return _gauges(name, help_text, ("policy",), rows)

    def split(make: "_Make", name: str, help_text: str, label: str, of: "_Split") -> Metric:
        rows = [
            ((policy_stat.policy, key), number)
            for policy_stat in policies
            for key, number in sorted(of(policy_stat).items())
        ]
        return make(name, help_text, ("policy", label), rows)

    yield split(_gauges, "records", "Records held", "type", lambda policy_stat: policy_stat.kinds)
    yield gauge("bytes", "Bytes of a policy's records held", lambda policy_stat: policy_stat.bytes)
    yield gauge("prompts", "Prompts for which records are held", lambda policy_stat: policy_stat.prompts)
    yield gauge(
        "watched_prompts", "Prompts that the policy's clients watch", lambda policy_stat: policy_stat.watched_prompts
    )
    yield gauge(
        "newest_step",
        "Newest step announced",
        lambda policy_stat: policy_stat.newest.step if policy_stat.newest else None,
    )
    yield gauge(
        "oldest_age_versions", "Age of the oldest record held", lambda policy_stat: policy_stat.oldest_age_versions
    )
    yield gauge("barrier", "Last barrier that the policy has reached", lambda policy_stat: policy_stat.barrier)
    put = [((policy_stat.policy,), policy_stat.put) for policy_stat in policies]
    yield _counters("put_records", "Records accepted", ("policy",), put)
    yield split(_counters, "refused_records", "Records refused", "reason", lambda policy_stat: policy_stat.refused)
    yield split(_counters, "evicted_records", "Records evicted", "reason", lambda policy_stat: policy_stat.evicted)


def _of_pairs(flows: list[PairFlow]) -> Iterator[Metric]:
    """Yield the metrics of the first MAX_PAIRS pairs by name, so that a series stays as long as no policy joins."""
    yield _gauge("flow_pairs_left_out", "Pairs of policies beyond those shown", max(0, len(flows) - MAX_PAIRS))
    columns: dict[str, tuple[str, Callable[[PairFlow], int]]] = {
        "flow_asked_prompts": ("Prompts that the receiver asked for, from any source", lambda flow: flow.asked),
        "flow_hit_prompts": (
            "Prompts asked for on which the receiver got a record of this source",
            lambda flow: flow.hits,
        ),
        "flow_records": ("Records delivered", lambda flow: flow.records),
        "flow_bytes": ("Bytes delivered", lambda flow: flow.bytes),
        "flow_age_versions": ("Sum of the ages of the delivered records", lambda flow: flow.ages_versions),
    }
    for name, (help_text, value) in columns.items():
        rows = [((flow.source, flow.receiver), value(flow)) for flow in flows[:MAX_PAIRS]]
        yield _counters(name, help_text, ("source", "receiver"), rows)


def _num_silent(stat: Stat) -> int:
    return sum(state.silent_s > SILENT_CLIENT_S for state in stat.sessions)


def _by(counts: Mapping[str, int]) -> Rows:
    return [((reason,), number) for reason, number in sorted(counts.items())]


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return _gauges(name, help_text, (), [((), value)])


def _counter(name: str, help_text: str, value: float) -> Metric:
    return _counters(name, help_text, (), [((), value)])


def _gauges(name: str, help_text: str, labels: Labels, rows: Rows) -> Metric:
    return _filled(GaugeMetricFamily(PREFIX + name, help_text, labels=labels), rows)


def _counters(name: str, help_text: str, labels: Labels, rows: Rows) -> Metric:
    """Return a family of counters; prometheus_client adds `_total` to the name."""
    return _filled(CounterMetricFamily(PREFIX + name, help_text, labels=labels), rows)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, rows: Rows) -> Metric:
    for labels, value in rows:
        family.add_metric(labels, value)
    return family


_Make = Callable[[str, str, Labels, Rows], Metric]
_Split = Callable[[PolicyStat], Mapping[str, int]]
