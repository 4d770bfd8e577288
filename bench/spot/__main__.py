"""What spot units cost a job with a deadline, replayed under traces of reclaims.

    python -m bench.spot --seeds 200
    python -m bench.spot --coupled 300

Plans and the guard of the deadline are those that jobs get; recovery takes as long as it was
measured to take (docs/survive.md). Beside it: units that stay alone; another attempt after each
interruption, as without replacement and guard; and a bound that knows the trace. `--coupled`
compares plans with the cheapest of all by trying every plan of so many small problems. Results go
to bench/results/spot.json.
"""

import argparse
import datetime
import json
import statistics
from dataclasses import asdict
from typing import Any

from bench.pages import RESULTS, machine, versions, write
from bench.spot import coupled
from bench.spot.replay import Job, Outcome, guarded, omniscient, unmoved
from bench.spot.traces import drawn, rate_of_a_unit
from scheduler import plan
from scheduler.decision.record import Decision
from scheduler.runs.changes.deadline import MOVING_S, sure_plan

REPLACED_S, RESTARTED_S, CUT_S = 0.5, 5.0, 300.0
DEADLINES = (52.0, 70.0)  # hours
RESTARTS = (REPLACED_S, 900.0)  # seconds: as measured, and a restart of the usual size


def question(recovery_s: float, restart_s: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """A click model: rows on CPU cores, a tower on GPUs that stay or on those at 0.317 of the
    price."""

    def cost(seconds: float) -> dict[str, float]:
        return {
            "compute_s": seconds,
            "sync_s": 0.05 * seconds,
            "transfer_s": 0.02 * seconds,
            "parallel_compute": 0.98,
            "parallel_sync": 0.5,
            "memory_bytes": 1e9,
        }

    tower = {"gpu": cost(0.2), "gpu-spot": cost(0.2)}
    work = {
        "name": "clicks",
        "reference_batch": 4096,
        "samples": 1.4e10,
        "ps_type": "cpu",
        "ps_core_s": 2e-5,
        "layers": [
            {"name": "embedding", "kind": "embedding", "cost": {"cpu": cost(0.3)}},
            *({"name": f"tower{n}", "kind": "dense", "cost": tower} for n in range(3)),
        ],
    }
    gpu = {"price_per_hour": 3.06, "limit": 32, "memory_bytes": 1.6e10, "device": "cuda"}
    spot = {
        "price_per_hour": 0.97,
        "interruptions_per_hour": rate_of_a_unit(),
        "recovery_s": recovery_s,
        "restart_s": restart_s,
    }
    types = [
        {"name": "cpu", "price_per_hour": 0.04, "limit": 256, "memory_bytes": 8e9, "device": "cpu"},
        {"name": "gpu", **gpu},
        {"name": "gpu-spot", **gpu, **spot},
    ]
    return work, {"types": types}


def main() -> int:
    arguments = _parse()
    path = RESULTS / "spot.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    if arguments.coupled:
        results["coupled"] = _coupled(arguments.coupled)
    if arguments.seeds:
        cells = [_cell(h, restart, arguments.seeds) for h in DEADLINES for restart in RESTARTS]
        results["replay"] = cells
    results |= {
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions("heterps", "numpy"),
    }
    print(write(path, json.dumps(results, indent=2) + "\n"))
    missed = sum(cell["missed"] for cell in results.get("replay", []))
    return 1 if missed else 0


def _cell(hours: float, restart_s: float, seeds: int) -> dict[str, Any]:
    """All traces at one deadline, with interruptions that take so long."""
    alone_s = max(RESTARTED_S, restart_s)
    work, offer = question(restart_s, alone_s + CUT_S / 2)
    chosen = plan(work, offer, None, "exact", finish_by=hours)
    assert chosen.feasible, chosen.plan.reason
    stays = plan(work, offer, None, "exact", finish_by=hours, exclude=["gpu-spot"])
    sure_message = sure_plan(chosen.to_message(), hours)
    assert sure_message is not None
    sure = Decision.from_message(sure_message)
    job = _job(chosen, sure, stays, hours, restart_s, alone_s)
    units = sum(job.stages)
    ours: list[Outcome] = []
    others: list[Outcome] = []
    bounds: list[float] = []
    for seed in range(seeds):
        trace = drawn(seed, units, 2 * hours)
        ours.append(guarded(job, trace))
        others.append(unmoved(job, trace, restart_s=900.0))
        bounds.append(omniscient(job, trace))
    trained = [one for one in ours if one.spot_samples > 0.1 * job.samples]
    predicted = chosen.cost / job.samples
    ratios = [one.spot_paid / one.spot_samples / predicted for one in trained]
    paid = [one.paid for one in ours]
    found = {
        "hours": hours,
        "recovery_s": restart_s,
        "seeds": seeds,
        "missed": sum(one.hours > hours * (1 + 1e-9) for one in ours),
        "latest_hours": max(one.hours for one in ours),
        "went_over": sum(one.went_over for one in ours),
        "interruptions_mean": statistics.mean(one.interruptions for one in ours),
        "all_stay_cost": stays.cost,
        "cost_of_all_stay": statistics.mean(paid) / stays.cost,
        "without_guard_of_all_stay": statistics.mean(one.paid for one in others) / stays.cost,
        "without_guard_missed": sum(one.hours > hours for one in others),
        "bound_of_all_stay": statistics.mean(bounds) / stays.cost,
        "over_bound": statistics.mean(p / b - 1 for p, b in zip(paid, bounds, strict=True)),
        "predicted_cost": chosen.cost,
        "lost_share": chosen.plan.lost_share,
        "spot_bill_over_predicted": {
            "mean": statistics.mean(ratios) if ratios else None,
            "least": min(ratios, default=None),
            "most": max(ratios, default=None),
            "runs": len(ratios),
        },
        "job": asdict(job),
    }
    print(json.dumps({key: found[key] for key in found if key != "job"}), flush=True)
    return found


def _job(
    chosen: Decision,
    sure: Decision,
    stays: Decision,
    hours: float,
    restart_s: float,
    alone_s: float,
) -> Job:
    assert chosen.resources is not None
    assert chosen.workload is not None
    prices = {kind.name: kind.price_per_hour for kind in chosen.resources.types}
    units = chosen.total_units
    spot = tuple(stage.units for stage in chosen.stages if stage.type == "gpu-spot")
    assert spot, "the plan takes no spot units"
    return Job(
        samples=chosen.workload.samples,
        hours=hours,
        rate=chosen.throughput,
        price=chosen.plan.price_per_hour,
        waiting_price=chosen.plan.price_per_hour - prices["gpu-spot"] * units["gpu-spot"],
        sure_rate=sure.throughput,
        sure_price=sure.plan.price_per_hour,
        least_rate=stays.throughput,
        least_price=stays.plan.price_per_hour,
        stages=spot,
        replaced_s=restart_s,
        restarted_s=alone_s,
        cut_s=CUT_S,
        moving_s=max(MOVING_S, 2 * alone_s),
    )


def _coupled(count: int) -> dict[str, Any]:
    """How far plans and bounds are from the cheapest of all plans."""
    over: list[float] = []
    below: list[float] = []
    unfound = 0
    for seed in range(count):
        problem = coupled.drawn(seed)
        best = coupled.cheapest(problem)
        found = plan(problem.workload, problem.resources, problem.floor or None, "exact")
        if best is None or not found.feasible:
            unfound += best is not None
            continue
        over.append(found.cost / best[0] - 1)
        below.append(1 - found.lower_bound / best[0])
    result = {
        "problems": count,
        "with_a_plan": len(over) + unfound,
        "plan_not_found": unfound,
        "cheapest_found": sum(x <= 1e-9 for x in over),
        "over_mean": statistics.mean(over),
        "over_most": max(over),
        "bound_below_mean": statistics.mean(below),
        "bound_below_most": max(below),
        "bound_above": sum(x < -1e-9 for x in below),
    }
    print(result, flush=True)
    return result


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.spot", description=__doc__)
    parser.add_argument("--seeds", type=int, default=0, help="traces of each cell")
    parser.add_argument("--coupled", type=int, default=0, help="small problems, all plans tried")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
