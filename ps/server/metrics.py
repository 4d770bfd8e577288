"""What a shard shows to Prometheus: its tables, its process, and how it answers calls."""

import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from chassis.metrics import Family, Metrics, Sample
from protos.parameter_server_pb2 import StatsReply, TableStats

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram

LAG_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # steps
_TABLE = ("table",)


def _table_counter(name: str, text: str) -> Family:
    return Family(f"heterps_ps_{name}_total", "counter", text, _TABLE)


def _table_gauge(name: str, text: str) -> Family:
    return Family(f"heterps_ps_{name}", "gauge", text, _TABLE)


_OF_TABLES: tuple[tuple[Family, Callable[[TableStats], float]], ...] = (
    (_table_gauge("table_rows", "Rows, in memory and on disk."), lambda t: t.rows),
    (_table_gauge("table_memory_bytes", "Memory that the table takes."), lambda t: t.bytes),
    (_table_gauge("table_disk_rows", "Rows that lie on disk."), lambda t: t.disk_rows),
    (_table_gauge("table_disk_bytes", "Disk that the table takes."), lambda t: t.disk_bytes),
    (_table_gauge("table_waiting_keys", "Keys counted but not admitted."), lambda t: t.waiting),
    (_table_counter("pulled_keys", "Keys pulled."), lambda t: t.pulled),
    (_table_counter("missed_keys", "Pulled keys that had no row."), lambda t: t.missed),
    (_table_counter("pushed_keys", "Keys pushed."), lambda t: t.pushed),
    (_table_counter("evicted_rows", "Rows removed by the table's rules."), lambda t: t.evicted),
    (_table_counter("promoted_rows", "Rows brought from disk."), lambda t: t.promoted),
    (_table_counter("demoted_rows", "Rows moved to disk."), lambda t: t.demoted),
    (_table_counter("tidied_rows", "Rows moved on disk."), lambda t: t.tidied),
)
_OF_SHARD: tuple[tuple[Family, Callable[[StatsReply], float]], ...] = (
    (Family("heterps_ps_tables", "gauge", "Tables."), lambda s: len(s.tables)),
    (
        Family("heterps_ps_cpu_seconds_total", "counter", "CPU time of the shard."),
        lambda s: s.cpu_seconds,
    ),
    (
        Family("heterps_ps_resident_bytes", "gauge", "Memory of the whole process."),
        lambda s: s.resident_bytes,
    ),
    (
        Family("heterps_ps_received_bytes_total", "counter", "Payloads of requests."),
        lambda s: s.bytes_in,
    ),
    (
        Family("heterps_ps_sent_bytes_total", "counter", "Payloads of replies."),
        lambda s: s.bytes_out,
    ),
    (
        Family("heterps_ps_log_bytes", "gauge", "Write-ahead log not yet folded into a base."),
        lambda s: s.log_bytes,
    ),
    (
        Family("heterps_ps_staged_bytes", "gauge", "Parts of steps that wait for their commit."),
        lambda s: s.staged_bytes,
    ),
    (Family("heterps_ps_uptime_seconds", "gauge", "Since the shard began."), lambda s: s.uptime_s),
)
FAMILIES = tuple(family for family, _ in (*_OF_TABLES, *_OF_SHARD))


class ShardMetrics:
    """The metrics of one shard; each of its methods is called once a call and takes microseconds.

    Args:
        stats: what the shard holds and uses; called when Prometheus asks.
        threads: how many calls run at once, to compare those under way with; 0: not shown.
    """

    def __init__(self, stats: Callable[[], StatsReply], threads: int = 0) -> None:
        self.metrics = made = Metrics()
        made.collect(FAMILIES, lambda: _samples(stats()))
        self._seconds = made.histogram(
            "heterps_ps_call_seconds", "How long calls took.", ("method",)
        )
        self._failed = made.counter(
            "heterps_ps_calls_failed_total", "Calls answered with an error.", ("method",)
        )
        self._in_flight = made.gauge("heterps_ps_calls_in_flight", "Calls under way.")
        if threads:
            made.gauge("heterps_ps_call_threads", "Calls that can run at once.").set(threads)
        pushes = made.counter(
            "heterps_ps_pushes_total",
            "Pushes: applied, or repeated and therefore only acknowledged.",
            ("outcome",),
        )
        self._applied, self._repeated = pushes.labels("applied"), pushes.labels("repeated")
        self._lag = made.histogram(
            "heterps_ps_staleness_steps",
            "Steps that the slowest worker was behind the one that advanced.",
            buckets=LAG_BUCKETS,
        )
        # `labels` checks and locks; a dictionary of its results is several times as fast.
        self._by_method: dict[str, tuple[Histogram, Counter]] = {}

    def call(self, method: str) -> "_Call":
        """Enter it around the handling of a call: counts it as under way, then observes it."""
        return _Call(self, method)

    def began(self) -> None:
        """A call is under way."""
        self._in_flight.inc()

    def ended(self) -> None:
        """It is not any more."""
        self._in_flight.dec()

    def observe(self, method: str, seconds: float, failed: bool) -> None:
        """A call of `method` took so long."""
        found = self._by_method.get(method)
        if found is None:
            found = self._seconds.labels(method), self._failed.labels(method)
            self._by_method[method] = found
        found[0].observe(seconds)
        if failed:
            found[1].inc()

    def pushed(self, applied: bool) -> None:
        """A push was applied, or had been before."""
        (self._applied if applied else self._repeated).inc()

    def lag(self, steps: int) -> None:
        """A worker advanced while the slowest of its group was so many steps behind."""
        self._lag.observe(steps)


class _Call:
    __slots__ = ("_began", "_method", "_metrics")

    def __init__(self, metrics: ShardMetrics, method: str) -> None:
        self._metrics = metrics
        self._method = method
        self._began = 0.0

    def __enter__(self) -> None:
        self._metrics.began()
        self._began = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._metrics.observe(self._method, time.perf_counter() - self._began, kind is not None)
        self._metrics.ended()


def _samples(stats: StatsReply) -> Iterator[Sample]:
    for shard_family, shard_value in _OF_SHARD:
        yield shard_family, (), shard_value(stats)
    for table in stats.tables:
        for family, value in _OF_TABLES:
            yield family, (table.name,), value(table)
