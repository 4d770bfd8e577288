"""Planning: run the methods on one question and put the decision together."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from chassis.near import near_or_all
from scheduler.decision.provenance import input_hash, versions
from scheduler.decision.record import Alternative, Decision
from scheduler.methods.bench import METHODS, Found
from scheduler.planning.asked import Answer, Asked
from scheduler.planning.explain import reasons
from scheduler.planning.frontier import frontier
from scheduler.planning.infeasible import why_no_plan
from scheduler.planning.relaxation import relaxations
from scheduler.problem.cost import TOLERANCE, CostModel
from scheduler.problem.deadline import MARGIN
from scheduler.problem.demands import Demands, Pin
from scheduler.problem.fields import Fields, InputError
from scheduler.problem.inputs import ResourcesLike, WorkloadLike, as_resources, as_workload
from scheduler.problem.threads import cut
from scheduler.problem.wording import hours_text, money_text, rate_text, sentence


def plan(
    workload: WorkloadLike,
    resources: ResourcesLike,
    min_throughput: float | None = None,
    method: str = "ppo",
    seed: int = 0,
    pin: Pin = None,
    *,
    exclude: Sequence[str] = (),
    max_price_per_hour: float | None = None,
    finish_by: float | str | None = None,
    pareto: bool = False,
    finetune: float = 0.0,
) -> Decision:
    """Decide which layer runs on which resource type with how many units.

    Args:
        workload, resources: parsed files, dataclasses or messages.
        min_throughput: samples/s to reach; None or 0 for the cheapest plan at any speed.
        method: one of `METHODS`. `auto` (or `best`) returns the best plan of the exact solver, the
            agent and the rules, `all` that of every method; each other method its own plan.
        seed: of the methods that draw; the same seed gives the same plan.
        pin: types that layers must run on, by layer name; or one type per layer.
        exclude: types that no layer may run on; the parameter server still may.
        max_price_per_hour: dollars an hour that all units together may cost; None for no cap.
        finish_by: hours for all samples, or text such as 90m or 2h; the floor on throughput is
            then at least samples / time. A plan whose units may be taken away needs one of units
            that are never, that is fast enough, too: what the job can go over to.
        pareto: also find the curve of cost against throughput, see `scheduler.pareto`.
        finetune: seconds that `ppo` may spend on learning this very problem.

    Returns:
        The decision, with what the other methods came to as alternatives. Where no plan meets the
        demands, `feasible` is false, `reason` names the highest throughput that can be, and
        `relaxations` lists the single changes that make a plan possible.

    Raises:
        InputError: an argument that cannot be used, naming file, key, value, what was expected.
    """
    started = time.perf_counter()
    workload, resources = as_workload(workload), as_resources(resources)
    resources = cut(resources, workload)
    demands = Demands.check(workload, min_throughput, max_price_per_hour, finish_by, pin, exclude)
    if method not in METHODS:
        problem = f"{method!r}: expected a planning method{near_or_all(str(method), METHODS)}"
        raise InputError("", "method", problem)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise InputError("", "seed", f"{seed!r}: expected a whole number from 0 to 4294967295")
    finetune = Fields({"finetune": finetune}, "", "", ("finetune",)).number("finetune")
    ask = Asked(workload, resources, demands, method, seed, finetune)
    model, answer = ask.answer()
    decision = _decision(model, demands, seed, answer)
    if demands.finish_by and decision.feasible and not ask.assured(decision):
        decision = _of_sure_units(ask, decision)
    if pareto:
        curve = frontier(model, at=[decision.aim] if decision.aim else ())
        decision = replace(decision, pareto=curve)
    return replace(decision, seconds=time.perf_counter() - started)


def _decision(model: CostModel, demands: Demands, seed: int, answer: Answer) -> Decision:
    found = answer.results[answer.chosen].plan
    bound, bench = answer.bound, answer.bench
    others = sorted(
        (name for name in answer.results if name != answer.chosen),
        key=lambda name: answer.results[name].plan.rank,
    )
    gap = math.inf
    if found.feasible:
        gap = found.cost / bound - 1 if bound > 0 else 0.0 if found.cost == bound else math.inf
    decision = Decision(
        method=answer.chosen,
        plan=found,
        lower_bound=bound,
        gap=gap,
        seconds=0.0,
        alternatives=tuple(_alternative(name, answer.results[name]) for name in others),
        seed=seed,
        min_throughput=demands.min_throughput,
        overhead=model.workload.overhead,
        max_throughput=answer.top,
        probabilities=bench.probabilities if bench else {},
        values=bench.values if bench else {},
        reasons=(),
        training=bench.training if bench else (),
        workload=model.workload,
        resources=model.resources,
        max_price_per_hour=demands.cap,
        pin=demands.pin,
        excluded=demands.excluded,
        proven=found.feasible and gap <= TOLERANCE,
        input_hash=input_hash(model.workload, model.resources, demands),
        versions=versions(bench.policy if bench else ""),
        created_at=time.time(),
        finish_by=demands.finish_by,
    )
    if not found.feasible:
        decision = _infeasible(decision, model, demands, answer)
    return replace(decision, reasons=tuple(_reasons(decision, model, demands)))


def _alternative(method: str, found: Found) -> Alternative:
    return Alternative(method, found.plan, found.seconds, found.evaluations)


def _reasons(decision: Decision, model: CostModel, demands: Demands) -> list[str]:
    return reasons(decision, model.workload, model.resources, model, demands.finish_by)


def _infeasible(decision: Decision, model: CostModel, demands: Demands, answer: Answer) -> Decision:
    """Say why there is no plan, or who has one, and what would have to change."""
    able = next((other for other in decision.alternatives if other.plan.feasible), None)
    if able is not None:
        cost = money_text(able.plan.cost)
        return _because(
            decision, f"{decision.plan.reason}; {able.method} meets the demands for {cost}"
        )
    found = [found.plan for found in answer.results.values()]
    within = [p for p in found if p.stages and p.price_per_hour <= demands.max_price_per_hour]
    fastest = max(within, key=lambda plan: plan.throughput, default=None)
    asked = replace(demands, min_throughput=decision.aim)
    changes = relaxations(
        model.workload, model.resources, asked, answer.fastest, cuts=model.cuts, steps=model.steps
    )
    share = 1 - decision.overhead
    changes = tuple(
        replace(change, current=change.current * share, needed=change.needed * share)
        if change.key == "min_throughput" and decision.overhead
        else change
        for change in changes
    )
    decision = replace(decision, relaxations=changes)
    return _because(decision, why_no_plan(decision, fastest))


def _of_sure_units(ask: Asked, decision: Decision) -> Decision:
    """The decision of units alone that stay; refused where those do not keep the deadline."""
    sure = ask.sure()
    if sure is None:
        return _unassured(decision, ask.demands)
    model, answer = sure.answer()
    if not answer.feasible:
        return _unassured(decision, ask.demands)
    found = _decision(model, ask.demands, ask.seed, answer)
    reason = (
        "Units that may be taken away are not used: those that stay do not keep the deadline with "
        f"{MARGIN - 1:.0%} to spare, so nothing would make up for what is lost."
    )
    return replace(found, reasons=(*found.reasons, reason))


def _unassured(decision: Decision, demands: Demands) -> Decision:
    """The decision where nothing keeps the deadline once units are taken away."""
    reason = (
        f"finish_by: units that are never taken away do not reach {rate_text(decision.aim)} "
        f"samples/s, so nothing would keep the deadline of {hours_text(demands.finish_by)}"
    )
    refused = replace(decision.plan, feasible=False, reason=reason)
    reasons = (sentence(reason), *decision.reasons)
    return replace(decision, plan=refused, gap=math.inf, proven=False, reasons=reasons)


def _because(decision: Decision, reason: str) -> Decision:
    return replace(decision, plan=replace(decision.plan, reason=reason))
