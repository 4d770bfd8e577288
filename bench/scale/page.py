"""docs/scale.md and its pictures, made of the results."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.pages import DOCS, measured_on, picture, table, write
from bench.scale.curves import ordered

_COLORS = ("#2a78b5", "#d1603d", "#4c9f70", "#8a6bb8")
_BOUND = 0.1
_KEPT = "of the throughput"
_TEMPLATE = Path(__file__).parent / "template.md"


def write_page(results: Mapping[str, Any]) -> None:
    """Write the page, and draw its pictures."""
    curves = results["curves"]
    _draw(
        "scale_size.svg",
        [
            _panel(curves["size"], "workers", "throughput", "samples/s", "workers", ideal=True),
            _panel(curves["links"], "gbit", "throughput", "samples/s", "Gbit/s a host"),
        ],
    )
    _draw(
        "scale_faults.svg",
        [
            _panel(curves["stragglers"], "slower", "kept", _KEPT, "times slower"),
            _panel(curves["noise"], "noise", "kept", _KEPT, "times vary by", log=False),
            _panel(curves["kills"], "hours", "kept", "of the time", "hours a worker lives"),
        ],
    )
    write(DOCS / "scale.md", _page(results))


Panel = Callable[[Any], None]


def _panel(
    series: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    label: str,
    below: str,
    log: bool = True,
    ideal: bool = False,
) -> Panel:
    def draw(axes: Any) -> None:
        for color, one in zip(_COLORS, series, strict=False):
            at = ordered(one["points"], x, y)
            axes.plot(*at, color=color, marker="o", markersize=3, label=one["name"])
        if ideal:
            points = series[0]["points"]
            each = points[0]["throughput"] / points[0]["efficiency"]
            sizes = [float(p[x]) for p in points]
            full = [each * k for k in sizes]
            axes.plot(sizes, full, color="#999999", linestyle=":", label="workers × one")
        if log:
            axes.set_xscale("log")
        if y == "throughput":
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1.05)
        axes.set_xlabel(below)
        axes.set_ylabel(label)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=7)

    return draw


def _draw(name: str, panels: Sequence[Panel]) -> None:
    def fill(axes: Sequence[Any]) -> None:
        for draw, each in zip(panels, axes, strict=True):
            draw(each)

    picture(fill, DOCS / "img" / name, len(panels), (4.2 * len(panels), 3.4))


def _page(results: Mapping[str, Any]) -> str:
    predictions = results["predictions"]
    told = [p for p in predictions if p["workers"] > 3]
    within = sum(abs(p["error"]) <= _BOUND for p in told)
    worst = max(told, key=lambda p: abs(p["error"]))
    mean = sum(abs(p["error"]) for p in told) / len(told)
    naive = max(told, key=lambda p: abs(p["naive_error"]))
    naive_mean = sum(abs(p["naive_error"]) for p in told) / len(told)
    return _TEMPLATE.read_text().format(
        on=measured_on(results["machine"], results["versions"]),
        jobs=len(results["jobs"]),
        cases=_cases(predictions),
        count=len(told),
        most=max(p["workers"] for p in told),
        within=within,
        worst=f"{worst['error']:+.1%} ({worst['name']})",
        mean=f"{mean:.1%}",
        naive_worst=f"{naive['naive_error']:+.1%}",
        naive_mean=f"{naive_mean:.1%}",
        naive_within=sum(abs(p["naive_error"]) <= _BOUND for p in told),
        costs=_costs(results["costs"], results["messages"]),
        **_figures(results["curves"]),
    )


def _cases(predictions: Sequence[Mapping[str, Any]]) -> str:
    return table(
        ("job", "measured, ms a step", "simulated", "error", "if more workers cost nothing"),
        [
            (
                p["name"],
                f"{p['measured_s'] * 1e3:.1f}",
                f"{p['simulated_s'] * 1e3:.1f}",
                f"{p['error']:+.1%}" if p["workers"] > 3 else f"{p['error']:+.1%} (fitted)",
                f"{p['naive_error']:+.1%}",
            )
            for p in predictions
        ],
    )


def _costs(costs: Mapping[str, float], messages: Mapping[str, float]) -> str:
    three = ("pull", "push", "commit")

    def of(name: str) -> list[float]:
        return [messages[name.format(what)] for what in three]

    rows = [
        ("a micro-batch, beside its layers", "worker's core", [costs["part_s"]]),
        ("the end of a step", "worker's core", [costs["closing_s"]]),
        ("from the last sum to the next step", "", [costs["end_s"]]),
        ("a hop of the ring of sums", "", [costs["hop_s"]]),
        ("to tell one more worker", "leader's core", [messages["tell_s"]]),
        ("a message to a shard: pull, part, commit", "worker's core", of("client_{}_message_s")),
        ("the same", "shard's core", of("{}_message_s")),
        ("a key of 16 floats: pull, part, commit", "worker's core", of("client_{}_s")),
        ("the same", "shard's core", of("{}_s")),
    ]
    return table(("what", "takes", "µs"), [(a, b, _micro(c)) for a, b, c in rows], texts=2)


def _micro(seconds: Sequence[float]) -> str:
    return ", ".join(f"{s * 1e6:.3g}" for s in seconds)


def _figures(curves: Mapping[str, Any]) -> dict[str, str]:
    largest = curves["largest"]
    spent = sorted(largest["spent"].items(), key=lambda item: -item[1])
    size = {one["name"]: {p["workers"]: p for p in one["points"]} for one in curves["size"]}
    sizes = [
        (
            f"{k:,}",
            *(f"{of[k]['throughput']:,.0f} ({of[k]['efficiency']:.0%})" for of in size.values()),
        )
        for k in (1, 10, 100, 200, 500, 1000)
    ]
    return {
        "took": f"{largest['took_s']:.1f}",
        "largest": f"{largest['throughput']:,.0f}",
        "step": f"{largest['step_s'][1] * 1e3:.0f}",
        "shares": ", ".join(f"{name} {share:.0%}" for name, share in spent if share >= 0.005),
        "sizes": table(("workers", *size), sizes),
        "kills": _side_by_side(curves["kills"], "hours a worker lives", "hours", "{:,}", "{:.1%}"),
        "slow": _side_by_side(curves["stragglers"], "times slower", "slower", "{:g}", "{:.0%}"),
        "noise": _side_by_side(curves["noise"], "times vary by", "noise", "{:.0%}", "{:.0%}"),
        "links": _side_by_side(
            curves["links"], "Gbit/s a host", "gbit", "{:g}", "{:,.0f}", "throughput"
        ),
    }


def _side_by_side(
    series: Sequence[Mapping[str, Any]],
    title: str,
    x: str,
    as_x: str,
    as_y: str,
    y: str = "kept",
) -> str:
    """A table with a column for each curve."""
    lines = [
        (as_x.format(point[x]), *(as_y.format(one["points"][n][y]) for one in series))
        for n, point in enumerate(series[0]["points"])
    ]
    return table((title, *(one["name"] for one in series)), lines)
