"""How a decided plan would run: as priced, with queues at the shards, with times that vary.

A plan is priced by even times. Here its steps are simulated as the cost model has them, and then
with what that leaves out: shards that serve one message after another, times that vary, a worker
that is slow, units that are taken away. Interruptions are rare against steps, so that they are
simulated far more often than they are, and what one costs is counted as often as they are.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from scheduler.decision.record import Decision
from scheduler.problem.cost import CostModel
from scheduler.problem.fields import InputError
from scheduler.problem.steps import Steps
from scheduler.simulation.training import Kill, Outcome, Rows, Stage, Training, simulate

NOISE = 0.05  # of the times of single micro-batches, over their mean
SLOW = 2.0  # times as long, for one worker
_FILLED = 0.99  # of the pace that was promised
_BETWEEN = 25  # steps, from kill to kill as simulated
_EVENTS = 2_000_000  # micro-batches of workers in all that are simulated a scenario
_MOST_STEPS, _LEAST_STEPS = 1000, 60


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens, and what the plan then comes to.

    Attributes:
        key: for programs: priced, shards, varied, slow, interrupted.
        throughput: samples/s.
        kept: of the throughput that was promised.
        step_s: seconds a step, in the median; `late_s` in 99 of 100.
        spent: shares of the workers' time, by what they went into.
        serving: share of their time for which shards are busy.
    """

    key: str
    what: str
    throughput: float
    kept: float
    step_s: float
    late_s: float
    spent: Mapping[str, float]
    serving: float


@dataclass(frozen=True, slots=True)
class Interruptions:
    """What units that are taken away cost.

    Attributes:
        per_hour: how many are, of all units of the plan.
        lost_s: until the job is where it was, each time.
        share: of the time, lost for each second trained.
    """

    per_hour: float
    lost_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """How a plan would run, a step being `batch` samples; `assumed` if the workload says none."""

    steps: int
    batch: float
    micro_batches: int
    staleness: int
    assumed: bool
    scenarios: tuple[Scenario, ...]
    interruptions: Interruptions | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def forecast(decision: Decision, seed: int = 0) -> Forecast | None:
    """Simulate the plan of a decision; None where it has none.

    Raises:
        InputError: the decision lacks its inputs, or a step has too many micro-batches.
    """
    if not decision.stages:
        return None
    if decision.workload is None or decision.resources is None:
        raise InputError("", "decision", "has no workload or resources: expected both")
    model = decision.model(decision.workload, decision.resources, as_run=True)
    plain, assumed = _filled(decision, model)
    steps = _steps(plain)
    if steps * plain.micro_batches * len(plain.stages) > 10 * _EVENTS:
        raise InputError(
            "",
            "micro_batches",
            f"{plain.micro_batches:,} a step on {len(plain.stages)} stages: too many to simulate",
        )
    found: list[Scenario] = []

    def tell(key: str, what: str, training: Training) -> Outcome:
        outcome = simulate(training, steps, seed=seed)
        found.append(_scenario(key, what, outcome, decision.throughput))
        return outcome

    tell("priced", "as it was priced", plain)
    served = plain
    if decision.plan.ps_units and decision.workload.ps_core_s:
        per_part = decision.workload.ps_core_s * plain.batch / plain.micro_batches
        cores = decision.plan.ps_units * model.resources.types[model.ps_type].cores
        rows = Rows(cores, serve_s=per_part, priced=True)
        served = replace(plain, rows=rows)
        tell("shards", "queues at the parameter servers", served)
    varied = replace(served, noise=NOISE)
    base = tell("varied", f"and times vary by {NOISE:.0%}", varied)
    slowest = max(range(len(decision.stages)), key=lambda n: decision.stages[n].busy_s)
    stage = decision.stages[slowest]
    text = f"and 1 of {stage.units:,} {stage.type} takes {SLOW:g} times as long"
    tell("slow", text, _with_slow(varied, slowest))
    kills = list(_kills(decision, model))
    lost = _interruptions(varied, kills, base, steps, seed) if kills else None
    if lost is not None:
        found.append(_interrupted(found[-2], lost, decision.throughput))
    return Forecast(
        steps,
        plain.batch,
        plain.micro_batches,
        plain.staleness,
        assumed,
        tuple(found),
        lost,
    )


def training_of(decision: Decision, model: CostModel, steps: Steps) -> Training:
    """A plan as it is priced, in steps."""
    runs = model.runs(model.codes(decision.plan))
    stages = []
    for run, planned in zip(runs, decision.stages, strict=True):
        times = run.stepped(planned.units, steps, model.handled_s(run))
        units, forward, backward, cross, sync = times
        late = run.delay * steps.batch
        stages.append(Stage(units, forward, backward, cross, model.way_s, sync, delay_s=late))
    return Training(
        tuple(stages),
        steps.micro_batches,
        steps.staleness or 0,
        steps.batch,
        whole_batch=steps.whole_batch,
    )


def _filled(decision: Decision, model: CostModel) -> tuple[Training, bool]:
    """The plan in its own steps; where nothing is said of them, in steps that fill its stages."""
    if decision.plan.staleness is not None and decision.plan.micro_batches:
        return training_of(decision, model, model.steps), False
    units = [stage.units for stage in decision.stages]
    parts = max(2 * max(units), sum(units))
    size = model.workload.reference_batch
    for _ in range(4):
        steps = Steps(1, parts, parts * size)
        training = training_of(decision, model, steps)
        if simulate(training, _steps(training)).throughput >= _FILLED * decision.throughput:
            break
        parts *= 2
    return training, True


def _steps(training: Training) -> int:
    """As many as say something and take a second or so."""
    each = training.micro_batches * len(training.stages)
    return max(_LEAST_STEPS, min(_MOST_STEPS, _EVENTS // each))


def _with_slow(training: Training, number: int) -> Training:
    stages = list(training.stages)
    stages[number] = replace(stages[number], slow={stages[number].units // 2: SLOW})
    return replace(training, stages=tuple(stages))


def _kills(decision: Decision, model: CostModel) -> Iterator[Kill]:
    """What is taken away, and how long all wait, as the cost model has it."""
    kinds = {kind.name: kind for kind in model.resources.types}
    units = [(stage.type, stage.units, stage.units == 1) for stage in decision.stages]
    if decision.plan.ps_units:
        units.append((model.workload.ps_type, decision.plan.ps_units, True))
    for name, number, alone in units:
        kind = kinds[name]
        lost_s = kind.alone_s if alone else kind.recovery_s
        if kind.interruptions_per_hour > 0:
            yield Kill(kind.interruptions_per_hour * number, lost_s)


def _interruptions(
    training: Training, kills: list[Kill], base: Outcome, steps: int, seed: int
) -> Interruptions:
    per_hour = sum(kill.per_hour for kill in kills)
    waits_s = sum(kill.per_hour * kill.lost_s for kill in kills) / per_hour
    # What is done again, and filled again, does not depend on how long all have waited before.
    hurried = Kill(3600 / (_BETWEEN * base.seconds / steps), 0.0)
    outcome = simulate(replace(training, kills=(hurried,)), steps, seed=seed)
    again_s = max(0.0, outcome.seconds - base.seconds) / max(1, outcome.kills)
    lost_s = waits_s + again_s
    return Interruptions(per_hour, lost_s, per_hour * lost_s / 3600)


def _scenario(key: str, what: str, outcome: Outcome, promised: float) -> Scenario:
    return Scenario(
        key,
        what,
        outcome.throughput,
        outcome.throughput / promised if promised else math.nan,
        outcome.percentile(50),
        outcome.percentile(99),
        outcome.spent,
        outcome.serving,
    )


def _interrupted(base: Scenario, lost: Interruptions, promised: float) -> Scenario:
    """A scenario with what interruptions take besides."""
    whole = 1 + lost.share
    spent = {name: share / whole for name, share in base.spent.items()}
    spent["lost"] += lost.share / whole
    throughput = base.throughput / whole
    return replace(
        base,
        key="interrupted",
        what=f"and units are taken away {lost.per_hour:.3g} times an hour",
        throughput=throughput,
        kept=throughput / promised if promised else math.nan,
        spent=spent,
    )
