"""Planning: run the methods on one question and put the decision together."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from chassis.near import near_or_all
from scheduler.decision.provenance import input_hash, versions
from scheduler.decision.record import Alternative, Decision
from scheduler.methods.bench import METHODS, Bench, Found, methods_for
from scheduler.methods.exact import solve
from scheduler.planning.executed import LADDER, MOST_STALE, executed, fills, holds
from scheduler.planning.explain import reasons
from scheduler.planning.frontier import frontier
from scheduler.planning.infeasible import barred, why_no_plan
from scheduler.planning.relaxation import relaxations
from scheduler.problem.cost import TOLERANCE, CostModel, Plan
from scheduler.problem.demands import Demands, Pin
from scheduler.problem.fields import Fields, InputError
from scheduler.problem.inputs import ResourcesLike, WorkloadLike, as_resources, as_workload
from scheduler.problem.steps import Steps
from scheduler.problem.wording import money_text
from scheduler.problem.workload import Resources, Workload

_TURNS = 8  # plans made anew, as what a plan comes to shows what is missing
_MOST_PARTS = 64  # micro-batches of a flushed step, where the planner chooses
_PARTS_S = 0.1  # of the solver, to compare numbers of micro-batches
_CLOSE = 1.01  # costs so near each other are not worth more micro-batches


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
            then at least samples / time.
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
    demands = Demands.check(workload, min_throughput, max_price_per_hour, finish_by, pin, exclude)
    if method not in METHODS:
        problem = f"{method!r}: expected a planning method{near_or_all(str(method), METHODS)}"
        raise InputError("", "method", problem)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise InputError("", "seed", f"{seed!r}: expected a whole number from 0 to 4294967295")
    finetune = Fields({"finetune": finetune}, "", "", ("finetune",)).number("finetune")
    ask = _Question(workload, resources, demands, method, seed, finetune)
    model, answer = ask.answer()
    if not (answer.feasible or model.cuts) and model.overfull:
        # Memory is in the way, or at least may be.
        cut, other = ask.answer(cuts=True)
        if other.feasible or other.top > answer.top:
            model, answer = cut, other
    decision = _decision(model, demands, seed, answer)
    if pareto:
        curve = frontier(model, at=[decision.aim] if decision.aim else ())
        decision = replace(decision, pareto=curve)
    return replace(decision, seconds=time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the methods came to; `bound` is a cost, `top` a throughput."""

    chosen: str
    results: Mapping[str, Found]
    bound: float
    top: float
    bench: Bench | None

    @property
    def feasible(self) -> bool:
        """Whether some plan meets the demands."""
        return any(found.plan.feasible for found in self.results.values())

    def executed(self, model: CostModel, floor: float, method: str) -> "_Answer":
        """The same with each plan as it runs."""
        results = {
            name: replace(found, plan=executed(model, found.plan, floor))
            for name, found in self.results.items()
        }
        chosen = self.chosen if self.bench is None else self.bench.choose(method, results)
        return replace(self, results=results, chosen=chosen)


@dataclass(frozen=True, slots=True)
class _Question:
    """What is asked, and how."""

    workload: Workload
    resources: Resources
    demands: Demands
    method: str
    seed: int
    finetune: float

    def answer(self, cuts: bool | None = None) -> tuple[CostModel, _Answer]:
        """Plan for what counts: the slowest stage alone, or the simulated time of a step."""
        steps = Steps.of(self.workload)
        if not steps.staleness:
            least = math.inf
            if steps.simulated and not steps.fixed:
                steps, least = self._parts(steps, cuts)
            model, answer = self._settled(steps, cuts)
            return model, replace(answer, bound=min(answer.bound, least))
        model, answer = self._settled(steps, cuts)
        plan = answer.results[answer.chosen].plan
        if plan.feasible and fills(model, plan):
            return model, answer
        # Too few micro-batches for so many units, or too many for their memory: plan with each
        # plan's own steps.
        parts = steps.micro_batches if steps.fixed else plan.micro_batches or steps.micro_batches
        steps = replace(
            steps,
            micro_batches=parts,
            staleness=min(steps.staleness, MOST_STALE),
            simulated=True,
        )
        other_model, other = self._settled(steps, cuts)
        bound = max(answer.bound, other.bound) if steps.fixed else answer.bound
        if other.results[other.chosen].plan.rank < plan.rank:
            model, answer = other_model, other
        bound = min(bound, answer.results[answer.chosen].plan.cost)
        return model, replace(answer, bound=bound)

    def _parts(self, steps: Steps, cuts: bool | None) -> tuple[Steps, float]:
        """The fewest micro-batches a step that cost next to nothing, and a bound for any number."""
        aim = self.demands.aim(self.workload.overhead)
        found: list[tuple[float, float, Steps]] = []
        bound = math.inf
        most = min(steps.batch, _MOST_PARTS)
        for count in sorted({min(count, most) for count in (steps.micro_batches, *LADDER)}):
            model = self._model(replace(steps, micro_batches=count), cuts)
            if barred(model):
                return steps, math.inf
            solution = solve(model, aim, seconds=_PARTS_S)
            bound = min(bound, solution.lower_bound)
            feasible = solution.plan is not None and solution.plan.feasible
            cost = solution.plan.cost if solution.plan and feasible else math.inf
            found.append((cost, solution.max_throughput, replace(steps, micro_batches=count)))
        least, top = min(cost for cost, _, _ in found), max(rate for _, rate, _ in found)
        good = [
            chosen
            for cost, rate, chosen in found
            if (cost <= least * _CLOSE if math.isfinite(least) else rate * _CLOSE >= top)
        ]
        return good[0], bound

    def _model(self, steps: Steps, cuts: bool | None) -> CostModel:
        return self.demands.model(self.workload, self.resources, cuts, steps)

    def _settled(self, steps: Steps, cuts: bool | None) -> tuple[CostModel, _Answer]:
        """Plan, with as much to spare for memory and floor as what the plan comes to asks for."""
        allowed = steps
        if steps.staleness and not steps.simulated:
            steps = replace(steps, staleness=1)  # the least of weights
        floor = aim = self.demands.aim(self.workload.overhead)
        bound = top = 0.0
        for turn in range(_TURNS):
            model = self._model(steps, cuts)
            answer = _answer(model, floor, self.method, self.seed, self.finetune)
            if steps.staleness is None:
                break
            model = self._model(replace(allowed, depth=steps.depth), cuts)
            answer = answer.executed(model, aim, self.method)
            if turn == 0:
                bound, top = answer.bound, answer.top
            plan = answer.results[answer.chosen].plan
            answer = replace(answer, bound=min(bound, plan.cost), top=max(top, answer.top))
            if plan.feasible or not plan.stages:
                break
            if not holds(model, plan) and steps.depth < steps.deepest:
                steps = replace(steps, depth=min(2 * steps.depth, steps.deepest))
            elif plan.throughput < aim and answer.top > floor and not steps.simulated:
                # The pipeline does not fill: the slowest stage has to be so much faster.
                floor = min(floor * aim / plan.throughput * (1 + TOLERANCE), answer.top)
            else:
                break
        return model, answer


def _answer(model: CostModel, floor: float, method: str, seed: int, finetune: float) -> _Answer:
    """Run the methods, and choose."""
    names = methods_for(method)
    reason = barred(model)
    if reason:
        able = [layer.cost for layer in model.workload.layers]
        assignment = tuple(next(iter(costs)) for costs in able)
        nothing = Plan(False, reason, assignment, (), 0, 0.0, 0.0, math.inf)
        chosen = method if method in names else names[0]
        return _Answer(chosen, {chosen: Found(nothing, 0, 0.0)}, math.inf, 0.0, None)
    bench = Bench(model, floor, seed, finetune=finetune)
    results = bench.consider(method)
    chosen = bench.choose(method, results)
    plans = [found.plan for found in results.values()]
    solution = bench.solution
    assert solution is not None
    costs = [plan.cost for plan in plans if plan.feasible]
    # Costs of one plan from two sums differ in the last digit; a bound is below all of them.
    bound = min([solution.lower_bound, *costs])
    within = [p.throughput for p in plans if p.price_per_hour <= model.max_price]
    top = max([solution.max_throughput, *within])
    return _Answer(chosen, results, bound, top, bench)


def _decision(model: CostModel, demands: Demands, seed: int, answer: _Answer) -> Decision:
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
        overhead=model.workload.overhead if demands.min_throughput else 0.0,
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
    )
    if not found.feasible:
        decision = _infeasible(
            decision, model, demands, [found.plan for found in answer.results.values()]
        )
    return replace(decision, reasons=tuple(_reasons(decision, model, demands)))


def _alternative(method: str, found: Found) -> Alternative:
    return Alternative(method, found.plan, found.seconds, found.evaluations)


def _reasons(decision: Decision, model: CostModel, demands: Demands) -> list[str]:
    return reasons(decision, model.workload, model.resources, model, demands.finish_by)


def _infeasible(
    decision: Decision, model: CostModel, demands: Demands, found: Sequence[Plan]
) -> Decision:
    """Say why there is no plan, or who has one, and what would have to change."""
    able = next((other for other in decision.alternatives if other.plan.feasible), None)
    if able is not None:
        cost = money_text(able.plan.cost)
        return _because(
            decision, f"{decision.plan.reason}; {able.method} meets the demands for {cost}"
        )
    within = [p for p in found if p.stages and p.price_per_hour <= demands.max_price_per_hour]
    fastest = max(within, key=lambda plan: plan.throughput, default=None)
    asked = replace(demands, min_throughput=decision.aim)
    changes = relaxations(
        model.workload, model.resources, asked, fastest, cuts=model.cuts, steps=model.steps
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


def _because(decision: Decision, reason: str) -> Decision:
    return replace(decision, plan=replace(decision.plan, reason=reason))
