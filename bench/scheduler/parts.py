"""What the scheduler's benchmark measures, part by part; each resumes where it was."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from bench.pages import ROOT
from bench.scheduler.families import FAMILIES
from bench.scheduler.runs import (
    REFERENCE_SECONDS,
    RULES,
    SEARCHES,
    Reference,
    gap,
    reference,
    run,
    run_ppo,
)
from bench.scheduler.statistics import against, gaps, grouped, quantiles, size_of
from bench.scheduler.store import Store
from bench.scheduler.workloads import Problem, load_derived, problems
from scheduler import load_resources, load_workload
from scheduler.methods.bench import Budget
from scheduler.problem.fields import InputError

PAPER: Final = ("ctrdnn", "matchnet", "two_embeddings", "nce")
PAPER_FLOORS: Final = (0.0, 0.5, 0.9)  # shares of the highest throughput
_UNREACHABLE: Final = 1e15  # samples/s
MICRO_BATCHES: Final = 16  # of a step that is flushed
FLUSHED_SECONDS: Final = 30.0  # of a processor, for the bound of such a problem
TIMES: Final = 100  # a rival's time, in times of ppo's


@dataclass(slots=True)
class Options:
    """How much to run."""

    store: Store
    count: int = 400
    flushed_problems: int = 200
    seed: int = 1
    rival_problems: int = 48
    timed_problems: int = 24
    budgets: Sequence[str] = ("evaluations", "time")
    finetuned_problems: int = 48
    finetune_s: float = 10.0
    largest: tuple[int, int] = (1000, 16)
    layers: tuple[int, ...] = (5, 8, 16, 32, 64, 128)
    types: tuple[int, ...] = (2, 4, 8, 16)
    methods: tuple[str, ...] = ("ppo", "exact", *RULES, *SEARCHES)
    resume: bool = True
    say: Callable[[str], None] = print


def unseen(options: Options) -> None:
    """Gap, feasibility and time of `ppo` over the unseen problems."""
    _gaps(options, "unseen", options.count, lambda given: given, REFERENCE_SECONDS)


def flushed(options: Options) -> None:
    """As `unseen`, where each step is flushed: priced by the simulation of its micro-batches."""
    _gaps(options, "flushed", options.flushed_problems, _flushed, FLUSHED_SECONDS)


def _gaps(
    options: Options,
    part: str,
    count: int,
    changed: Callable[[Problem], Problem],
    seconds: float,
) -> None:
    settings = {"count": count, "seed": options.seed}
    done = {row["name"] for row in options.store.begin(part, settings, options.resume)}
    _warm_up()
    for number, drawn in enumerate(_problems(options, count)):
        if drawn.name in done:
            continue
        given = changed(drawn)
        solved = reference(given, seconds)
        found = run_ppo(given)
        alone = run(given, "ppo")
        row = {**_about(given), **_solved(solved), **found.to_json()}
        row |= {"evaluations": alone.evaluations, "own_seconds": alone.seconds}
        row["gap"] = gap(found.cost, solved.bound)
        options.store.add(part, row)
        options.say(f"{part} {number + 1}/{count} {given.name}: gap {_percent(row['gap'])}")
    rows = options.store.rows(part)
    summary: dict[str, Any] = {"all": gaps(rows), "error": quantiles([r["error"] for r in rows])}
    for key in ("family", "demand"):
        summary[key] = {name: gaps(some) for name, some in grouped(rows, key).items()}
    summary["seconds"] = {
        name: quantiles([row["seconds"] for row in some])
        for name, some in grouped(sorted(rows, key=lambda r: r["layers"]), size_of).items()
    }
    small = [row["seconds"] for row in rows if row["layers"] <= 32]
    summary["seconds_to_32_layers"] = quantiles(small)
    options.store.finish(part, summary)


def _flushed(given: Problem) -> Problem:
    """The problem at staleness 0, its floor at the same share of what is the highest then."""
    batch = given.workload["reference_batch"]
    work = given.workload | {"staleness": 0, "micro_batches": MICRO_BATCHES, "batch": batch}
    found = replace(given, workload=work)
    if not given.min_throughput:
        return found
    share = given.min_throughput / reference(given).max_throughput
    return replace(found, min_throughput=share * reference(found).max_throughput)


def rivals(options: Options) -> None:
    """Every rival at the same evaluations, and the searches at `TIMES` the time of `ppo`."""
    settings = {
        "problems": options.rival_problems,
        "timed": options.timed_problems,
        "seed": options.seed,
        "times": TIMES,
    }
    before = options.store.begin("rivals", settings, options.resume)
    done = {(row["name"], row["method"], row["budget"]) for row in before}
    subset = list(_spread(options, options.rival_problems))
    timed = {given.name for given in subset[: options.timed_problems]}
    chosen = [method for method in options.methods if method not in ("ppo", "exact")]
    _warm_up()
    for number, given in enumerate(subset):
        budgets = [(method, "evaluations") for method in chosen]
        budgets += [(m, "time") for m in chosen if m in SEARCHES and given.name in timed]
        wanted = [(m, b) for m, b in budgets if b in options.budgets]
        left = [(m, b) for m, b in wanted if (given.name, m, b) not in done]
        if not left:
            continue
        solved, ours = reference(given), run_ppo(given)
        same = Budget(max(1, run(given, "ppo").evaluations))
        longer = Budget(2**31, TIMES * ours.seconds)
        for method, budget in left:
            found = run(given, method, longer if budget == "time" else same)
            row = {
                **_about(given),
                "budget": budget,
                **found.to_json(),
                "gap": gap(found.cost, solved.bound),
                "ppo": ours.cost,
                "ppo_gap": gap(ours.cost, solved.bound),
                "ppo_seconds": ours.seconds,
            }
            options.store.add("rivals", row)
        options.say(f"rivals {number + 1}/{len(subset)} {given.name}")
    rows = options.store.rows("rivals")
    summary = {
        budget: {name: against(of) for name, of in grouped(some, "method").items()}
        for budget, some in grouped(rows, "budget").items()
    }
    options.store.finish("rivals", summary)


def paper(options: Options) -> None:
    """Cost at floors, and the highest throughput, by method on the published models."""
    settings = {
        "models": list(PAPER),
        "floors": list(PAPER_FLOORS),
    }
    before = options.store.begin("paper", settings, options.resume)
    done = {(row["name"], row["demand"], row["method"]) for row in before}
    _warm_up()
    for name in PAPER:
        base = paper_problem(name)
        top = reference(base).max_throughput
        demands = [(f"{share:.0%} of the highest", share * top) for share in PAPER_FLOORS]
        for demand, floor in [*demands, ("highest", top)]:
            given = replace(base, demand=demand, min_throughput=floor)
            solved = reference(given)
            for method in options.methods:
                if (name, demand, method) in done:
                    continue
                try:
                    found = run(given, method)
                except InputError as error:
                    options.say(f"paper {name}: {method}: {error}")
                    continue
                row = {**_about(given), **_solved(solved), **found.to_json()}
                row["gap"] = gap(found.cost, solved.bound)
                options.store.add("paper", row)
        options.say(f"paper {name}")
    options.store.finish("paper", {})


def scaling(options: Options) -> None:
    """Seconds of a plan against layers and against types, and of one very large problem."""
    settings = {
        "layers": list(options.layers),
        "types": list(options.types),
        "largest": list(options.largest),
    }
    before = options.store.begin("scaling", settings, options.resume)
    done = {(row["name"], row["method"]) for row in before}
    sizes = [("layers", layers, 4) for layers in options.layers]
    sizes += [("types", 16, types) for types in options.types]
    _warm_up()
    for axis, layers, types in [*sizes, ("largest", *options.largest)]:
        for seed in range(1 if axis == "largest" else 3):
            given = sized(layers, types, seed)
            methods = ("ppo", "exact", "greedy") if axis == "largest" else options.methods
            for method in methods:
                name = f"{axis}-{given.name}"
                # A search takes as long as its budget, and minutes on the large ones: once.
                if (name, method) in done or (seed > 0 and method in SEARCHES):
                    continue
                # As a user meets it: of ppo the whole call.
                found = run_ppo(given) if method == "ppo" else run(given, method)
                row = {**_about(given), "name": name, "axis": axis, **found.to_json()}
                options.store.add("scaling", row)
                options.say(
                    f"scaling {layers} layers, {types} types: {method} {found.seconds:.3f} s"
                )
    options.store.finish("scaling", {})


def finetune(options: Options) -> None:
    """Gap after seconds of learning on the very problem."""
    settings: dict[str, Any] = {"problems": options.finetuned_problems, "seed": options.seed}
    settings["finetune_s"] = options.finetune_s
    before = options.store.begin("finetune", settings, options.resume)
    done = {row["name"] for row in before}
    _warm_up()
    for number, given in enumerate(_spread(options, options.finetuned_problems)):
        if given.name in done:
            continue
        solved, first = reference(given), run_ppo(given)
        found = run_ppo(given, finetune=options.finetune_s)
        row = {**_about(given), **_solved(solved), **found.to_json()}
        row |= {"gap": gap(found.cost, solved.bound), "before": gap(first.cost, solved.bound)}
        options.store.add("finetune", row)
        options.say(
            f"finetune {number + 1}/{options.finetuned_problems} {given.name}: "
            f"{_percent(row['before'])} to {_percent(row['gap'])}"
        )
    rows = options.store.rows("finetune")
    summary = {"after": gaps(rows), "before": quantiles([row["before"] for row in rows])}
    options.store.finish("finetune", summary)


PARTS: Final[dict[str, Callable[[Options], None]]] = {
    "unseen": unseen,
    "flushed": flushed,
    "rivals": rivals,
    "paper": paper,
    "scaling": scaling,
    "finetune": finetune,
}


def paper_problem(name: str) -> Problem:
    """A published model as profiled here."""
    folder = ROOT / "examples" / "heterps_paper"
    workload = load_workload(folder / "workloads" / f"{name}.yaml")
    offer = load_resources(folder / "resources.yaml")
    return Problem(name, "paper", "none", workload.to_json(), offer.to_json())


def sized(layers: int, types: int, seed: int) -> Problem:
    """A click model of exactly so many layers and types, to be half as fast as greedy can be."""
    workload, resources = FAMILIES["click"](np.random.default_rng(seed), layers, types)
    drawn = Problem(f"{layers}-{types}-{seed}", "click", "moderate", workload, resources)
    # A plan that misses the floor is the fastest of its assignment.
    fastest = run(replace(drawn, min_throughput=_UNREACHABLE), "greedy").throughput
    return replace(drawn, min_throughput=0.5 * fastest)


def _problems(options: Options, count: int) -> Iterator[Problem]:
    return problems(count, options.seed, derived=load_derived())


def _spread(options: Options, count: int) -> Iterator[Problem]:
    """Problems that cover families, demands and sizes: the first `count` of the unseen ones."""
    return _problems(options, min(count, options.count))


def _warm_up() -> None:
    """Leave imports out of the first time."""
    small = sized(5, 2, 0)
    run_ppo(small)
    run(small, "ppo")
    reference(small)


def _about(given: Problem) -> dict[str, Any]:
    return {
        "name": given.name,
        "family": given.family,
        "demand": given.demand,
        "layers": given.layers,
        "types": given.types,
        "floor": given.min_throughput,
    }


def _solved(solved: Reference) -> dict[str, Any]:
    return {
        "bound": solved.bound if math.isfinite(solved.bound) else None,
        "exact": solved.exact,
        "proven": solved.proven,
        "exact_seconds": solved.seconds,
    }


def _percent(value: float | None) -> str:
    return "no plan" if value is None else f"{value:.2%}"


def names(parts: Sequence[str]) -> list[str]:
    """The parts asked for, in order; all where none is.

    Raises:
        ValueError: one is unknown.
    """
    for name in parts:
        if name not in PARTS:
            raise ValueError(f"--only {name!r}: expected one of {', '.join(PARTS)}")
    return [name for name in PARTS if not parts or name in parts]
