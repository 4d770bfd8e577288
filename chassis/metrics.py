"""What a role shows to Prometheus: one registry a process, served as `/metrics`.

Figures that a role keeps anyway are read when Prometheus asks for them (`Metrics.collect`), which
costs nothing in between. prometheus_client is imported with the first `Metrics`: a role that shows
nothing never loads it.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram
    from prometheus_client.core import Metric

# From a pull of a few rows on this machine to a checkpoint.
LATENCY_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0),
)
Close = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric whose values are read when they are asked for; a counter's name ends in _total."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...] = ()


Sample = tuple[Family, tuple[str, ...], float]  # label values in the order of `Family.labels`


class Collector:
    """Values computed at the time of a scrape.

    Args:
        families: all that `read` may give samples of.
        read: called on the thread of a scrape. What it raises fails the scrape, which shows in
            Prometheus as a target that is down.
    """

    def __init__(self, families: Sequence[Family], read: Callable[[], Iterable[Sample]]) -> None:
        self._families = tuple(families)
        self._read = read

    def describe(self) -> "list[Metric]":
        """The families without samples: registering must not read."""
        return [_metric(family) for family in self._families]

    def collect(self) -> "list[Metric]":
        """The families with their samples of now."""
        found = {family.name: _metric(family) for family in self._families}
        for family, labels, value in self._read():
            found[family.name].add_metric(labels, value)
        return list(found.values())


class Metrics:
    """All that one process shows, its own memory, CPU time and open files included."""

    def __init__(self) -> None:
        from prometheus_client import (
            CollectorRegistry,
            ProcessCollector,
            disable_created_metrics,
        )

        # They would double the series of every histogram.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry: CollectorRegistry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> "Counter":
        """A number that only grows; its name ends in _total."""
        from prometheus_client import Counter

        return Counter(name, text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> "Gauge":
        """A number that goes up and down."""
        from prometheus_client import Gauge

        return Gauge(name, text, labels, registry=self.registry)

    def histogram(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = LATENCY_BUCKETS_S,
    ) -> "Histogram":
        """How values spread; by default seconds that calls take."""
        from prometheus_client import Histogram

        return Histogram(name, text, labels, registry=self.registry, buckets=buckets)

    def collect(self, families: Sequence[Family], read: Callable[[], Iterable[Sample]]) -> None:
        """Show what `read` gives at the time of each scrape; see `Collector`."""
        collector: Any = Collector(families, read)
        self.registry.register(collector)


def add_metrics_option(parser: argparse.ArgumentParser) -> None:
    """Add `--metrics HOST:PORT`; empty where it is not given."""
    parser.add_argument(
        "--metrics",
        default="",
        type=_address,
        metavar="HOST:PORT",
        help="show metrics to Prometheus at http://HOST:PORT/metrics",
    )


def serve_metrics(
    bind: str, metrics: Metrics, admits: Callable[[str], bool] = lambda shown: False
) -> tuple[str, Close]:
    """Serve `/metrics`, by the rules of `chassis/security.py`.

    Loopback is open to the machine's own processes. Any other bind demands TLS and a token, and
    scrapers show it as a bearer token: that of HETERPS_METRICS_TOKEN_FILE where it is set, which
    opens nothing else, or that of HETERPS_TOKEN_FILE.

    Args:
        bind: host:port, port 0 for any free one.
        admits: whether another token opens it as well.

    Returns:
        The address with its real port, and what ends it.

    Raises:
        SecurityError: others could reach it and nothing protects it.
        BindError: the port is taken or the host is not ours.
    """
    from chassis.metrics_endpoint import Endpoint

    endpoint = Endpoint(bind, metrics.registry, admits)
    return endpoint.address, endpoint.close


def _metric(family: Family) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    made = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    return made(family.name, family.help, labels=family.labels)


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    # Empty is the default, which argparse hands in as well.
    if text and not (host and port.isdecimal() and int(port) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r}: expected HOST:PORT, such as 127.0.0.1:9400")
    return text
