"""The page about the scheduler's benchmark, made whole from its results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.pages import measured_on, table, write
from bench.scheduler.parts import MICRO_BATCHES
from bench.scheduler.plots import gap_picture, paper_picture, rivals_picture, scaling_picture
from bench.scheduler.statistics import Row, grouped, quantiles
from bench.scheduler.store import Store

_HEAD = """# How good planning is

Made by `python -m bench.scheduler` from `bench/results/scheduler.json`; do not edit. {machine}.

The *gap* of a plan is its cost over the lower bound, less one. The bound is the exact solver's,
after at most 10 s: no plan of the cost model costs less. Where the solver could not prove its
own plan the cheapest, the bound lies below the optimum, and a part of every gap is the bound's.
"""


def write_page(store: Store, docs: Path) -> Path:
    """Write `scheduler_benchmark.md` and the pictures it shows into `docs`; the page's path."""
    sections = {
        "unseen": _unseen,
        "flushed": _flushed,
        "rivals": _rivals,
        "paper": _paper,
        "scaling": _scaling,
        "finetune": _finetune,
    }
    parts = [_HEAD.format(machine=measured_on(store.machine, store.versions))]
    for name, section in sections.items():
        if store.rows(name):
            parts.append(section(store.parts[name], docs / "img"))
    return write(docs / "scheduler_benchmark.md", "\n".join(parts))


def _unseen(part: dict[str, Any], images: Path) -> str:
    gap_picture(part["rows"], images / "scheduler_gap.svg")
    found, settings = part["summary"], part["settings"]
    if not found:
        return ""
    times = [
        (f"{name} layers", _time(of["p50"]), _time(of["p95"]), _time(of["worst"]))
        for name, of in {**found["seconds"], "to 32, all": found["seconds_to_32_layers"]}.items()
        if of
    ]
    error = found["error"].get("worst", 0.0)
    return "\n".join(
        [
            "## `ppo` on problems it has not seen\n",
            f"{settings['count']} problems of `bench/scheduler/workloads.py`, "
            f"seed {settings['seed']}, on {part['date']}: 5 to 64 layers, 2 to 8 types. "
            "A quarter has no floor, a quarter a moderate one, a quarter one of 0.9 to 0.995 of "
            "the highest throughput, and in a quarter limits that stages share bind. *No plan "
            "found* counts problems for which the "
            "exact solver has a plan and `ppo` none; *exact, worst* is the exact solver's worst "
            "gap, above 0 where it could not prove its plan.\n",
            _gap_table(found),
            f"The cost reported differs from the cost model's own by at most {error:.1e} of it.\n",
            "![Share of problems by gap](img/scheduler_gap.svg)\n",
            "Time of a whole call of `plan(...)` after import, bound and alternatives included:\n",
            table(("", "median", "95 %", "worst"), times),
        ]
    )


def _gap_table(found: dict[str, Any]) -> str:
    header = ["", "problems", "proven", "no plan found", "mean", "median", "95 %", "worst"]
    header.append("exact, worst")
    lines = [_gap_cells("all", found["all"])]
    for key in ("demand", "family"):
        lines += [_gap_cells(f"{key}: {name}", some) for name, some in found[key].items()]
    return table(header, lines)


def _flushed(part: dict[str, Any], images: Path) -> str:
    found, settings = part["summary"], part["settings"]
    if not found:
        return ""
    return "\n".join(
        [
            "## Where steps are flushed\n",
            f"The first {settings['count']} of these problems at `staleness: 0`, {MICRO_BATCHES} "
            f"micro-batches a step, on {part['date']}: the price of a plan is the simulation of "
            "its step, the bound the exact solver's for that model, and a floor is as near to the "
            "highest throughput as before. The policy is the same, trained on the other model. "
            f"{_where_proven(part['rows'])}\n",
            _gap_table(found),
        ]
    )


def _where_proven(rows: Sequence[Row]) -> str:
    """How `ppo` does where the best plan is known: bounds of the others may be low."""
    known = [row["gap"] for row in rows if row["proven"]]
    found = quantiles(known)
    return (
        f"Of the {len(known)} problems whose best plan is proven, gaps are {found['mean']:.2%} in "
        f"the mean and {max(known):.2%} at most; how far bounds of the others are too low is not "
        "known."
    )


def _rivals(part: dict[str, Any], images: Path) -> str:
    rivals_picture(part["rows"], images / "scheduler_rivals.svg")
    settings = part["settings"]
    on = {
        budget: len({row["name"] for row in part["rows"] if row["budget"] == budget})
        for budget in ("evaluations", "time")
    }
    titles = {
        "evaluations": "At most as many evaluations as `ppo` made, on "
        f"{on['evaluations']} of the problems (an evaluation provisions one assignment; rules "
        "need but one or a few):",
        "time": f"{settings['times']} times the wall time of `ppo`, any number of evaluations, on "
        f"{on['time']} of the problems:",
    }
    header = ["", "plans", "mean gap", "median", "95 %", "cost / `ppo`", "dearer", "same"]
    header += ["cheaper", "evaluations", "median time"]
    texts = ["## Rivals\n"]
    for budget, methods in part["summary"].items():
        rows = [row for row in part["rows"] if row["budget"] == budget]
        ours = quantiles(list({row["name"]: row["ppo_gap"] for row in rows}.values()))
        took = quantiles(list({row["name"]: row["ppo_seconds"] for row in rows}.values()))
        lines: list[Sequence[str]] = [("`ppo`", "", *_percents(ours)[:3], "1.000", *[""] * 4)]
        lines[0] = (*lines[0], _time(took["p50"]))
        for name, of in sorted(methods.items(), key=lambda item: item[1]["gap"].get("mean", 9e9)):
            ratio = "" if of["cost_to_ppo"] is None else f"{of['cost_to_ppo']:.3f}"
            lines.append(
                (
                    f"`{name}`",
                    f"{of['feasible']} of {of['problems']}",
                    *_percents(of["gap"])[:3],
                    ratio,
                    str(of["dearer"]),
                    str(of["same"]),
                    str(of["cheaper"]),
                    f"{of['evaluations']:,.0f}",
                    _time(of["seconds"]["p50"]),
                )
            )
        texts += [titles[budget] + "\n", table(header, lines)]
    texts.append(
        "*Cost / `ppo`* is the geometric mean over the problems where both have a plan; *dearer*, "
        "*same* and *cheaper* count them. Gaps are of the problems for which a method has a plan.\n"
    )
    texts.append("![Mean gap by method](img/scheduler_rivals.svg)\n")
    return "\n".join(texts)


def _paper(part: dict[str, Any], images: Path) -> str:
    rows = part["rows"]
    paper_picture(rows, images / "scheduler_paper.svg")
    models, methods = list(grouped(rows, "name")), list(grouped(rows, "method"))
    texts = [
        "## The published models\n",
        "CTRDNN, MATCHNET, 2EMB and NCE (`examples/heterps_paper/`), one CPU core measured here "
        "and a V100 estimated from its data sheet, at 0.04 and 2.42 dollars an hour. Cost in "
        "dollars of one pass over 45,840,617 samples, by method, with the budget that it has by "
        "default, and floor:\n",
    ]
    for demand, some in grouped(rows, "demand").items():
        if demand == "highest":
            texts.append("Highest throughput that a method's plan reaches, samples/s:\n")
        else:
            texts.append(f"Floor: {demand}\n" if not demand.startswith("0%") else "No floor\n")
        cells = {(row["method"], row["name"]): row for row in some}
        lines = []
        for method in methods:
            line = [f"`{method}`"]
            for model in models:
                line.append(_paper_cell(cells.get((method, model)), demand == "highest"))
            lines.append(line)
        texts.append(table(("", *models), lines))
    texts.append("![Cost and throughput by method](img/scheduler_paper.svg)\n")
    return "\n".join(texts)


def _paper_cell(row: Row | None, fastest: bool) -> str:
    if row is None:
        return "–"
    if fastest:
        return f"{row['throughput']:,.0f}"
    return "infeasible" if row["cost"] is None else f"{row['cost']:.4f}"


def _scaling(part: dict[str, Any], images: Path) -> str:
    rows = part["rows"]
    scaling_picture(rows, images / "scheduler_time.svg")
    texts = [
        "## Time against size\n",
        "Click models with a floor of half the throughput that greedy can reach; median of three, "
        "of a search one. Every method with the budget it has by default.\n",
        "![Seconds against layers and types](img/scheduler_time.svg)\n",
    ]
    for axis, of in grouped(rows, "axis").items():
        sizes = list(grouped(of, lambda row: f"{row['layers']:,} × {row['types']}"))
        lines = []
        for method, mine in grouped(of, "method").items():
            by_size = grouped(mine, lambda row: f"{row['layers']:,} × {row['types']}")
            cells = [
                _time(quantiles([row["seconds"] for row in by_size[size]])["p50"])
                if size in by_size
                else "–"
                for size in sizes
            ]
            if axis == "largest":
                cells.append("–" if mine[0]["cost"] is None else f"{mine[0]['cost']:,.4g}")
            lines.append((f"`{method}`", *cells))
        header = ("layers × types", *sizes, *(["cost, $"] if axis == "largest" else []))
        texts.append(table(header, lines))
    return "\n".join(texts)


def _finetune(part: dict[str, Any], images: Path) -> str:
    found, settings = part["summary"], part["settings"]
    if not found:
        return ""
    seconds = f"{settings['finetune_s']:g}"
    lines = [
        ("before", *_percents(found["before"])),
        (f"after {seconds} s", *_percents(found["after"]["gap"])),
    ]
    return "\n".join(
        [
            "## Fine-tuning\n",
            f"Gap of `ppo` on {settings['problems']} of the problems, before and after learning "
            f"for {seconds} s on the very problem:\n",
            table(("", "mean", "median", "95 %", "worst"), lines),
        ]
    )


def _gap_cells(name: str, of: dict[str, Any]) -> Sequence[str]:
    missed = str(of["infeasible_where_a_plan_exists"])
    loosest = _percents(of["exact_gap"])[3:]
    return (name, str(of["problems"]), str(of["proven"]), missed, *_percents(of["gap"]), *loosest)


def _percents(of: dict[str, float]) -> tuple[str, ...]:
    return tuple(f"{of[key]:.3%}" if of else "" for key in ("mean", "p50", "p95", "worst"))


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
