"""The daemon's account of itself as Prometheus metrics and as a state of health, for readers on another thread.

The loop hands its last account over and says that it turns; nothing here waits for it, and it waits for nothing here.
Series are bounded: 1024 policies at most (`memory.MAX_POLICIES`) with a closed set of reasons and record types each,
1024 streams, and 4096 pairs of policies. Clients are counted, and are no label.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from mrl.records.exchange_messages import PairFlow, PolicyShelf, Stat, StreamState

SILENCE_S = 5.0
"""A loop that has not turned for so long stands still; it turns at least twice a second."""
SILENT_CLIENT_S = 3.0
"""Living clients are heard every second."""
MIN_RENDER_S = 1.0
"""However often somebody asks, the text is made anew no more often than this."""
MAX_PAIRS = 4096
STORAGE_STATES = ("well", "disk_full", "draining")

PREFIX = "mrl_exchange_"

Labels = tuple[str, ...]
Rows = Iterable[tuple[Labels, float]]


class Exposition:
    """The last account of a daemon. `hand_over` and `beat` are for its loop, everything else for any other thread."""

    def __init__(self, stat: Stat, clock: Callable[[], float]) -> None:
        self._stat, self._clock = stat, clock
        self._beat_s = clock()
        self._lock = threading.Lock()
        self._text, self._rendered_s = b"", -MIN_RENDER_S
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Families(lambda: self))

    @property
    def stat(self) -> Stat:
        """What was handed over last."""
        return self._stat

    def hand_over(self, stat: Stat) -> None:
        """The daemon's account by now."""
        self._stat = stat

    def beat(self) -> None:
        """The loop has turned once more."""
        self._beat_s = self._clock()

    @property
    def silence_s(self) -> float:
        """Since the loop turned last."""
        return max(0.0, self._clock() - self._beat_s)

    @property
    def fault(self) -> str:
        """Why nobody should count on the daemon at the moment; "" when all is well."""
        if self.silence_s > SILENCE_S:
            return f"loop silent for {self.silence_s:.0f} s"
        return self._stat.storage

    def metrics(self) -> bytes:
        """Everything in Prometheus' text format 0.0.4, at most a second old."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._rendered_s >= MIN_RENDER_S:
                self._text, self._rendered_s = generate_latest(self._registry), now_s
            return self._text

    def health(self) -> tuple[int, bytes]:
        """HTTP status and JSON: 200 when all is well, 503 with the reason otherwise."""
        stat, fault = self._stat, self.fault
        content: dict[str, object] = {"status": "unavailable" if fault else "ok"}
        if fault:
            content["reason"] = fault
        content |= {
            "incarnation": stat.incarnation,
            "uptime_s": round(stat.uptime_s, 1),
            "loop_silence_s": round(self.silence_s, 1),
            "clients": len(stat.clients),
            "unstored_puts": stat.unstored,
        }
        return 503 if fault else 200, json.dumps(content).encode() + b"\n"


class _Families(Collector):
    """What the registry asks for the metrics of an exposition."""

    def __init__(self, of: Callable[[], Exposition]) -> None:
        self._of = of

    def collect(self) -> Iterator[Metric]:
        """All metric families of one account."""
        exposition = self._of()
        stat = exposition.stat
        yield _gauge("healthy", "Whether all is well: the loop turns, and records are stored", not exposition.fault)
        yield _gauge("loop_silence_seconds", "Time since the loop turned last", exposition.silence_s)
        yield from _of_daemon(stat)
        yield from _of_log(stat)
        yield from _of_policies(stat.shelves)
        yield from _of_pairs(stat.flows)
        yield from _of_streams(stat.streams)


def _of_daemon(stat: Stat) -> Iterator[Metric]:
    yield InfoMetricFamily(PREFIX.rstrip("_"), "This life of the daemon", {"incarnation": stat.incarnation})
    states = [((state,), state == (stat.storage or "well")) for state in STORAGE_STATES]
    yield _gauges("storage_state", "1 for what holds of storing records", ("state",), states)
    gauges = {
        "uptime_seconds": ("Time since the daemon started", stat.uptime_s),
        "budget_bytes": ("Bytes of records that may be held", stat.budget_bytes),
        "used_bytes": ("Bytes of records that are held", stat.used_bytes),
        "clients": ("Clients that are known", len(stat.clients)),
        "silent_clients": ("Known clients not heard for 3 s", _num_silent(stat)),
        "claims": ("Records delivered and not acknowledged", stat.claims),
        "unserved_requests": ("Score requests that nobody has been given", stat.unserved),
        "unstored_puts": ("Puts received and not acknowledged", stat.unstored),
        "parked_puts": ("Of these, Puts that wait for room", stat.parked),
    }
    counters = {
        "abandoned_deliveries": ("Deliveries given up", stat.abandoned),
        "dropped_watches": ("Watches dropped because there were too many", stat.dropped_watches),
        "undelivered_messages": ("Messages whose receiver was gone or did not keep up", stat.undelivered),
    }
    yield from (_gauge(name, *told) for name, told in gauges.items())
    yield from (_counter(name, *told) for name, told in counters.items())
    dropped = _by(stat.malformed)
    yield _counters("dropped_input", "Messages and connections that were dropped", ("reason",), dropped)


def _of_log(stat: Stat) -> Iterator[Metric]:
    yield _gauge("log_bytes", "Length of the log", stat.log_bytes)
    yield _gauge("log_max_bytes", "Length that the log may have", stat.log_max_bytes)
    yield _gauge("log_damaged_stretches", "Stretches of the log that the replay found damaged", stat.log_damaged)
    yield _counter("log_syncs", "How often the log waited for the disk", stat.log_syncs)
    yield _counter("log_sync_seconds", "Time for which the log waited for the disk", stat.log_sync_s)


def _of_policies(shelves: list[PolicyShelf]) -> Iterator[Metric]:
    def gauge(name: str, help_text: str, value: Callable[[PolicyShelf], float | None]) -> Metric:
        rows = [((shelf.policy,), number) for shelf in shelves if (number := value(shelf)) is not None]
        return _gauges(name, help_text, ("policy",), rows)

    def split(make: "_Make", name: str, help_text: str, label: str, of: "_Split") -> Metric:
        rows = [((shelf.policy, key), number) for shelf in shelves for key, number in sorted(of(shelf).items())]
        return make(name, help_text, ("policy", label), rows)

    yield split(_gauges, "records", "Records held", "type", lambda shelf: shelf.kinds)
    yield gauge("bytes", "Bytes held of a policy's records", lambda shelf: shelf.bytes)
    yield gauge("prompts", "Prompts on which records are held", lambda shelf: shelf.prompts)
    yield gauge("watched_prompts", "Prompts that the policy's clients watch", lambda shelf: shelf.watched_prompts)
    yield gauge("newest_step", "Newest step announced", lambda shelf: shelf.newest.step if shelf.newest else None)
    yield gauge("oldest_age_versions", "Age of the oldest record held", lambda shelf: shelf.oldest_age_versions)
    yield gauge("barrier", "Last barrier that the policy has come to", lambda shelf: shelf.barrier)
    put = [((shelf.policy,), shelf.put) for shelf in shelves]
    yield _counters("put_records", "Records taken", ("policy",), put)
    yield split(_counters, "refused_records", "Records refused", "reason", lambda shelf: shelf.refused)
    yield split(_counters, "evicted_records", "Records evicted", "reason", lambda shelf: shelf.evicted)


def _of_pairs(flows: list[PairFlow]) -> Iterator[Metric]:
    """The first pairs in the order of names: a series stays, as long as no policy joins."""
    yield _gauge("flow_pairs_left_out", "Pairs of policies beyond those shown", max(0, len(flows) - MAX_PAIRS))
    columns: dict[str, tuple[str, Callable[[PairFlow], int]]] = {
        "flow_asked_prompts": ("Prompts that the receiver asked for, of all sources", lambda flow: flow.asked),
        "flow_hit_prompts": ("Of these, prompts on which it was given a record of this source", lambda flow: flow.hits),
        "flow_records": ("Records delivered", lambda flow: flow.records),
        "flow_bytes": ("Bytes delivered", lambda flow: flow.bytes),
        "flow_age_versions": ("Ages of the delivered records, added up", lambda flow: flow.ages_versions),
    }
    for name, (help_text, value) in columns.items():
        rows = [((flow.source, flow.receiver), value(flow)) for flow in flows[:MAX_PAIRS]]
        yield _counters(name, help_text, ("source", "receiver"), rows)


def _of_streams(streams: list[StreamState]) -> Iterator[Metric]:
    def column(name: str, help_text: str, value: Callable[[StreamState], float]) -> Metric:
        return _gauges(name, help_text, ("policy", "stream"), [((s.policy, s.stream), value(s)) for s in streams])

    yield column("stream_has_reader", "Whether anybody reads the stream", lambda state: bool(state.reader))
    yield column("stream_waiting_records", "Records held behind the last one sent", lambda state: state.waiting)
    yield column("stream_sent_number", "Number of the last record sent", lambda state: state.sent)
    yield column("stream_took_number", "Number up to which the reader has all", lambda state: state.took)
    yield column("stream_committed_number", "Number up to which records may go", lambda state: state.committed)


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
    """Prometheus adds `_total` to the name."""
    return _filled(CounterMetricFamily(PREFIX + name, help_text, labels=labels), rows)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, rows: Rows) -> Metric:
    for labels, value in rows:
        family.add_metric(labels, value)
    return family


_Make = Callable[[str, str, Labels, Rows], Metric]
_Split = Callable[[PolicyShelf], Mapping[str, int]]
