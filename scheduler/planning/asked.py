"""What the methods come to on one question: for steps as they run, and with interruptions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from scheduler.decision.record import Decision
from scheduler.methods.bench import Bench, Found, methods_for
from scheduler.methods.exact import Solution, fastest_by_steps, solve
from scheduler.planning.executed import MOST_STALE, executed, fastest, fills, holds
from scheduler.planning.infeasible import barred
from scheduler.problem.cost import TOLERANCE, CostModel
from scheduler.problem.deadline import MARGIN
from scheduler.problem.demands import Demands
from scheduler.problem.interruptions import Expected
from scheduler.problem.plan import Plan
from scheduler.problem.steps import LADDER, Steps
from scheduler.problem.workload import Resources, Workload

_SLOWER = 4  # searches with what the best plan so far loses to interruptions
_TURNS = 12  # plans made anew, as what a plan comes to shows what is missing
_MOST_PARTS = 64  # micro-batches of a flushed step, where the planner chooses
_FASTEST_S = 0.02  # of the solver, for the fastest plan where its pipeline does not fill
_PARTS_S = 0.1  # of the solver, to compare numbers of micro-batches
_CLOSE = 1.01  # costs so near each other are not worth more micro-batches


@dataclass(frozen=True, slots=True)
class Answer:
    """What the methods came to; no plan costs less than `bound`.

    `fastest` is the fastest plan that was found within limits and cap, whatever the floor.
    """

    chosen: str
    results: Mapping[str, Found]
    bound: float
    fastest: Plan | None
    bench: Bench | None

    @property
    def plan(self) -> Plan:
        """The chosen one."""
        return self.results[self.chosen].plan

    @property
    def top(self) -> float:
        """The highest throughput that a plan was found to reach, samples/s."""
        return self.fastest.sustained if self.fastest is not None else 0.0

    @property
    def feasible(self) -> bool:
        """Whether some plan meets the demands."""
        return any(found.plan.feasible for found in self.results.values())

    def executed(self, model: CostModel, floor: float, method: str) -> "Answer":
        """The same with each plan as it runs."""
        results = {
            name: replace(found, plan=executed(model, found.plan, floor))
            for name, found in self.results.items()
        }
        chosen = self.chosen if self.bench is None else self.bench.choose(method, results)
        plans = [found.plan for found in results.values()]
        if self.fastest is not None:
            plans.append(executed(model, self.fastest))
        return replace(self, results=results, chosen=chosen, fastest=fastest(model, plans))


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked, and how."""

    workload: Workload
    resources: Resources
    demands: Demands
    method: str
    seed: int
    finetune: float
    expected: Expected | None = None

    def answer(self) -> tuple[CostModel, Answer]:
        """Plan, with stages side by side on one type where memory asks for it."""
        model, answer = self._settle()
        if not (answer.feasible or model.cuts) and model.overfull:
            # Memory is in the way, or at least may be.
            cut, other = self._settle(cuts=True)
            if other.feasible or other.top > answer.top:
                return cut, other
        return model, answer

    def _settle(self, cuts: bool | None = None, *, fewer: bool = True) -> tuple[CostModel, Answer]:
        """Plan; where units may be taken away, with what that costs the plans that are found.

        Args:
            fewer: besides, plan without each of the types that may be, where there are several:
                units that are lost often slow down all others.
        """
        model, answer = self._answer(cuts)
        if not model.interruptions.matter:
            return model, answer
        aim = self.demands.aim(self.workload.overhead)
        found, bound = [answer], answer.bound
        least = _least_price(model, bound, aim)
        if least > 0:
            found.append(self._expecting(Expected(least), cuts))
            bound = max(bound, found[-1].bound)
        tried: set[Expected] = set()
        for turn in range(_SLOWER):
            best = min(found, key=lambda one: one.plan.rank).plan
            expected = Expected(best.price_per_hour, 1 + best.lost_share, alone=turn % 2 == 1)
            if best.stages and expected not in tried:
                found.append(self._expecting(expected, cuts))
            tried.add(expected)
        if (sure := self.sure()) is not None:
            found.append(sure._answer(cuts)[1])
        if fewer and len(self._unsure) > 1:
            without = [self._without([name]) for name in self._unsure]
            found += [one._settle(cuts, fewer=False)[1] for one in without if one is not None]
        chosen = min(found, key=lambda one: one.plan.rank)
        plans = [one.plan for each in found for one in each.results.values()]
        if chosen.feasible:
            bound = min([bound, *(plan.cost for plan in plans if plan.feasible)])
        quickest = max(found, key=lambda one: one.top).fastest
        return model, replace(chosen, bound=bound, fastest=quickest)

    def sure(self) -> "Asked | None":
        """The same of units that are never taken away; None where the rows cannot lie on such."""
        return self._without(self._unsure)

    @property
    def _unsure(self) -> list[str]:
        return [kind.name for kind in self.resources.types if not kind.is_sure]

    def _without(self, types: Sequence[str]) -> "Asked | None":
        """The same without some types; None where rows lie on one, or layers are pinned to it."""
        if {self.workload.ps_type, *self.demands.pin.values()} & set(types):
            return None
        excluded = tuple(dict.fromkeys([*self.demands.excluded, *types]))
        return replace(self, demands=replace(self.demands, excluded=excluded))

    def assured(self, decision: Decision) -> bool:
        """Whether what it uses is sure, or sure units keep the deadline with the margin."""
        used = decision.total_units
        if all(kind.is_sure for kind in self.resources.types if used.get(kind.name)):
            return True
        sure = self.sure()
        if sure is None:
            return False
        floor = self.demands.min_throughput * MARGIN
        hurried = replace(sure, demands=replace(sure.demands, min_throughput=floor))
        return hurried.answer()[1].feasible

    def _expecting(self, expected: Expected, cuts: bool | None) -> Answer:
        return replace(self, expected=expected)._answer(cuts)[1]

    def _answer(self, cuts: bool | None = None) -> tuple[CostModel, Answer]:
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
            return model, self._faster(model, answer, cuts)
        # Too few micro-batches for so many units, or too many for their memory: plan with each
        # plan's own steps; where there is none, with those that take the least memory.
        parts = plan.micro_batches or steps.least.micro_batches
        steps = replace(steps, micro_batches=parts, simulated=True)
        others = list(self._stepped(steps, cuts))
        bound = answer.bound
        if steps.fixed:
            bound = max(bound, min(other.bound for _, other in others))
        quickest = max((answer, *(other for _, other in others)), key=lambda one: one.top).fastest
        model, answer = min([(model, answer), *others], key=lambda one: one[1].plan.rank)
        bound = min(bound, answer.plan.cost)
        return model, replace(answer, bound=bound, fastest=quickest)

    def _stepped(self, steps: Steps, cuts: bool | None) -> Iterator[tuple[CostModel, Answer]]:
        """Plan by simulated steps: that lack as many updates as they may, and fewer for memory.

        Where all layers fit, fewer make no plan better, and none possible.
        """
        for staleness in range(min(steps.staleness or 0, MOST_STALE), 0, -1):
            model, answer = self._settled(replace(steps, staleness=staleness), cuts)
            yield model, answer
            if not model.overfull:
                return

    def _faster(self, model: CostModel, answer: Answer, cuts: bool | None) -> Answer:
        """With a faster plan where that of the fastest slowest stage does not fill."""
        plan = answer.fastest
        if plan is None or plan.staleness is None or fills(model, plan):
            return answer
        steps = replace(
            model.steps,
            micro_batches=plan.micro_batches,
            staleness=min(model.steps.staleness or 0, MOST_STALE),
            simulated=True,
        )
        stepped = self._model(steps, cuts)
        other = fastest_by_steps(stepped, [model.codes(plan)], _FASTEST_S)
        if other is None or other.sustained <= plan.sustained:
            return answer
        return replace(answer, fastest=executed(stepped, other))

    def _parts(self, steps: Steps, cuts: bool | None) -> tuple[Steps, float]:
        """The fewest micro-batches a step that cost next to nothing, and a bound for any number."""
        aim = self.demands.aim(self.workload.overhead)
        most = min(steps.batch, _MOST_PARTS)
        counts = steps.even(*(min(count, most) for count in (steps.micro_batches, *LADDER)))
        # Micro-batches go round evenly where widths divide them: such as stages would have, were
        # steps neither filled nor rounded.
        whole = self._model(replace(steps, simulated=False, micro_batches=1), cuts)
        if barred(whole):
            return steps, math.inf
        filled = solve(whole, aim, seconds=_PARTS_S)
        if (plan := _best(filled)) is not None:
            widths = {stage.units for stage in plan.stages}
            each = {*widths, math.lcm(*widths)}
            dealt = {width * times for width in each for times in LADDER if width * times <= most}
            counts = sorted({*counts, *steps.even(*dealt)})
        found = {
            count: solve(
                self._model(replace(steps, micro_batches=count), cuts), aim, seconds=_PARTS_S
            )
            for count in counts
        }
        # Of numbers that are not tried no more is known.
        bound = min(filled.lower_bound, *(one.lower_bound for one in found.values()))
        costs = {n: one.plan.cost for n, one in found.items() if one.plan and one.plan.feasible}
        if costs:
            good = [n for n, cost in costs.items() if cost <= min(costs.values()) * _CLOSE]
        else:
            top = max(one.max_throughput for one in found.values())
            good = [n for n, one in found.items() if one.max_throughput * _CLOSE >= top]
        return replace(steps, micro_batches=min(good)), bound

    def _model(self, steps: Steps, cuts: bool | None) -> CostModel:
        return self.demands.model(self.workload, self.resources, cuts, steps, self.expected)

    def _settled(self, steps: Steps, cuts: bool | None) -> tuple[CostModel, Answer]:
        """Plan, with as much to spare for memory and floor as what the plan comes to asks for."""
        floor = aim = self.demands.aim(self.workload.overhead)
        bound = top = 0.0  # the highest pace of a slowest stage
        quickest: Plan | None = None
        for turn in range(_TURNS):
            model = self._model(steps, cuts)
            answer = _answer(model, floor, self.method, self.seed, self.finetune)
            if steps.staleness is None:
                break
            top = max(top, answer.top)
            answer = answer.executed(model, aim, self.method)
            if turn == 0:
                bound = answer.bound
            plan = answer.plan
            quickest = fastest(model, [p for p in (quickest, answer.fastest) if p is not None])
            answer = replace(answer, bound=min(bound, plan.cost), fastest=quickest)
            if plan.feasible or not plan.stages:
                break
            if not holds(model, plan) and steps.depth < steps.deepest:
                steps = replace(steps, depth=min(2 * steps.depth, steps.deepest))
            elif plan.sustained < aim and top > floor and not steps.simulated:
                # The pipeline does not fill: the slowest stage has to be so much faster.
                floor = min(floor * aim / plan.sustained * (1 + TOLERANCE), top)
            else:
                break
        return model, answer


def _best(found: Solution) -> Plan | None:
    """The plan of a solution, the fastest one where none meets the demands."""
    feasible = found.plan is not None and found.plan.feasible
    return found.plan if feasible else found.fastest


def _least_price(model: CostModel, bound: float, aim: float) -> float:
    """Dollars an hour that no plan at a throughput of `aim` is below; `bound` dollars in all.

    A search counts a unit as at most so many times its price, so the work of any plan is not below
    the bound over that; and at a higher throughput less time is left to pay it in.
    """
    if not 0 < bound < math.inf:
        return 0.0
    most = 1 + float(model.interruptions.shared.max())
    return bound * 3600 / model.samples * aim / most * (1 - TOLERANCE)


def _answer(model: CostModel, floor: float, method: str, seed: int, finetune: float) -> Answer:
    """Run the methods, and choose."""
    names = methods_for(method)
    reason = barred(model)
    if reason:
        able = [layer.cost for layer in model.workload.layers]
        assignment = tuple(next(iter(costs)) for costs in able)
        nothing = Plan(False, reason, assignment, (), 0, 0.0, 0.0, math.inf)
        chosen = method if method in names else names[0]
        return Answer(chosen, {chosen: Found(nothing, 0, 0.0)}, math.inf, None, None)
    bench = Bench(model, floor, seed, finetune=finetune)
    results = bench.consider(method)
    chosen = bench.choose(method, results)
    plans = [found.plan for found in results.values()]
    solution = bench.solution
    assert solution is not None
    costs = [plan.cost for plan in plans if plan.feasible]
    # Costs of one plan from two sums differ in the last digit; a bound is below all of them.
    bound = min([solution.lower_bound, *costs])
    if solution.fastest is not None:
        plans.append(solution.fastest)
    return Answer(chosen, results, bound, fastest(model, plans), bench)
